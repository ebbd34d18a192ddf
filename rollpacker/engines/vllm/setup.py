"""Opens a vLLM engine in this process: checks versions, chooses vLLM's arguments, and protects
settings of this process that vLLM would change."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import random
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollpacker.did_you_mean import did_you_mean
from rollpacker.engines.embedded.attention import UnsupportedModelError, other_layers
from rollpacker.engines.engine import EngineConfig
from rollpacker.engines.vllm.adapters import adapter_arguments
from rollpacker.engines.vllm.draws import Draws, drawing_with
from rollpacker.engines.vllm.parallel import WORKER
from rollpacker.engines.vllm.verify import RUNNER_VARIABLE, watch
from rollpacker.imports import MissingPackageError, missing
from rollpacker.workers.loopback import GLOO, INTERFACE

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

TESTED = {"vllm": ((0, 32), (0, 33)), "transformers": ((5, 16), (5, 20))}
"""Supported versions of each package: from the first version to before the second. The engine reads
vLLM's records of its requests, which are not a public interface."""
BLOCK_TOKENS = 32
"""Number of tokens in one block of vLLM's cache. Shorter prompts share no block."""
KV_CACHE_GIB = 1.0
"""Memory for keys and values on a CPU, in GiB, if the config sets none. On a GPU they get what is
left of vLLM's share of the memory."""
SHARE_OF_FREE = 0.9
"""Largest share of the free GPU memory that vLLM may use, measured when vLLM starts."""
INVARIANT_FROM = 80
"""Lowest compute capability of an NVIDIA GPU, times ten, for vLLM's batch-invariant kernels."""
_NEED_TORCHVISION = ("qwen3_5_text", "qwen3_5_moe_text")
"""Types of hybrid models whose code vLLM shares with models for images (torchvision)."""
_HYBRIDS_ON_CPU = ("qwen3_5_text",)
_STATE_SIZES_ON_CPU = (64, 128)
"""Sizes of heads for which vLLM's linear attention on a CPU has kernels. Keys and values must have
the same size."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    GLOO: INTERFACE,
}
_OF_MEMORY = re.compile(r"memory|KV cache|cache blocks", re.IGNORECASE)
"""Matches the message of vLLM's `ValueError` for too little memory for keys and values."""


_the_only_one = threading.Lock()
"""Held while this process has a vLLM engine. There can be only one at a time, since vLLM keeps in
globals of the process what an engine shares with its workers."""


def open_vllm(
    model: PreTrainedModel,
    config: EngineConfig,
    draws: Draws,
    tensor_parallel: int = 1,
    *,
    sleeps: bool = False,
) -> LLMEngine:
    """Open a vLLM engine for this model's architecture in this process; with `tensor_parallel` > 1
    its devices have a worker process each. It draws tokens as `draws` says, with the noise (random
    numbers) that is noted there now. Its weights are still random. `sleeps`: whether it must be
    able to free its GPU memory.

    Raises `MissingPackageError` if vLLM is not installed, `UnsupportedModelError` if vLLM cannot
    run the model here, lacks memory for it or runs it only with a model runner that is unknown
    here, and `ValueError` for versions that are not supported, noise that vLLM does not have here,
    or if there is an engine already.
    """
    sentence = missing("vllm", extra="vllm", what="rollout.engine.name=vllm")
    if sentence is not None:
        raise MissingPackageError(
            f"{sentence}, or without a GPU make vllm in a checkout, which makes an environment for "
            "it (.venv-vllm)"
        )
    check_versions()
    _refuse_auto_map(model)
    if not _the_only_one.acquire(blocking=False):
        raise ValueError("this process has an engine of vLLM, and can have but one: close it first")
    try:
        with _environment(_ENVIRONMENT | _of_workers(tensor_parallel)):
            return _open(model, config, draws, tensor_parallel, sleeps)
    except BaseException:
        _the_only_one.release()
        raise


def close_vllm(engine: LLMEngine) -> None:
    """Shut the engine down and free its memory. May be called once."""
    engine.engine_core.shutdown()
    _the_only_one.release()


