"""Weights in a model's files, read by slices, and models that read their weights later.

Such a model has its parameters on the meta device, without memory. Its modules remember where their
weights are saved, also after the model was copied, cut into pipeline stages or given adapters.
`read_weights` makes the parameters, each no larger than this process's shard of it. Inside
`reading_on_call` the model can compute before that, with the weights of one layer at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file

_ORIGIN = "_saved_weights_origin"
"""Name of the attribute in which a module keeps its `_Origin`."""
_WHOLE = (...,)
"""The index of all elements of a tensor."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Tensors in files that become one parameter of a model, or several by a conversion."""

    name: str
    """Name of the (first) parameter in the model."""
    converter: WeightConverter | None
    """Conversion that transformers applies to the tensors. None: the parameter is the tensor."""
    tensors: list[tuple[str, str | None]] = field(default_factory=list)
    """Names of the tensors in the files, each with the pattern of the conversion that it fits."""


class SavedWeights:
    """The weights in a model's safetensors files, by the names that they have in `skeleton`, a
    transformers model of any device. `path` is a folder or hub name. Tensors get the dtypes that
    they have in the skeleton; `device` is where a model made of them computes. Raises `OSError` or
    `SafetensorError` for files that cannot be read."""

    def __init__(
        self,
        path: str | Path,
        skeleton: PreTrainedModel,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # it is immutable
    ) -> None:
        self.device = device
        self._skeleton = skeleton
        self._wanted = skeleton.state_dict()
        self._files: dict[str, Any] = {}
        for name in _weight_files(str(path)):
            file = safe_open(name, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]  # theirs
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of all tensors of the skeleton that the files have."""
        self.unknown: list[str] = []
        """Names of the tensors in the files that the skeleton does not have."""
        self._sources: dict[str, _Source] = {}
        self._last: tuple[_Source, dict[str, Tensor]] | None = None
        for source in self._find():
            for name, value in self._tensors(source, on_meta=True).items():
                self._sources[name], self.shapes[name] = source, value.shape
        self._tied: dict[str, str] = {}
        for name, saved in self._ties():
            self._tied[name], self.shapes[name] = saved, self.shapes[saved]

    def __deepcopy__(self, _memo: object) -> SavedWeights:
        return self

    def lacks(self) -> str | None:
        """Return why a model cannot be made of these weights alone. None: it can be."""
        if getattr(self._skeleton.config, "quantization_config", None) is not None:
            return "its files are quantized"
        if missing := sorted(self._wanted.keys() - self.shapes.keys()):
            return f"{missing[0]} is not in its files"
        for name, value in self._wanted.items():
            if value.shape != self.shapes[name]:
                return f"{name} has another shape in its files"
        for names in _tied_names(self._skeleton):  # transformers unties such weights
            if all(name in self._sources for name in names):
                return f"its files have all of the tied weights {', '.join(names)}"
        return None

    def fill(self, target: Tensor, name: str) -> None:
        """Copy a saved tensor into `target`, in place; of a `DTensor` this process's shard."""
        where: Sequence[Any] = _WHOLE
        if isinstance(target, DTensor):
            mesh, placements = target.device_mesh, target.placements
            sizes, starts = compute_local_shape_and_global_offset(target.shape, mesh, placements)
            where = [slice(at, at + size) for at, size in zip(starts, sizes, strict=True)]
            target = target.to_local()
        if target.numel():
            target.copy_(self.read(name, where))

    def read(self, name: str, where: Sequence[Any] = _WHOLE) -> Tensor:
        """Return the elements at the index `where` of a saved tensor, in host memory."""
        name = self._tied.get(name, name)
        source = self._sources[name]
        if source.converter is None:
            return self._at(source.tensors[0][0], source.name, where)
        if self._last is None or self._last[0] is not source:
            self._last = None  # first: two at once would take memory
            self._last = source, self._tensors(source)
        return self._last[1][name][tuple(where)]

    def remember_in(self, model: nn.Module) -> None:
        """Let each module of the skeleton know where its weights are, for `read_weights`."""
        models = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
        layers = {name for one in models for name in one._no_split_modules or ()}
        for name, module in model.named_modules():
            is_layer = type(module).__name__ in layers
            if is_layer or any(True for _ in module.parameters(recurse=False)):
                prefix = f"{name}." if name else ""
                setattr(module, _ORIGIN, _Origin(self, prefix, is_layer))

    def _find(self) -> list[_Source]:
        """Return what becomes of each tensor in the files, as transformers does it."""
        transforms = get_model_conversion_mapping(self._skeleton)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, found = self._skeleton.base_model_prefix, dict[str, _Source]()
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, self._wanted)
            if name not in self._wanted and key in self._wanted:
                name, pattern = rename_source_key(key, [], [], prefix, self._wanted)
            if name in self._wanted:
                converter = None if pattern is None else by_pattern[pattern]
                found.setdefault(name, _Source(name, converter)).tensors.append((key, pattern))
            else:
                self.unknown.append(key)
        return list(found.values())

    def _ties(self) -> Iterator[tuple[str, str]]:
        """Yield the names of tied weights that are not saved, each with the name that is saved."""
        for names in _tied_names(self._skeleton):
            saved = next((name for name in names if name in self._sources), None)
            if saved is not None:
                yield from ((name, saved) for name in names if name not in self._sources)

    def _tensors(self, source: _Source, *, on_meta: bool = False) -> dict[str, Tensor]:
        """Return the whole tensors that come from one source, by their names in the model. With
        `on_meta` they have names and shapes alone, and nothing is read."""

        def tensor(key: str) -> Tensor:
            if on_meta:
                return torch.empty(self._files[key].get_slice(key).get_shape(), device="meta")
            return self._at(key, source.name, _WHOLE)

        if source.converter is None:
            return {source.name: tensor(source.tensors[0][0])}
        converter: Any = deepcopy(source.converter)
        for key, pattern in source.tensors:
            converter.add_tensor(source.name, key, pattern, partial(tensor, key))
        made = converter.convert(
            source.name, model=self._skeleton, config=self._skeleton.config
        ).items()
        return {name: value[0] if isinstance(value, list) else value for name, value in made}

    def _at(self, key: str, name: str, where: Sequence[Any]) -> Tensor:
        part: Tensor = self._files[key].get_slice(key)[tuple(where)]
        return part.to(self._wanted[name].dtype)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the weights of a module are saved."""

    weights: SavedWeights
    prefix: str
    """What comes before the names of the module's own parameters in the saved model."""
    is_layer: bool
    """Whether the module is one of the model's layers, which read all weights inside together."""


