"""Low-rank adapters in vLLM. vLLM gets the base model once and one adapter beside it, which every
update replaces. vLLM reads adapters from files only, which exist just while it reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollpacker.engines.embedded.attention import UnsupportedModelError
from rollpacker.engines.engine import EngineError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_NAME, _ID = "policy", 1
_INSTEAD = "or set rollout.engine.name=torch"


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether the model has adapters of peft's."""
    return bool(getattr(model, "peft_config", None))


def base_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters but the adapter's, named as in a model without adapter."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's parameters by name. Of a model without memory they are zeros: a new
    adapter changes nothing either."""
    return {
        name: torch.zeros_like(value, device="cpu") if value.is_meta else value.detach()
        for name, value in model.named_parameters()
        if ".lora_" in name
    }


def adapter_arguments(model: PreTrainedModel, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments for vLLM's start that describe the model's adapter; empty for a model without one.
    `on_cpu`: whether vLLM runs on a CPU. Raises `UnsupportedModelError` if vLLM cannot run an
    adapter of this rank, or of this dtype on a GPU."""
    if not has_adapter(model):
        return {}
    from vllm.config.lora import MaxLoRARanks

    (config,) = _configs(model)
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= config.r]
    if not ranks:
        raise UnsupportedModelError(
            f"model.lora.rank={config.r}: vLLM takes adapters of rank "
            f"{max(get_args(MaxLoRARanks))} at most; set a lower one, {_INSTEAD}"
        )
    if not on_cpu and model.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedModelError(
            "vLLM's kernels for adapters on a GPU compute in bfloat16 or float16 only: set "
            f"model.dtype=bfloat16, {_INSTEAD}"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(ranks),
        "lora_dtype": torch.float32 if on_cpu else "auto",  # the trainer's; the model's
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in _adapted(model)}),
    }


def lora_request(model: PreTrainedModel) -> LoRARequest | None:
    """The request that names the adapter to vLLM. None for a model without an adapter."""
    if not has_adapter(model):
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _ID, "it is loaded before any request")


def load_adapter(model: PreTrainedModel, vllm: LLMEngine, tensors: Mapping[str, Tensor]) -> None:
    """Replace vLLM's adapter by these parameters of the model's. Raises `EngineError` if vLLM can
    have no adapter on a module that has one in the model, or if the files cannot be written."""
    from vllm.lora.request import LoRARequest

    (places,) = {frozenset(found) for found in vllm.apply_model(_places)}
    if strange := [name for name in _adapted(model) if not _is_one_of(name, places)]:
        raise EngineError(
            f"vLLM has no place for an adapter of {strange[0]}: leave it out of "
            f"model.lora.target_modules, {_INSTEAD}"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            _write(model, tensors, Path(folder))
            loaded = vllm.add_lora(LoRARequest(_NAME, _ID, folder, load_inplace=True))
    except OSError as error:
        raise EngineError(
            f"the adapter cannot go through {tempfile.gettempdir()} to vLLM: {error}. Make room "
            "there, or name another folder in the environment (TMPDIR)"
        ) from error
    assert loaded, "vLLM takes an adapter or raises"


def _write(model: PreTrainedModel, named: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter's parameters and config into the folder, as peft does. Raises `OSError`."""
    from peft import get_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(model, dict(named), save_embedding_layers=False)
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        save_file(tensors, folder / "adapter_model.safetensors")
    except SafetensorError as error:
        raise OSError(str(error)) from error
    (config,) = _configs(model)
    config.save_pretrained(str(folder))


def _configs(model: Any) -> list[Any]:
    """The configs of peft's adapters, one for each adapter."""
    return list(model.peft_config.values())


def _adapted(model: PreTrainedModel) -> list[str]:
    """The names of the modules that have adapters."""
    names = (name for name, _ in model.named_parameters())
    return sorted({name.partition(".lora_")[0] for name in names if ".lora_" in name})


def _places(model: torch.nn.Module) -> set[str]:
    """The names, as in weight files, of the modules of vLLM's model that can have adapters. Runs in
    vLLM's process."""
    loras: Any = model.lora_manager
    packed: dict[str, list[str]] = loras.packed_modules
    names = [n for n in loras.modules if n.rpartition(".")[2] in loras.supported_lora_modules]
    return {part for name in names for part in packed.get(name, [name])}


def _is_one_of(name: str, places: frozenset[str]) -> bool:
    """Whether this name of a module is in `places` (`_places`), or is the end of one there: vLLM's
    code for models that handle images too adds a prefix."""
    return name in places or any(place.endswith(f".{name}") for place in places)
