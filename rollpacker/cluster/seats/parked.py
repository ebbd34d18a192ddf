"""Moves a program's model and optimizer to host memory (*parks* them), and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def parking(
    *owners: nn.Module | Optimizer | Callable[[], object] | None, device: str = "cuda"
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions: `park` moves tensors off devices of this type into host memory, and
    `wake` moves them back, bit for bit.

    The tensors are those of `owners`: modules (parameters, gradients, buffers) and optimizers
    (state). An owner may also be a function, called at each `park`, that returns one of these or
    None: for an optimizer that is made later. A tensor stays the same object. While it is parked it
    must not be read or written, so save checkpoints inside a phase. Tensors on other devices are
    left alone."""
    from rollpacker.weights.host_store import HostStore

    store = HostStore(device)

    def park() -> None:
        store.offload(tensor for owner in owners for tensor in _tensors_of(owner))

    return park, store.reload


def _tensors_of(owner: object) -> Iterator[Tensor]:
    from torch import Tensor, nn

    if isinstance(owner, nn.Module):
        yield from owner.buffers()
        for parameter in owner.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    elif isinstance(owner, Tensor):
        yield owner
    elif hasattr(owner, "state") and hasattr(owner, "param_groups"):  # wrapped optimizers too
        yield from _tensors_in(owner.state)
    elif callable(owner):
        yield from _tensors_of(owner())
    elif owner is not None:
        raise ValueError(
            f"parking({type(owner).__name__}): give it modules, optimizers, or functions that "
            "return one"
        )


def _tensors_in(state: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in an optimizer's state, also in nested containers."""
    from torch import Tensor

    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors_in(value)
