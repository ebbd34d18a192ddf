"""Keys and values of the live rows (samples being decoded), one slot a row. The first slots are in
use, without gaps.

There are two tensors per layer, [slots, key-value heads, width, head_dim]. A row's slot holds its
tokens from position 0 on. What lies beyond a row's length is finite garbage that attention masks
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollpacker.engines.embedded.attention import Scores, biased_attention, causal_attention
from rollpacker.engines.embedded.buckets import Bucket

PromptCache = list[Tensor]
"""Copies of the keys [key-value heads, tokens, head_dim] of one row in all layers, followed by
those of its values in all layers."""
PAIRWISE_MOVES = 4
"""Most moved rows that are copied one by one, each at its own length. More rows are copied
together, at the longest length."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of the keys and values of one token in one layer."""

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVSlots:
    """The cache's tensors, of all rows and layers, which grow on demand and keep their content."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        budget_bytes: int,
    ) -> None:
        self.layers = tuple(layers)
        self.dtype = dtype
        self.device = device
        self.budget_bytes = budget_bytes
        self.num_slots = 0
        self.width = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._row_offsets: dict[int, Tensor] = {}
        self._bias_lines: dict[int | None, Tensor] = {}

    @property
    def bytes_per_token(self) -> int:
        return sum(shape.num_elements for shape in self.layers) * self.dtype.itemsize

    @property
    def budget_tokens(self) -> int:
        """Number of cache positions that fit into the memory budget."""
        return self.budget_bytes // self.bytes_per_token

    def fits(self, num_slots: int, width: int) -> bool:
        """Whether `num_slots` rows of `width` positions fit into the memory budget."""
        return num_slots * width * self.bytes_per_token <= self.budget_bytes

    def reserve(self, num_slots: int, width: int, beside: int = 0) -> bool:
        """Make room for `num_slots` slots of `width` positions each, and keep what is stored.
        Returns whether new tensors were allocated. Neither number shrinks, unless the memory budget
        is too small: `beside` positions of it are used by other things."""
        if num_slots <= self.num_slots and width <= self.width:
            return False
        most = self.budget_tokens - beside
        if num_slots * self.width <= most:
            width = max(width, self.width)
        if self.num_slots * width <= most:
            num_slots = max(num_slots, self.num_slots)
        self._allocate(num_slots, width)
        return True

    def shrink(self, num_slots: int, width: int) -> None:
        """Shrink the storage to the first `num_slots` slots and their first `width` positions."""
        if num_slots and width:
            self._allocate(num_slots, width)
        else:
            self.free()

    def _allocate(self, num_slots: int, width: int) -> None:
        for shape in self.layers:
            for store, dim in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                grown = self._zeros((num_slots, shape.num_kv_heads, width, dim))
                old = store.get(shape.layer)
                if old is not None:
                    kept, columns = min(num_slots, old.shape[0]), min(width, old.shape[2])
                    grown[:kept, :, :columns] = old[:kept, :, :columns]
                store[shape.layer] = grown
        self.num_slots, self.width = num_slots, width
        self._bias_lines = {}
        rows = torch.arange(num_slots, device=self.device)
        self._row_offsets = {
            heads: (rows[:, None] * heads + torch.arange(heads, device=self.device)) * width
            for heads in {shape.num_kv_heads for shape in self.layers}
        }

    def free(self) -> None:
        """Free the memory. The content is lost; `reserve` allocates it again."""
        self.num_slots = self.width = 0
        self.keys, self.values, self._row_offsets, self._bias_lines = {}, {}, {}, {}

    def _zeros(self, size: tuple[int, ...]) -> Tensor:
        """Return zeros for keys or values of this shape. Uninitialized memory may hold NaN, and a
        masked position contributes 0 times its value, which would be NaN. On a CPU the zero pages
        cost nothing until they are touched, so a wide slot takes memory as its sample grows."""
        if self.device.type != "cpu":
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        num_bytes = math.prod(size) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(self.dtype).view(size)

    def flat_positions(self, positions: Tensor) -> dict[int, Tensor]:
        """For each number of key-value heads that a layer has, the indices of position
        `positions[r]` of each row r in such a layer's storage, seen as a list of vectors: [rows x
        heads]."""
        num_rows, column = positions.shape[0], positions.unsqueeze(1)
        return {
            heads: (offsets.narrow(0, 0, num_rows) + column).view(-1)
            for heads, offsets in self._row_offsets.items()
        }

    def bias_line(self, sliding_window: int | None) -> Tensor:
        """A vector [2 x width - 1] of minus infinities around zeros. A row's attention bias is the
        part of it that begins at index width - 1 - (position of the row's newest token).
        `sliding_window`: number of tokens that a token sees, or None for all."""
        line = self._bias_lines.get(sliding_window)
        if line is None:
            size = (2 * self.width - 1,)
            line = torch.full(size, float("-inf"), dtype=self.dtype, device=self.device)
            first = 0 if sliding_window is None else max(0, self.width - sliding_window)
            line[first : self.width] = 0
            self._bias_lines[sliding_window] = line
        return line

    def move(self, source: list[int], target: list[int], lengths: list[int]) -> None:
        """Copy row source[i] to row target[i], its first lengths[i] positions. No row is both
        source and target."""
        if len(source) <= PAIRWISE_MOVES:
            for store in self._stores():
                for from_row, to_row, length in zip(source, target, lengths, strict=True):
                    store[to_row, :, :length] = store[from_row, :, :length]
            return
        self.gather(source, target, max(lengths))

    def gather(self, source: list[int], target: list[int], width: int) -> None:
        """Copy row source[i] to row target[i], the first `width` positions of each. A row may be
        both a source and a target."""
        source_rows = torch.tensor(source, device=self.device)
        target_rows = torch.tensor(target, device=self.device)
        for store in self._stores():
            part = store[:, :, :width]
            part.index_copy_(0, target_rows, part.index_select(0, source_rows))

    def snapshot(self, row: int, length: int) -> PromptCache:
        """A copy of the row's keys and values at its first `length` positions."""
        return [store[row, :, :length].clone() for store in self._stores()]

    def restore(self, cache: PromptCache, rows: slice) -> None:
        """Copy the positions of a snapshot into every one of these rows."""
        for store, part in zip(self._stores(), cache, strict=True):
            store[rows, :, : part.shape[1]] = part

    def _stores(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]

    def clear(self, row: int, first: int = 0) -> None:
        """Set a row's positions from `first` on to zero, since there may be NaNs in them."""
        for store in self._stores():
            store[row, :, first:].zero_()


class PrefillStep:
    """A forward pass over right-padded prompts, which fills the slots of their samples.
    `prompt_of_row` [new rows] is the index of each row's prompt in the batch; the first row is
    `first_row`."""

    def __init__(self, slots: KVSlots, first_row: int, prompt_of_row: Tensor) -> None:
        self._slots = slots
        self._rows = slice(first_row, first_row + len(prompt_of_row))
        self._prompt_of_row = prompt_of_row

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        num_tokens = key.shape[2]
        for store, new in ((self._slots.keys[layer], key), (self._slots.values[layer], value)):
            store[self._rows, :, :num_tokens] = new.index_select(0, self._prompt_of_row)
        output = causal_attention(query, key, value, *scores)
        return output.transpose(1, 2)


class DecodeStep:
    """A forward pass over one new token per row, at `positions` [rows]. Each bucket (range of rows)
    attends over a width of its own."""

    def __init__(self, slots: KVSlots, positions: Tensor, buckets: Sequence[Bucket]) -> None:
        self._slots = slots
        self._positions = positions
        self._buckets = buckets
        self._flat_positions = slots.flat_positions(positions)
        self._biases: dict[int | None, list[Tensor | None]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        keys, values = self._slots.keys[layer], self._slots.values[layer]
        num_rows, num_kv_heads = key.shape[0], key.shape[1]
        flat = self._flat_positions[num_kv_heads]
        keys.view(-1, key.shape[-1]).index_copy_(0, flat, key.reshape(-1, key.shape[-1]))
        values.view(-1, value.shape[-1]).index_copy_(0, flat, value.reshape(-1, value.shape[-1]))
        biases = self._biases.get(scores.sliding_window)
        if biases is None:
            biases = self._make_biases(scores.sliding_window)
        num_heads = query.shape[1]
        # At one token a row the query heads that share a key head stand in for a sequence of
        # queries, so keys and values are read once and never repeated.
        grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, -1)
        outputs = []
        for (start, stop, width, _), bias in zip(self._buckets, biases, strict=True):
            part = (
                grouped.narrow(0, start, stop - start),
                keys.narrow(0, start, stop - start).narrow(2, 0, width),
                values.narrow(0, start, stop - start).narrow(2, 0, width),
            )
            outputs.append(biased_attention(*part, bias, scores))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.reshape(num_rows, 1, num_heads, -1)

    def _make_biases(self, sliding_window: int | None) -> list[Tensor | None]:
        """For each bucket the bias [rows, 1, 1, width]: 0 where a row may look, minus infinity
        elsewhere. None for a bucket whose rows may all look everywhere."""
        biases: list[Tensor | None] = []
        for start, stop, width, is_even in self._buckets:
            if is_even and (sliding_window is None or width <= sliding_window):
                biases.append(None)
                continue
            lines = self._slots.bias_line(sliding_window).unfold(0, width, 1)
            last = self._positions.narrow(0, start, stop - start)
            bias = lines.index_select(0, self._slots.width - 1 - last)
            biases.append(bias.view(stop - start, 1, 1, width))
        self._biases[sliding_window] = biases
        return biases


class LayerProbe:
    """A forward pass that only notes which layers attend, and their keys' and values' shapes."""

    def __init__(self) -> None:
        self.shapes: list[LayerShape] = []
        self.calls: list[tuple[int, Scores]] = []
        """The layer and the scores' settings of each attention call, in order."""
        self.dtype: torch.dtype | None = None

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        self.dtype = key.dtype
        self.calls.append((layer, scores))
        self.shapes.append(LayerShape(layer, key.shape[1], key.shape[-1], value.shape[-1]))
        output = causal_attention(query, key, value, *scores)
        return output.transpose(1, 2)