def empty_model(build: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model that `build` (a method of transformers) makes of a config, with its tensors
    on the meta device. Each has the dtype that transformers would load it in."""
    with torch.device("meta"):
        model: PreTrainedModel = build(deepcopy(config), dtype=dtype).eval()
    if kept := model._get_dtype_plan(dtype):
        pattern = re.compile("|".join(one.replace("*", ".*") for one in kept))
        for name, value in model.state_dict(keep_vars=True).items():
            if pattern.search(name):
                value.data = value.data.float()
    return model


def empty_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a whole model of this model's class and config, without weights. The given one may be
    sharded, which gives it a subclass, or cut down to a pipeline stage."""
    plain: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    return empty_model(plain._from_config, model.config, model.dtype)


def make_buffers(model: PreTrainedModel, saved: SavedWeights) -> None:
    """Give a model from `empty_model` its buffers: saved ones are read, and others are computed
    as transformers computes them when it loads a model."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            module._buffers[name] = torch.empty_like(buffer, device=saved.device)
            if name in module._non_persistent_buffers_set:
                module._is_hf_initialized = False
            else:
                saved.fill(module._buffers[name], f"{prefix}.{name}".removeprefix("."))
    model.initialize_weights()  # type: ignore[no-untyped-call]  # theirs


@torch.no_grad()
def read_weights(root: nn.Module, device: torch.device) -> None:
    """Make all parameters of `root` that are without memory, on this device, and read them; of a
    `DTensor` only this process's shard. Tied parameters stay tied."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in root.modules():
        origin: _Origin | None = vars(module).pop(_ORIGIN, None)
        for name, empty in [] if origin is None else list(module._parameters.items()):
            assert origin is not None
            if empty is None or not empty.is_meta:
                continue
            if id(empty) not in made:
                value = torch.empty_like(empty, device=device)
                origin.weights.fill(value, origin.prefix + name)
                made[id(empty)] = empty, nn.Parameter(value, requires_grad=empty.requires_grad)
            module._parameters[name] = made[id(empty)][1]


@contextmanager
def reading_on_call() -> Iterator[None]:
    """A context in which models that read their weights later can compute. Each layer, and each
    module with weights outside of the layers, reads its weights when it is called, and drops them
    after. This costs a reading of the whole model for every forward pass."""
    held: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}

    def begin(module: nn.Module, _inputs: object) -> None:
        origin: _Origin | None = vars(module).get(_ORIGIN)
        if origin is None or module in held:
            return
        held[module] = []
        for owner in module.modules() if origin.is_layer else (module,):
            own: _Origin | None = vars(owner).get(_ORIGIN)
            for name, empty in [] if own is None else list(owner._parameters.items()):
                assert own is not None
                if empty is not None and empty.is_meta:
                    value = own.weights.read(own.prefix + name).to(own.weights.device)
                    owner._parameters[name] = nn.Parameter(value, requires_grad=False)
                    held[module].append((owner, name, empty))

    def end(module: nn.Module, _inputs: object, _output: object) -> None:
        for owner, name, empty in held.pop(module, ()):
            owner._parameters[name] = empty

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(held):  # whose forward pass failed
            end(module, None, None)


