"""Messages that cross the borders of a stage with one micro-batch.

A micro-batch may pass several models of a set (policy, reference, critic): their hidden states
enter and leave a stage in the order in which the models are called, which is the same on all
stages, and travel as one message. So do the gradients of models that were called with gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ShapeAndType = tuple[torch.Size, torch.dtype]


@dataclass(slots=True, kw_only=True)
class Passage:
    """One micro-batch's hidden states on one stage: received, and to be sent on."""

    arrived: Tensor | None
    """The message from the stage before. None: zeros, in a micro-batch for this stage alone."""
    entered: list[Tensor] = field(default_factory=list)
    """Hidden states read from the message, with gradients: leaves of the stage's autograd graph."""
    left: list[Tensor] = field(default_factory=list)
    """Hidden states that the stage's models have computed, to be sent to the next stage."""
    differentiable: list[Tensor] = field(default_factory=list)
    """The hidden states in `left` whose gradients the next stage will send back."""
    offset: int = 0
    """Number of the bytes of the message that were read so far."""

    def message(self) -> Tensor:
        """Return the message to the next stage: the hidden states that the models computed."""
        return pack([one.detach() for one in self.left])

    def backward(self, arrived: Tensor | None) -> None:
        """Backpropagate the gradients of this stage's outputs in a message; None: zeros."""
        kinds = [(one.shape, one.dtype) for one in self.differentiable]
        gradients = [
            torch.zeros(shape, dtype=dtype, device=self.differentiable[0].device)
            for shape, dtype in kinds
        ]
        if arrived is not None:
            gradients = unpack(arrived, kinds)
        pairs = zip(self.differentiable, gradients, strict=True)
        # A stage of a model with adapters may have nothing that is trained.
        needed = [(one, gradient) for one, gradient in pairs if one.requires_grad]
        if needed:
            torch.autograd.backward([one for one, _ in needed], [given for _, given in needed])

    def gradient_message(self) -> Tensor:
        """Return the message to the stage before: gradients of the hidden states it sent."""
        return pack([torch.zeros_like(e) if e.grad is None else e.grad for e in self.entered])


class Crossing:
    """Hands the hidden states that a stage receives to its models, and takes those that they
    compute, one micro-batch at a time. A deep copy of a model shares the crossing."""

    def __init__(self) -> None:
        self._passage: Passage | None = None

    def __deepcopy__(self, _memo: object) -> Crossing:
        return self

    def begin(self, arrived: Tensor | None) -> Passage:
        """Begin a micro-batch with the message of the stage before; None: there is no message."""
        self._passage = Passage(arrived=arrived)
        return self._passage

    def enter(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the next model's hidden states, of this shape and dtype, read from the message."""
        passage = self._current()
        if passage.arrived is None:
            hidden = torch.zeros(shape, dtype=dtype, device=device)
        else:
            hidden, passage.offset = _read(passage.arrived, passage.offset, (shape, dtype))
        hidden = hidden.detach().requires_grad_(torch.is_grad_enabled())
        if torch.is_grad_enabled():
            passage.entered.append(hidden)
        return hidden

    def leave(self, hidden: Tensor) -> None:
        passage = self._current()
        passage.left.append(hidden)
        if torch.is_grad_enabled():
            passage.differentiable.append(hidden)

    def _current(self) -> Passage:
        assert self._passage is not None, "a stage's model was called outside of a sweep"
        return self._passage


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor with the content of all: a single tensor itself, several as their bytes."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    return torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in tensors])


def unpack(message: Tensor, kinds: Sequence[ShapeAndType]) -> list[Tensor]:
    """Return the tensors, of these shapes and dtypes, that `pack` put into one message."""
    found, offset = [], 0
    for kind in kinds:
        tensor, offset = _read(message, offset, kind)
        found.append(tensor)
    return found


def _read(message: Tensor, offset: int, kind: ShapeAndType) -> tuple[Tensor, int]:
    shape, dtype = kind
    if message.dtype != torch.uint8:
        assert message.shape == shape and message.dtype == dtype, (message.shape, kind)
        return message, offset
    end = offset + shape.numel() * dtype.itemsize
    # A copy begins where its dtype may begin.
    return message[offset:end].clone().view(dtype).view(shape), end
