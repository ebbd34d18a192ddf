"""Cut a whole model down to one pipeline stage, in place.

    embed_tokens | layers 0 1 2 3 | norm | lm_head

    stage 0: embed_tokens, layers 0 1      (token ids in, hidden states out)
    stage 1: layers 2 3, norm, lm_head     (hidden states in, as `inputs_embeds`)

What another stage has becomes `Absent`: it passes its input through, has no parameters, and leaves
every other tensor the name that it has in the whole model. Nothing refers to the absent parameters
any more, so their memory is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollpacker.pipeline.plan.split import check_layers
from rollpacker.trainer.policy import CHECKED_TOKENS, LOW_PRECISION_TOLERANCE, TOLERANCE
from rollpacker.trainer.saved_weights import device_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which stage of a pipeline this is: its index from 0, and the number of stages."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class Absent(nn.Module):
    """Takes the place of a module that another stage has. It returns its first input unchanged."""

    def forward(self, hidden: Tensor, *_others: object, **_named: object) -> Tensor:
        return hidden


def cut(model: Any, place: Place, layers: Sequence[int]) -> None:
    """Cut `model`, a causal LM or its body in eval mode, down to this stage: as many layers as
    `layers` gives each stage, the embeddings on the first, norm and output layer on the last.

    A few tokens are run through the whole model before and through the stage after. Raises
    `ValueError` if the layers do not add up, or the stage does not give what the whole model gave;
    the message names the first module that differs.
    """
    assert not model.training, "dropout would hide what differs"
    parts = _parts_of(model)
    check_layers(layers, num_layers=len(parts.layers), num_stages=place.count)
    first = sum(layers[: place.index])
    own = range(first, first + layers[place.index])
    before = _whole(model, parts)
    for number in range(len(parts.layers)):
        if number not in own:
            parts.layers[number] = Absent()
    if not place.is_first:
        parts.decoder.set_input_embeddings(Absent())
    if not place.is_last:
        setattr(parts.decoder, parts.norm, Absent())
        if model.get_output_embeddings() is not None:
            model.set_output_embeddings(Absent())
    _check_stage(model, parts, own, place, before)


def decoder_of(model: nn.Module) -> Any:
    """Return the part of a causal LM that computes hidden states; `model` itself if it is that."""
    known: Any = model
    return known.get_decoder()


def num_layers_of(model: nn.Module) -> int:
    """Return the number of layers of a causal LM or of its body."""
    number = decoder_of(model).config.get_text_config().num_hidden_layers
    assert isinstance(number, int)
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A weight that embeddings and output layer share. The first stage owns it; the last has a
    copy, the mirror."""

    owner: str
    """Name of the first stage's weight, as in the whole model."""
    mirror: str
    """Name of the last stage's copy of the weight."""
    is_trained: bool


def tied_weight(model: Any) -> Tied | None:
    """Return the weight that embeddings and output layer share, before the model is cut. None: they
    share none."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight is not embeddings.weight:
        return None
    names = {module: name for name, module in model.named_modules()}
    return Tied(
        owner=f"{names[embeddings]}.weight",
        mirror=f"{names[head]}.weight",
        is_trained=weight.requires_grad,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    decoder: Any
    layers: nn.ModuleList
    norm: str
    """Name of the attribute in which the decoder has its last norm, the one after all layers."""


def _parts_of(model: PreTrainedModel) -> _Parts:
    decoder = decoder_of(model)
    kinds = set(model._no_split_modules or ())
    children = dict(decoder.named_children())
    lists = {
        name: child
        for name, child in children.items()
        if isinstance(child, nn.ModuleList) and any(type(one).__name__ in kinds for one in child)
    }
    embeddings = decoder.get_input_embeddings()
    others = [
        name
        for name, child in children.items()
        if name not in lists and child is not embeddings and any(True for _ in child.parameters())
    ]
    if len(lists) != 1 or len(others) != 1:
        raise ValueError(
            f"{type(model).__name__} cannot be cut into pipeline stages: that takes embeddings, "
            f"one list of layers and a norm, and it has {', '.join(children)}; leave "
            "train.pipeline.stages at 1"
        )
    return _Parts(decoder=decoder, layers=next(iter(lists.values())), norm=others[0])


class _Recorder:
    """Records the inputs and outputs of some modules during one forward pass."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.given: dict[str, Tensor] = {}
        self.taken: dict[str, Tensor] = {}
        self._modules = modules

    @torch.no_grad()
    def run(self, decoder: Any, **inputs: Tensor) -> None:
        hooks = [
            module.register_forward_hook(self._hook(name)) for name, module in self._modules.items()
        ]
        try:
            decoder(use_cache=False, **inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def record(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.taken[name] = inputs[0]
            self.given[name] = output[0] if isinstance(output, tuple) else output

        return record


def _named(model: PreTrainedModel, parts: _Parts) -> dict[str, nn.Module]:
    """Return the layers, in their order, and the final norm, by their names in the model."""
    names = {module: name for name, module in model.named_modules()}
    modules = [*parts.layers, getattr(parts.decoder, parts.norm)]
    return {names[module]: module for module in modules}


def _whole(model: PreTrainedModel, parts: _Parts) -> _Recorder:
    embeddings = parts.decoder.get_input_embeddings()
    recorder = _Recorder(_named(model, parts))
    tokens = min(CHECKED_TOKENS, embeddings.num_embeddings)
    ids = torch.arange(tokens, device=device_of(model))
    recorder.run(parts.decoder, input_ids=ids[None])
    return recorder


def _check_stage(
    model: PreTrainedModel, parts: _Parts, own: range, place: Place, before: _Recorder
) -> None:
    names = list(_named(model, parts))
    present = [names[number] for number in own] + ([names[-1]] if place.is_last else [])
    after = _Recorder({name: model.get_submodule(name) for name in present})
    entering = before.taken[present[0]]
    if place.is_first:
        tokens = torch.arange(entering.shape[1], device=entering.device)
        after.run(parts.decoder, input_ids=tokens[None])
    else:
        after.run(parts.decoder, inputs_embeds=entering)
    tolerance = TOLERANCE.get(entering.dtype, LOW_PRECISION_TOLERANCE)
    for name in present:
        whole, here = before.given[name], after.given.get(name)
        if (
            here is None
            or here.shape != whole.shape
            or not ((here - whole).abs().max() <= tolerance * whole.abs().max())
        ):
            raise ValueError(
                f"{type(model).__name__} cannot be cut into pipeline stages: {name} does not give "
                f"in stage {place.index} what it gives in the whole model; leave "
                "train.pipeline.stages at 1"
            )
