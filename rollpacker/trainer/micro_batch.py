"""Micro-batches: the tensors of some whole rows (token sequences), and the choice of rows that
share a micro-batch.

The choice depends only on the rows' lengths and order, so that a step adds the same numbers in the
same order in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollpacker.spans import Spans, num_outside, outside
from rollpacker.trainer.trainer import ScoreRequest

MICRO_BATCH_OVERHEAD_TOKENS = 192
"""Cost of starting a micro-batch, as a number of padded tokens. Rows are cut into one micro-batch
fewer if that adds fewer tokens of padding than this."""


class Row(NamedTuple):
    """A token sequence that the models run on: a sample, or a part of one. Those response tokens
    that the model sampled are the targets."""

    context: Sequence[int]
    """Tokens of the prompt; at least one."""
    response: Sequence[int]
    """Tokens of the response, of which the model sampled at least one."""
    given: Spans = ()
    """Spans of response tokens that the model was given and did not sample: they are context for
    what follows, and no targets."""

    @property
    def num_targets(self) -> int:
        return num_outside(len(self.response), self.given)


def row_of(sample: ScoreRequest) -> Row:
    """Return a sample's tokens as a row for the models."""
    return Row(sample.prompt_tokens, sample.response_tokens, sample.given)


def row_length(row: Row) -> int:
    """Return the number of a row's tokens that go through the model: the last predicts nothing."""
    return len(row.context) + len(row.response) - 1


def plan_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    overhead_tokens: int = MICRO_BATCH_OVERHEAD_TOKENS,
) -> list[slice]:
    """Cut rows sorted by rising length into runs, so that padded tokens plus `overhead_tokens` for
    each run are the least possible. Every run holds at most `max_tokens` padded tokens (rows times
    its longest row), except that a row longer than that has a run of its own. Exact dynamic
    programme over cut points, O(rows * rows per micro-batch)."""
    sizes = np.asarray(lengths, dtype=np.int64)
    count = len(sizes)
    assert bool((sizes[1:] >= sizes[:-1]).all()), "rows must be sorted by length"
    cost = np.zeros(count + 1, dtype=np.int64)
    cut = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        width = int(sizes[end - 1])
        first = max(end - max(max_tokens // width, 1), 0)
        candidates = cost[first:end] + np.arange(end - first, 0, -1) * width
        best = int(candidates.argmin())
        cost[end] = candidates[best] + overhead_tokens
        cut[end] = first + best
    runs: list[slice] = []
    end = count
    while end > 0:
        runs.append(slice(int(cut[end]), end))
        end = int(cut[end])
    return runs[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """B rows right-padded to width W, or laid end to end in one row without padding (B = 1), and
    the N targets, which are the tokens to be predicted."""

    input_ids: Tensor
    """The rows' tokens, [B, W] int64. A row's last token predicts nothing and is left out, so W is
    the longest row less one, or the sum of all rows less one each."""
    positions: Tensor
    """For each target, index in the flattened [B * W] of the token that predicts it; [N] int64."""
    targets: Tensor
    """The token ids to predict, row after row; [N] int64."""
    num_targets: tuple[int, ...]
    """Number of targets of each row."""
    lengths: tuple[int, ...]
    """Number of each row's tokens in `input_ids`, without padding."""
    model_inputs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the model's forward. Empty for right-padded rows."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in `input_ids` that are not padding."""
        return sum(self.lengths)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Return numbers of host memory on a device. On CUDA they go there from page-locked memory:
    a copy from other memory waits until the GPU has done all that it was told before."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def collate(rows: Sequence[Row], pad_token_id: int, device: torch.device) -> MicroBatch:
    """Make a micro-batch of rows that are padded on the right to the longest."""
    lengths = [row_length(row) for row in rows]
    width = max(lengths)
    input_ids = np.full((len(rows), width), pad_token_id, dtype=np.int64)
    for index, row in enumerate(rows):
        input_ids[index, : lengths[index]] = [*row.context, *row.response[:-1]]
    return micro_batch(rows, input_ids, np.arange(len(rows)) * width, {}, device)


def micro_batch(
    rows: Sequence[Row],
    input_ids: np.ndarray,
    starts: np.ndarray,
    model_inputs: Mapping[str, Any],
    device: torch.device,
) -> MicroBatch:
    """Make the micro-batch of rows whose tokens are in `input_ids` already. `starts` are the rows'
    first positions in the flattened `input_ids`; `model_inputs` go to the model's forward."""
    positions, targets = [], []
    for start, row in zip(starts, rows, strict=True):
        assert row.context and row.num_targets > 0, "a row needs a context and a target"
        first = start + len(row.context) - 1
        places = range(first, first + len(row.response))
        positions.append(np.asarray(outside(places, row.given), dtype=np.int64))
        targets.append(np.asarray(outside(row.response, row.given), dtype=np.int64))
    return MicroBatch(
        input_ids=on_device(torch.from_numpy(input_ids), device),
        positions=on_device(torch.from_numpy(np.concatenate(positions)), device),
        targets=on_device(torch.from_numpy(np.concatenate(targets)), device),
        num_targets=tuple(row.num_targets for row in rows),
        lengths=tuple(row_length(row) for row in rows),
        model_inputs=model_inputs,
    )