@contextmanager
def with_stand_ins(model: nn.Module) -> Iterator[None]:
    """A context in which the parameters that a model reads later are on its device, as one number
    seen everywhere: modules that are made to go with them, such as adapters, are then made there,
    with memory."""
    taken = []
    for module in list(model.modules()):
        origin: _Origin | None = vars(module).get(_ORIGIN)
        for name, empty in [] if origin is None else list(module._parameters.items()):
            assert origin is not None
            if empty is not None and empty.is_meta:
                number = torch.zeros((), dtype=empty.dtype, device=origin.weights.device)
                module._parameters[name] = nn.Parameter(number.expand(empty.shape))
                taken.append((module, name, empty))
    try:
        yield
    finally:
        for module, name, empty in taken:
            stand_in = module._parameters[name]
            assert stand_in is not None
            empty.requires_grad_(stand_in.requires_grad)
            module._parameters[name] = empty


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model computes, also if it reads its weights later."""
    origins = (vars(module)[_ORIGIN] for module in model.modules() if _ORIGIN in vars(module))
    origin: _Origin | None = next(origins, None)
    return next(model.parameters()).device if origin is None else origin.weights.device


def reads_later(model: nn.Module) -> bool:
    """Whether the model reads its weights later, and has none yet."""
    return any(_ORIGIN in vars(module) for module in model.modules())


def _tied_names(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _weight_files(path: str) -> list[str]:
    """Return the safetensors files of a model, in a folder or of the hub. Raises `OSError` if there
    are none under the names that transformers uses."""

    def find(name: str) -> str | None:
        if Path(path).is_dir():
            return str(Path(path, name)) if Path(path, name).is_file() else None
        found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return found

    if whole := find("model.safetensors"):
        return [whole]
    index = find("model.safetensors.index.json")
    found = {} if index is None else json.loads(Path(index).read_text("utf-8"))["weight_map"]
    files = [find(name) for name in sorted(set(found.values()))]
    if not files or None in files:
        raise OSError(f"{path}: model.safetensors, or a part of it, is not there")
    return [file for file in files if file is not None]