def pack_output_layer(model: torch.nn.Module) -> None:
    """Renew vLLM's packed copy of the output matrix, from which it computes logits on a CPU. vLLM's
    own reload does not renew it where the output matrix is also the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _of_workers(tensor_parallel: int) -> dict[str, str]:
    """Environment variables for vLLM's worker processes, which divide this process's number of
    threads among them. Empty for one device."""
    if tensor_parallel == 1:
        return {}
    threads = max(torch.get_num_threads() // tensor_parallel, 1)
    return {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _open(
    model: PreTrainedModel,
    config: EngineConfig,
    draws: Draws,
    tensor_parallel: int,
    sleeps: bool,
) -> LLMEngine:
    logging.getLogger("vllm").setLevel(logging.ERROR)
    on_cpu = _platform_is_cpu()
    draws.noise = _noise(config, on_cpu=on_cpu)
    # Modules of vLLM read these variables when they are imported.
    os.environ[RUNNER_VARIABLE] = str(int(draws.noise == "vllm"))
    _choose_kernels(model, config)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    if on_cpu:
        _check_head_size(model)
    if other_layers(model):
        check_hybrid(model, on_cpu=on_cpu)
    arguments = _arguments(model, config, draws, tensor_parallel, sleeps=sleeps, on_cpu=on_cpu)
    arguments |= _given(config, EngineArgs)
    shape = copy.deepcopy(model.config)
    shape.architectures = [type(model).__name__]  # a config that was made by hand may have none
    with tempfile.TemporaryDirectory() as folder:  # all that it reads of the model's
        shape.save_pretrained(folder)
        try:
            # As its `LLM` class does: by default vLLM batches an eighth as much on large GPUs.
            engine = LLMEngine.from_engine_args(
                EngineArgs(model=folder, **arguments), usage_context=UsageContext.LLM_CLASS
            )
        except ValueError as error:
            raise UnsupportedModelError(_why_it_does_not_start(error, config)) from error
    _watch_runners(engine, draws, tensor_parallel)
    return engine


def _noise(config: EngineConfig, *, on_cpu: bool) -> str:
    """The noise (random numbers) that vLLM's tokens are drawn with here: "rollpacker" or "vllm".
    Raises `ValueError` if `rollout.engine.noise` names one that vLLM does not have here."""
    if config.noise == "auto":
        return "rollpacker" if on_cpu else "vllm"
    if config.noise == "vllm" and on_cpu:
        from vllm.triton_utils import HAS_TRITON

        if not HAS_TRITON:
            raise ValueError(
                "rollout.engine.noise=vllm: the sampler of vLLM's second model runner needs Triton,"
                " which its CPU build has not. Set rollpacker, or leave it out"
            )
    return config.noise


def _arguments(
    model: PreTrainedModel,
    config: EngineConfig,
    draws: Draws,
    tensor_parallel: int,
    *,
    sleeps: bool,
    on_cpu: bool,
) -> dict[str, Any]:
    """The arguments of vLLM's engine (`EngineArgs`) that follow from ours."""
    gib = config.kv_cache_gib or (KV_CACHE_GIB if on_cpu else None)
    arguments: dict[str, Any] = {
        "runner": "generate",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": str(model.dtype).removeprefix("torch."),
        "enforce_eager": on_cpu,
        "max_model_len": -1,  # as much of the model's context as the cache holds
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "async_scheduling": draws.noise == "vllm",  # a logits processor of ours needs all tokens
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "kv_cache_memory_bytes": None if gib is None else int(gib * 2**30),
        "worker_extension_cls": f"{WORKER}.Extension",
        **adapter_arguments(model, on_cpu=on_cpu),
    }
    if tensor_parallel > 1:
        arguments |= {
            "tensor_parallel_size": tensor_parallel,
            "distributed_executor_backend": "mp",
        }
    if draws.noise == "rollpacker":
        ours = drawing_with(draws) if tensor_parallel == 1 else f"{WORKER}:DrawTokens"
        arguments["logits_processors"] = [ours]
    if not on_cpu:
        arguments |= {"enable_sleep_mode": sleeps, "gpu_memory_utilization": _share_of_memory()}
    if config.max_slots is not None:
        arguments["max_num_seqs"] = config.max_slots
    return arguments


