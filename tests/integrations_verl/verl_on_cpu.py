"""A platform `cpu` for verl (VERL_USE_EXTERNAL_MODULES, VERL_PLATFORM=cpu), by verl's own hook, and
what else its trainer and vLLM need to run together where there is no accelerator. This is what the
tests fake: the loss, the queue, the agent loops and the server are verl's and vLLM's."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from vllm.model_executor.layers import utils as linear

device = types.ModuleType("cpu_device")
device.__getattr__ = lambda name: getattr(torch.cpu, name)  # type: ignore[method-assign]
for name, value in {
    "is_available": False,
    "current_device": 0,
    "device_count": 1,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (8 << 30, 16 << 30),
    "get_device_name": "cpu",
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect")),
    "reset_peak_memory_stats": None,
}.items():
    setattr(device, name, lambda *_, _value=value, **__: _value)
device.manual_seed = device.manual_seed_all = torch.manual_seed
device.get_rng_state = lambda *_, **__: torch.get_rng_state()
device.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: Any) -> None:
        pass

    def synchronize(self, index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # ray is told of one that is not there

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights go by shared memory

    def cudart(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """verl asks for "cpu:gloo,cpu:gloo" here, which torch refuses."""
    if backend == "cpu:gloo,cpu:gloo":
        backend = "cpu:gloo"
    return _init_process_group(backend, *args, **kwargs)


torch.distributed.init_process_group = init_process_group


_packed = linear.dispatch_cpu_unquantized_gemm


def unpacked(layer: Any, remove_weight: bool) -> None:
    """vLLM's CPU build packs the weights that it has loaded, and alone of all cannot load others
    into them then."""
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        _packed(layer, remove_weight)


linear.dispatch_cpu_unquantized_gemm = unpacked
