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
"""Function that groups rows (token sequences) into micro-batches: given the rows' lengths and the
most tokens of a micro-batch, it returns the row indices of each micro-batch."""
Budget = Callable[[Sequence[int], Packs], int]
"""Function that returns the most tokens of a micro-batch, given the lengths of the rows that go
through the model in one trainer call, and the `Packs` function that will group them."""


class Batcher:
    """Groups rows of tokens into micro-batches and makes their tensors, for a model and the models
    that run on the same micro-batches. `layout`: `sorted` pads rows of like length to the longest,
    `packed` lays rows end to end; `auto` packs where every model's attention allows it and sorts
    elsewhere. `max_tokens` is the most tokens of a micro-batch, padding included, or a function
    that chooses this number for a call's rows. `others` are the further models (a reference, a
    teacher, a critic). `dtype` is the dtype of the computation; None: that of the weights. Raises
    `ValueError` if `packed` is asked for and a model's attention does not allow it."""

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
        """How rows lie in micro-batches: end to end (`packed`), or padded to the longest
        (`sorted`). For the setting `auto` it is `packed` if all models' attention allows it."""
        return "packed" if self._packed else "sorted"

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group rows of these lengths (`row_length`: tokens that go through the model) into
        micro-batches, and return each one's row indices. A row longer than the most tokens of a
        micro-batch gets its own. The result depends only on lengths and the order of equally long
        rows."""
        packs = plan_packs if self.layout == "packed" else _sorted_runs
        chosen = self._max_tokens
        return packs(lengths, chosen if isinstance(chosen, int) else chosen(lengths, packs))

    def batch(self, rows: Sequence[Row]) -> MicroBatch:
        """Make one micro-batch of these rows, in the given order. Models can run on a packed
        micro-batch only inside the context `attention()`."""
        if self.layout == "packed":
            return pack(rows, self._device)
        return collate(rows, self._pad_token_id, self._device)

    def filler(self) -> MicroBatch:
        """Make the smallest possible micro-batch (one target after one token), for a rank that must
        join the collectives of ranks with more micro-batches. Its loss must get weight 0."""
        token = (self._pad_token_id,)
        return self.batch([Row(token, token)])

    @contextmanager
    def attention(self) -> Iterator[None]:
        """A context that switches the models to packed attention, if this batcher packs rows. A
        trainer call's forward and backward passes run inside it."""
        with ExitStack() as stack:
            for model, kind in self._packed:
                stack.enter_context(packed_attention(model, kind))
            yield


def budget_of(config: TrainConfig, of_stages: Callable[..., int] | None) -> int | Budget:
    """Return a `Batcher`'s `max_tokens` (most tokens of a micro-batch) for this config.
    With pipeline stages, `of_stages` is the method `Stage.budget`, which chooses that
    number; None: no stages."""
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
    """Return the models, each with the kind of packed attention that it will use. Empty if rows are
    to be sorted and padded, as `layout` says or, with `auto`, a model's attention requires. Raises
    `ValueError` if `packed` is asked for and a model's attention does not allow it."""
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
