"""Low-rank adapters (peft) inside a transformers model.

The model stays the object that it is: peft replaces the targeted modules in place. Adapter weights
are float32 for a model in lower precision; peft casts around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollpacker.imports import require
from rollpacker.trainer.quantization import dequantized
from rollpacker.trainer.saved_weights import with_stand_ins
from rollpacker.trainer.sharding import placed_like, whole
from rollpacker.trainer.trainer import LoraConfig, TrainerStateError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"
"""peft's default name for a model's only adapter."""
_FILE_PREFIX = "base_model.model."
"""Prefix of module paths in peft's adapter files, which comes from peft's wrapper class."""
WEIGHTS_FILE = "adapter_model.safetensors"


def add_adapter(model: PreTrainedModel, config: LoraConfig, *, seed: int = 0) -> PreTrainedModel:
    """Give the model adapters, in place, freeze all other parameters, and return the model. Its
    outputs stay, since an adapter's second factor begins at zero. `seed` alone decides the first
    factors, so every process gets the same. Raises `ValueError` if peft is missing, if no module
    has a name in `config.target_modules`, or if such a module's weight is tied to another's."""
    require("peft", extra="lora", what="model.lora")
    import peft

    targets = list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    tied = _tied_modules(model)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings(), with_stand_ins(model):
                warnings.simplefilter("ignore", UserWarning)  # of tied weights: refused below
                peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"model.lora.target_modules={targets} does not fit {type(model).__name__}: {error}"
            ) from error
    for name in _adapted_modules(model):
        if name in tied:
            raise ValueError(
                f"model.lora.target_modules names {name}, whose weight is tied to another module's "
                "and cannot have an adapter of its own: leave it out"
            )
    for parameter in adapter_parameters(model).values():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return model


def has_adapter(model: nn.Module) -> bool:
    """Whether `add_adapter` has given the model adapters."""
    return bool(getattr(model, "peft_config", None))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapters, by their names in the model."""
    return {
        f"{path}.{name}": parameter
        for path, module in _adapted_modules(model).items()
        for name, parameter in module.named_parameters()
        if not name.startswith("base_layer.")
    }


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """A context without gradients, in which the model computes what it did without adapters."""
    modules = _adapted_modules(model).values()
    trainable = [p for p in adapter_parameters(model).values() if p.requires_grad]
    for module in modules:
        module.enable_adapters(False)
    # peft also freezes them, and FSDP would remember that of the first forward pass it sees.
    for parameter in trainable:
        parameter.requires_grad_(True)
    try:
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            module.enable_adapters(True)


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model without adapters that computes the same as this one: names,
    shapes and dtypes as in the model's state dict before `add_adapter`, a tied weight once, under
    its first name. A 4-bit matrix is yielded dequantized. Products and sums are in float32 (float64
    for a float64 model), one matrix at a time; the model stays as it is. Weights without an adapter
    are not copied. For a sharded model, all processes must iterate and get `DTensor`s."""
    adapted, adapters = _adapted_modules(model), adapter_parameters(model)
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        module_name, _, rest = name.partition(".base_layer.")
        of_codes = ".weight." in name  # scales and tables
        if id(value) in seen or name in adapters or of_codes:
            continue
        seen.add(id(value))
        value = dequantized(value)
        if rest == "weight":
            change = adapted[module_name].get_delta_weight(_ADAPTER)
            yield f"{module_name}.weight", (value + change.to(_wide(value))).to(value.dtype)
        else:
            yield f"{module_name}.{rest}" if rest else name, value


@torch.no_grad()
def merge_squares(model: nn.Module) -> tuple[float, float]:
    """Return two squared norms: of the part of the adapters' change that merging would lose by
    rounding to the weights' dtype, and of the whole change (0 before the first update). All
    processes of a sharded model must call this."""
    lost, changed = [torch.zeros(())], [torch.zeros(())]
    for module in _adapted_modules(model).values():
        weight = dequantized(module.get_base_layer().weight)
        change = module.get_delta_weight(_ADAPTER).to(_wide(weight))
        exact = weight + change
        rounded = exact.to(weight.dtype).to(exact.dtype)
        lost.append(whole(torch.linalg.vector_norm(rounded - exact)).cpu())
        changed.append(whole(torch.linalg.vector_norm(change)).cpu())
    loss, change = (torch.stack(parts).double().square().sum() for parts in (lost, changed))
    return loss.item(), change.item()


def save_adapter(
    model: nn.Module,
    folder: Path,
    *,
    write: bool = True,
    union: Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = iter,
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json` as peft does, for
    `PeftModel.from_pretrained`. All processes of a sharded model must call this, and the one
    with `write` true writes the files. `union` takes this process's adapters and adds those
    of other pipeline stages."""
    own = (
        (name, whole(value.detach()).contiguous().cpu())
        for name, value in adapter_parameters(model).items()
    )
    tensors = {_FILE_PREFIX + name.replace(f".{_ADAPTER}", ""): value for name, value in union(own)}
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    peft_config: Any = model.peft_config
    config = copy(peft_config[_ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path, *, part: bool = False) -> None:
    """Copy adapters that `save_adapter` wrote into the model's adapters, exactly. With `part` the
    model is a pipeline stage, and other stages' adapters are skipped. Raises `TrainerStateError` if
    the file is missing, broken or of another model."""
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise TrainerStateError(f"{path}: cannot read the adapter: {error}") from error
    parameters = {
        _FILE_PREFIX + name.replace(f".{_ADAPTER}", ""): value
        for name, value in adapter_parameters(model).items()
    }
    if part:
        tensors = {name: value for name, value in tensors.items() if name in parameters}
    different = sorted(parameters.keys() ^ tensors.keys()) or [
        name for name, value in parameters.items() if value.shape != tensors[name].shape
    ]
    if different:
        raise TrainerStateError(
            f"{path}: not the adapter of this model and model.lora: "
            f"{different[0]} is missing in one of the two or has another shape"
        )
    for name, parameter in parameters.items():
        parameter.copy_(placed_like(parameter, tensors[name]))


def _adapted_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules that peft has put in place of the targeted ones, by name. They are `Any`,
    since peft's types do not show the methods that depend on the replaced module."""
    from peft.tuners.lora import LoraLayer

    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def _tied_modules(model: nn.Module) -> set[str]:
    """Return the names of modules whose weight is the same parameter as another module's."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32
