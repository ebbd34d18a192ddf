"""A forward pass over several new tokens of some rows, whose caches it extends.

The rows' tokens lie one behind the other, without padding, so that the linear layers see real
tokens alone. Attention goes by *spans*: neighbouring rows that are padded to one shape, where one
call for all of them is cheaper than a call for each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollpacker.engines.embedded.attention import Scores, biased_attention
from rollpacker.engines.embedded.kv_slots import KVSlots

SPAN_COST_SCORES = 30_000
"""Cost of one more attention call, in attention scores that could be computed in the same time.
Measured on a CPU: 40 microseconds a call, 1.4 nanoseconds a score of 16 elements a head."""


class Span(NamedTuple):
    """Rows [start, stop) of a pass, with at most `num_tokens` new tokens each, which attend
    together over the first `width` cache positions."""

    start: int
    stop: int
    num_tokens: int
    width: int


def plan_spans(lengths: np.ndarray, ends: np.ndarray, call_cost: float) -> list[Span]:
    """Plan the spans for rows in this order, and return them. Row i gets `lengths[i]` tokens, which
    end at position `ends[i]`. A row joins the span before it where that costs no more than a span
    of its own. A span costs `call_cost` + rows x tokens x width."""
    spans: list[Span] = []
    for row, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True)):
        if spans:
            start, _, num_tokens, width = spans[-1]
            joined = Span(start, row + 1, max(num_tokens, length), max(width, end))
            if _cost(joined) <= _cost(spans[-1]) + length * end + call_cost:
                spans[-1] = joined
                continue
        spans.append(Span(row, row + 1, length, end))
    return spans


def _cost(span: Span) -> int:
    return (span.stop - span.start) * span.num_tokens * span.width


class NewTokens(NamedTuple):
    """Tokens that rows get in one pass: row `rows[i]` gets `lengths[i]` of them, the first at
    position `starts[i]`."""

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def of(self, span: Span) -> NewTokens:
        return NewTokens(*(one[span.start : span.stop] for one in self))


class ExtendStep:
    """The attention of a pass over several new tokens of each row. The tokens see their row's cache
    and each other causally, and their keys and values go into the cache."""

    def __init__(self, slots: KVSlots, new: NewTokens, call_cost: float = float("inf")) -> None:
        """`new`: the tokens of the pass. `call_cost`: cost of one more span, in rows x tokens x
        width. Infinity: all rows form one span."""
        rows, starts, lengths = new
        self._slots = slots
        self._row_of_token = np.repeat(rows, lengths)
        first = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(first - starts, lengths)
        self._positions = positions
        self.positions = torch.from_numpy(positions).to(slots.device)
        """Position of each of the pass's tokens in its row [tokens]."""
        self.last = first + lengths - 1
        """Index among the pass's tokens of each row's last token [rows]."""
        self._spans = [
            _SpanStep(slots, new.of(span), int(first[span.start]), span)
            for span in plan_spans(lengths, starts + lengths, call_cost)
        ]
        self._flat: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """Return the attention's output; see `RolloutStep.attend`. The inputs have one row, which
        holds the tokens of all rows one behind the other."""
        keys, values = self._slots.keys[layer], self._slots.values[layer]
        for store, new in ((keys, key), (values, value)):
            heads = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            store.view(-1, new.shape[-1]).index_copy_(0, self._flat_places(key.shape[1]), heads)
        outputs = [span.attend(query[0], keys, values, scores) for span in self._spans]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.unsqueeze(0)

    def _flat_places(self, num_kv_heads: int) -> Tensor:
        """Return the index in a layer's keys or values, seen as a list of vectors [head_dim], for
        every head of every token of the pass: [tokens x heads]."""
        flat = self._flat.get(num_kv_heads)
        if flat is None:
            lines = self._row_of_token[:, None] * num_kv_heads + np.arange(num_kv_heads)
            places = lines * self._slots.width + self._positions[:, None]
            flat = torch.from_numpy(places.ravel()).to(self._slots.device)
            self._flat[num_kv_heads] = flat
        return flat


class _SpanStep:
    """The attention of one span, whose tokens begin at index `first` among those of the pass."""

    def __init__(self, slots: KVSlots, new: NewTokens, first: int, span: Span) -> None:
        rows, starts, lengths = new
        self._slots = slots
        self._num_rows, self._num_tokens, self._width = len(rows), span.num_tokens, span.width
        self._tokens = first, int(lengths.sum())
        is_run = len(rows) == 1 or bool((np.diff(rows) == 1).all())
        self._first_row = int(rows[0]) if is_run else None
        self._rows = torch.from_numpy(rows).to(slots.device)
        # Padding repeats a row's last token, and is dropped from what comes out.
        place = np.minimum(np.arange(span.num_tokens), lengths[:, None] - 1)
        self._last_columns = slots.width - 1 - (starts[:, None] + place)
        self._padded: Tensor | None = None
        """Index of the token at each place of padded rows [rows x tokens]. None: none is padded."""
        self._real: Tensor | None = None
        """Indices of the real tokens in the padded rows [rows x tokens]. None: no row is padded."""
        real = np.arange(span.num_tokens) < lengths[:, None]
        if not real.all():
            padded = first + (np.cumsum(lengths) - lengths)[:, None] + place
            self._padded = torch.from_numpy(padded.ravel()).to(slots.device)
            self._real = torch.from_numpy(np.flatnonzero(real.ravel())).to(slots.device)
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """Return the output [the span's tokens, heads, head_dim]. `query` is [heads, the pass's
        tokens, head_dim]; `keys` and `values` are one layer's cache."""
        num_heads, num_kv_heads = query.shape[0], keys.shape[1]
        if self._padded is None:
            query = query.narrow(1, *self._tokens)
        else:
            query = query.index_select(1, self._padded)
        by_row = query.view(num_heads, self._num_rows, self._num_tokens, -1).transpose(0, 1)
        # Query heads that share a key head follow each other as if they were more tokens, so that
        # keys and values are never repeated.
        groups = num_heads // num_kv_heads
        part = (
            by_row.reshape(self._num_rows, num_kv_heads, groups * self._num_tokens, -1),
            self._cached(keys),
            self._cached(values),
        )
        bias = self._bias(scores.sliding_window, groups)
        output = biased_attention(*part, bias, scores)
        output = output.reshape(self._num_rows, num_heads, self._num_tokens, -1)
        flat = output.transpose(1, 2).reshape(-1, num_heads, output.shape[-1])
        return flat if self._real is None else flat.index_select(0, self._real)

    def _cached(self, store: Tensor) -> Tensor:
        """Keys or values of the span's rows, up to the span's width."""
        part = store.narrow(2, 0, self._width)
        if self._first_row is None:
            return part.index_select(0, self._rows)
        return part.narrow(0, self._first_row, self._num_rows)

    def _bias(self, sliding_window: int | None, groups: int) -> Tensor:
        """The attention bias [rows, 1, groups x tokens, width]: 0 where a token may look, else
        minus infinity. `groups`: number of query heads per key head."""
        bias = self._biases.get(sliding_window)
        if bias is None:
            lines = self._slots.bias_line(sliding_window).unfold(0, self._width, 1)
            columns = np.repeat(self._last_columns[:, None], groups, axis=1)
            bias = lines.index_select(0, torch.from_numpy(columns.ravel()).to(lines.device))
            bias = bias.view(self._num_rows, 1, -1, self._width)
            self._biases[sliding_window] = bias
        return bias