def _choose_kernels(model: PreTrainedModel, config: EngineConfig) -> None:
    """Set the variable that makes vLLM compute a sequence in every batch alike, as
    `rollout.engine.batch_invariant` says. Raises `ValueError` if it must and cannot."""
    wanted = config.batch_invariant
    reason = _why_not_invariant(model) if wanted else None
    if wanted is True and reason is not None:
        raise ValueError(
            f"rollout.engine.batch_invariant=true: {reason}. Set auto, or leave it out"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1" if wanted and reason is None else "0"


def _why_not_invariant(model: PreTrainedModel) -> str | None:
    """Return why vLLM has no batch-invariant kernels for this model on this device. None: it has
    them."""
    if _platform_is_cpu():
        return "vLLM has no batch-invariant kernels for a CPU"
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and not current_platform.has_device_capability(INVARIANT_FROM):
        return (
            "vLLM's batch-invariant kernels need a GPU of compute capability "
            f"{INVARIANT_FROM / 10} or above, and this one has "
            f"{current_platform.get_device_capability().as_version_str()}"
        )
    if layers := other_layers(model):
        return f"vLLM has no batch-invariant kernels for layers of type {', '.join(layers)}"
    return None


def _given(config: EngineConfig, known: type) -> dict[str, Any]:
    """The user's own arguments of vLLM's engine (`rollout.engine.vllm`). `known` is vLLM's class of
    arguments. Raises `ValueError`, with the name that was probably meant, for one that vLLM does
    not have."""
    if not config.vllm:
        return {}
    names = [field.name for field in dataclasses.fields(known)]
    for name in config.vllm:
        if name not in names:
            raise ValueError(
                f"rollout.engine.vllm.{name}: vLLM {_version('vllm')} has no such argument."
                f"{did_you_mean(name, names)}"
            )
    return dict(config.vllm)


def _watch_runners(engine: LLMEngine, draws: Draws, tensor_parallel: int) -> None:
    """Wrap each worker's model runner so that it draws carried tokens again (verify.py). If a
    runner is of an unknown class, shuts the engine down and raises `UnsupportedModelError`."""
    if tensor_parallel > 1:
        refusals = engine.collective_rpc("watch", args=(draws.noise,))
    else:
        refusals = engine.collective_rpc(lambda worker: watch(worker, draws))
    for refusal in refusals:
        if refusal is not None:
            engine.engine_core.shutdown()
            raise UnsupportedModelError(refusal)


def _why_it_does_not_start(error: ValueError, config: EngineConfig) -> str:
    """vLLM's reason in one line, with the name of our memory setting if it is about memory."""
    reason = " ".join(str(error).split())
    if "Model Runner V2" in reason:
        reason += " (set rollout.engine.noise=rollpacker, for which vLLM's first one is used)"
    if not _OF_MEMORY.search(reason):
        return f"vLLM does not start with this model: {reason}"
    return (
        "vLLM does not start with this model and "
        f"rollout.engine.kv_cache_gib={config.kv_cache_gib}: {reason}"
    )


def _share_of_memory() -> float:
    """The share of the device's whole memory that vLLM may use. vLLM refuses to start if less than
    that is free, and this process's own model may lie on the device, too."""
    free, total = torch.cuda.mem_get_info()
    return SHARE_OF_FREE * free / total


def check_versions() -> None:
    """Raise `ValueError` if the installed vLLM or transformers is not a supported version."""
    for name, (lowest, end) in TESTED.items():
        found = _version(name)
        if not lowest <= tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < end:
            first, last = (".".join(map(str, one)) for one in (lowest, end))
            raise ValueError(
                f"rollout.engine.name=vllm was tried with {name} from {first} to before {last}, "
                f"and {found} is installed: make vllm makes an environment with the right one "
                "(.venv-vllm), or set rollout.engine.name=torch"
            )


def _version(name: str) -> str:
    for package in (name, f"{name}-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise AssertionError(f"{name} can be imported and is not installed")


def _refuse_auto_map(model: PreTrainedModel) -> None:
    if getattr(model.config, "auto_map", None):
        raise UnsupportedModelError(
            f"{model.config._name_or_path} brings code of its own (auto_map in config.json), which "
            "is never run: choose a model that vLLM and transformers know by themselves"
        )


def _platform_is_cpu() -> bool:
    from vllm.platforms import current_platform

    is_cpu: bool = current_platform.is_cpu()
    return is_cpu


def _check_head_size(model: PreTrainedModel) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise UnsupportedModelError(
            f"vLLM's attention on a CPU has no kernel for heads of size {size}, which this model "
            f"has; it has {', '.join(map(str, known))}. The quickstart's model in a shape that it "
            "can run: configs/quickstart-vllm.yaml. Or set rollout.engine.name=torch"
        )


def check_hybrid(model: PreTrainedModel, *, on_cpu: bool) -> None:
    """Raise `UnsupportedModelError` if vLLM cannot run the model's layers other than attention."""
    config, name = model.config.get_text_config(), type(model).__name__
    kind = config.model_type
    if kind in _NEED_TORCHVISION and find_spec("torchvision") is None:
        raise UnsupportedModelError(
            f"vLLM's code for {name} imports torchvision, which is not installed: install the "
            f"build of it that belongs to torch {torch.__version__}"
        )
    if not on_cpu:
        return
    if kind not in _HYBRIDS_ON_CPU:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(other_layers(model))}: of such models vLLM's "
            f"CPU build runs those of type {', '.join(_HYBRIDS_ON_CPU)} alone, and this one is "
            f"{kind}; use a GPU"
        )
    if model.dtype != torch.bfloat16:
        raise UnsupportedModelError(
            "vLLM computes linear attention on a CPU in bfloat16 only: set model.dtype=bfloat16"
        )
    sizes = {config.linear_key_head_dim, config.linear_value_head_dim}
    if len(sizes) > 1 or not sizes <= set(_STATE_SIZES_ON_CPU):
        raise UnsupportedModelError(
            "vLLM's linear attention on a CPU has kernels for heads of size "
            f"{' and '.join(map(str, _STATE_SIZES_ON_CPU))}, the same for keys and values; this "
            f"model has {config.linear_key_head_dim} and {config.linear_value_head_dim}"
        )


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables while vLLM is imported and set up. Afterwards restore what
    vLLM changes in the process: environment variables, the function `torch.set_num_threads`, which
    vLLM disables, and the random number generators."""
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    of_python, of_numpy = random.getstate(), np.random.get_state()
    os.environ.update(settings)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads = set_num_threads
        random.setstate(of_python)
        np.random.set_state(of_numpy)
