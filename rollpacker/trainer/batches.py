"""How a trainer call's samples become micro-batches: sorted and padded, or packed end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import nn

from rollpacker.core.packs import plan_packs
from rollpacker.trainer.micro_batch import (
    MICRO_BATCH_OVERHEAD_TOKENS,
    MicroBatch,
    Row,
    collate,
    plan_micro_batches,
    row_length,
)
from rollpacker.trainer.packing import (
    PackedKind,
    best_kind,
    pack,
    packed_attention,
    why_not,
)
from rollpacker.trainer.trainer import TrainConfig

__all__ = [
    "MICRO_BATCH_OVERHEAD_TOKENS",
    "Batcher",
    "MicroBatch",
    "Row",
    "collate",
    "plan_micro_batches",
    "row_length",
]

Layout = Literal["auto", "sorted", "packed"]
Packs = Callable[[Sequence[int], int], list[list[int]]]
"""A function of row lengths and a budget in tokens that returns the indices of rows by
micro-batch."""
Budget = Callable[[Sequence[int], Packs], int]
"""A function that chooses a micro-batch's budget in tokens, from the lengths of a call's rows and
the `Packs` function that would put them together."""


class Batcher:
    """Plans and makes the micro-batches that a model, and others beside it, are run on.

    `layout`: `sorted` pads rows of like length to the longest, `packed` lays rows end to end;
    `auto` packs where every model's attention allows it and sorts elsewhere. `max_tokens` is the
    budget of a micro-batch, padding included, or a function that chooses it for a call's rows.
    `others` are models that run on the same micro-batches (a reference, a teacher, a critic).
    `dtype` is that of the computation; None: the weights'. Raises `ValueError` if `packed` is asked
    for and cannot be had.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layout: Layout,
        max_tokens: int | Budget,
        pad_token_id: int,
        device: torch.device,
        others: Sequence[nn.Module] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self._packed = _packed_kinds((model, *others), layout, torch.device(device), dtype)
        self._max_tokens = max_tokens
        self._pad_token_id = pad_token_id
        self._device = device

    @property
    def layout(self) -> Literal["sorted", "packed"]:
        """The layout in use: for `auto`, what all models' attention allows."""
        return "packed" if self._packed else "sorted"

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of each micro-batch's rows. `lengths` are `row_length`s: tokens that
        go through the model. The plan depends on lengths and the order of equal ones alone; a row
        longer than the budget has a micro-batch of its own."""
        packs = plan_packs if self.layout == "packed" else _sorted_runs
        chosen = self._max_tokens
        return packs(lengths, chosen if isinstance(chosen, int) else chosen(lengths, packs))

    def batch(self, rows: Sequence[Row]) -> MicroBatch:
        """Make one micro-batch of these rows, in their order. Models can run on a packed one only
        inside `attention()`."""
        if self.layout == "packed":
            return pack(rows, self._device)
        return collate(rows, self._pad_token_id, self._device)

    def filler(self) -> MicroBatch:
        """Make a micro-batch of the least work, one target after one token, for a rank that has
        fewer micro-batches than others and must run along. Give its loss no weight."""
        token = (self._pad_token_id,)
        return self.batch([Row(token, token)])

    @contextmanager
    def attention(self) -> Iterator[None]:
        """A context, with packed attention on, for a trainer call's forward and backward passes."""
        with ExitStack() as stack:
            for model, kind in self._packed:
                stack.enter_context(packed_attention(model, kind))
            yield


def budget_of(config: TrainConfig, of_stages: Callable[..., int] | None) -> int | Budget:
    """Return the `max_tokens` of a `Batcher`. `of_stages` is `Stage.budget`, or None outside of
    pipeline stages."""
    if config.micro_batch_tokens != "auto":
        return config.micro_batch_tokens

    def budget(lengths: Sequence[int], packs: Packs) -> int:
        most = config.most_micro_batch_tokens(max(lengths, default=1))
        return most if of_stages is None else of_stages(lengths, packs, most_tokens=most)

    return budget


def _sorted_runs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    runs = plan_micro_batches([lengths[i] for i in order], max_tokens)
    return [order[run] for run in runs]


def _packed_kinds(
    models: Sequence[nn.Module], layout: Layout, device: torch.device, dtype: torch.dtype | None
) -> list[tuple[nn.Module, PackedKind]]:
    """Return each model with its packed attention; empty for sorted rows. Raises `ValueError` if
    `packed` is asked for and cannot be had."""
    if layout == "sorted":
        return []
    packed: list[tuple[nn.Module, PackedKind]] = []
    for model in models:
        kind = best_kind(model, device, dtype)
        if kind is not None:
            packed.append((model, kind))
        elif layout == "auto":
            return []
        else:
            reason = why_not(model, "grouped", device, dtype)
            raise ValueError(
                f"train.micro_batches=packed is not possible: {reason}; set it to sorted or auto"
            )
    return packed
