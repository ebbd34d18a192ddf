"""Causal attention over rows of different lengths that lie end to end, without padding.

Three implementations, one function each, in the shape that transformers' `AttentionInterface` asks
for. All find the rows in a keyword argument that transformers hands through to every layer.

- `varlen` is torch's FlashAttention over cumulative lengths, on CUDA in half precision.
- `flex` is FlexAttention with a mask of blocks, on CUDA; also with soft caps, and in float32.
- `grouped` pads rows of like length together for attention alone, by plain SDPA on any device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rollpacker.trainer.micro_batch import on_device, plan_micro_batches

ROWS_KEYWORD = "packed_rows"
BLOCK_SIZE = 128
"""Tokens per side of a FlexAttention block."""
GROUP_OVERHEAD_TOKENS = 80
"""Cost of one more group of rows in `grouped` attention, as a number of padded tokens. Rows are put
into one group fewer if that adds fewer tokens of padding than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of similar length, padded to the longest so that attention can run on them together."""

    num_rows: int
    width: int
    from_pack: Tensor
    """Index in the packed rows of each token of the group, [rows * width]. For padding the index is
    0, and the attention computed there is not used."""


class PackedAttention(Protocol):
    """The signature of a function that computes attention within rows laid end to end."""

    def __call__(
        self,
        rows: PackedRows,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Return attention [1, N, H, D] of query [1, H, N, D] to key and value [1, K, N, D], within
        each row. `scaling` None is 1 / sqrt(D). `window` is how many tokens back a token sees,
        itself included; None: all. `softcap` bounds the scores, as in Gemma 2; None: no bound."""
        ...


class PackedRows:
    """Where packed rows begin and end, in the forms that the kinds of attention need
    (positions, cumulative lengths, groups, masks). A form is computed at its first use and
    kept, since all layers use it."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.max_length = max(lengths)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._device = device
        self._block_masks: dict[int | None, BlockMask] = {}
        self._window_masks: dict[tuple[int, int], Tensor] = {}

    def position_ids(self) -> Tensor:
        """Return each token's position in its row, [1, N]. Each row's positions begin at 0."""
        ids = np.concatenate([np.arange(length) for length in self.lengths])
        return on_device(torch.from_numpy(ids)[None], self._device)

    @cached_property
    def cumulative_lengths(self) -> Tensor:
        """Index of each row's first token, and the number of all tokens; [rows + 1] int32."""
        return on_device(torch.from_numpy(self._starts.astype(np.int32)), self._device)

    @cached_property
    def groups(self) -> tuple[list[RowGroup], Tensor]:
        """The rows in groups of similar length, and for each of the N packed tokens its index in
        the groups laid end to end."""
        order = np.argsort(self.lengths, kind="stable")
        lengths = np.asarray(self.lengths)[order]
        to_pack = np.empty(self._starts[-1], dtype=np.int64)
        groups, offset = [], 0
        for run in plan_micro_batches(
            lengths.tolist(), int(self._starts[-1]), GROUP_OVERHEAD_TOKENS
        ):
            width = int(lengths[run.stop - 1])
            real = np.arange(width) < lengths[run][:, None]
            source = np.where(real, self._starts[order[run]][:, None] + np.arange(width), 0)
            to_pack[source[real]] = offset + np.flatnonzero(real)
            offset += source.size
            from_pack = on_device(torch.from_numpy(source.reshape(-1)), self._device)
            groups.append(RowGroup(num_rows=len(source), width=width, from_pack=from_pack))
        return groups, on_device(torch.from_numpy(to_pack), self._device)

    def window_mask(self, width: int, window: int) -> Tensor:
        """Return the bool mask [width, width] of causal attention to `window` tokens, the token
        itself included."""
        if (width, window) not in self._window_masks:
            columns = torch.arange(width, device=self._device)
            distance = columns[:, None] - columns
            self._window_masks[width, window] = (distance >= 0) & (distance < window)
        return self._window_masks[width, window]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return FlexAttention's mask for these rows: causal within each row, to `window` tokens,
        the token itself included (None: to all before)."""
        if window not in self._block_masks:
            self._block_masks[window] = self._new_block_mask(window)
        return self._block_masks[window]

    def _new_block_mask(self, window: int | None) -> BlockMask:
        """Build the mask that `block_mask` keeps, block by block from the rows' starts,
        without an [N, N] matrix."""
        total = int(self._starts[-1])
        row_of = np.repeat(np.arange(len(self.lengths)), self.lengths)
        first = np.arange(0, total, BLOCK_SIZE)
        last = np.minimum(first + BLOCK_SIZE, total) - 1
        # The first token that a block's first query sees, and the first that its last query sees.
        reach = window if window is not None else total
        oldest = np.maximum(self._starts[row_of[first]], first - reach + 1)
        newest = np.maximum(self._starts[row_of[last]], last - reach + 1)
        index = np.arange(len(first))
        causal = index <= index[:, None]
        visible = causal & (last >= oldest[:, None])
        whole = (index < index[:, None]) & (first >= newest[:, None])
        whole &= (first + BLOCK_SIZE <= total)[:, None]
        partial_blocks, whole_blocks = (
            _block_lists(blocks, self._device) for blocks in (visible & ~whole, whole)
        )
        return BlockMask.from_kv_blocks(
            *partial_blocks,
            *whole_blocks,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=_mask_mod(on_device(torch.from_numpy(row_of), self._device), window),
            seq_lengths=(total, total),
        )


def _block_lists(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's lists from `blocks` (bool [Q, K]: whether a block of queries sees a
    block of keys): for each block of queries the number of blocks of keys seen [1, 1, Q], and the
    indices of all blocks of keys, seen ones first [1, 1, Q, K]."""
    counts = blocks.sum(1).astype(np.int32)
    which = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return (
        on_device(torch.from_numpy(counts)[None, None], device),
        on_device(torch.from_numpy(which)[None, None], device),
    )


def _mask_mod(row_of: Tensor, window: int | None) -> Callable[..., Tensor]:
    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_row = (query >= key) & (row_of[query] == row_of[key])
        return same_row if window is None else same_row & (query - key < window)

    return visible


def _score_mod(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_where: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def flex(
    rows: PackedRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute attention within packed rows by FlexAttention. On a CPU the whole score matrix is
    computed and there is no backward pass, which serves tests alone."""
    run: Any = _compiled_flex_attention() if query.is_cuda else flex_attention
    # Inside a compiled layer a soft cap would become a symbol, which FlexAttention cannot take.
    with torch._dynamo.config.patch(specialize_float=True):
        output: Tensor = run(
            query,
            key,
            value,
            score_mod=None if softcap is None else _score_mod(softcap),
            block_mask=rows.block_mask(window),
            scale=scaling,
            enable_gqa=query.shape[1] > key.shape[1],
        )
    return output.transpose(1, 2)


@cache
def varlen_function() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn`. None: this torch has none with all needed arguments."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= inspect.signature(varlen_attn).parameters.keys() else None


def varlen(
    rows: PackedRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute attention within packed rows by `varlen_attn`, in half precision on CUDA."""
    assert softcap is None, "varlen_attn has no soft cap"
    function = varlen_function()
    assert function is not None
    ends, longest = rows.cumulative_lengths, rows.max_length
    output: Tensor = function(
        *(states[0].transpose(0, 1) for states in (query, key, value)),
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] > key.shape[1],
    )
    return output[None]


def grouped(
    rows: PackedRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute attention within packed rows by SDPA, on padded groups of rows of similar length."""
    groups, to_pack = rows.groups
    flat = [states[0].transpose(0, 1).flatten(1) for states in (query, key, value)]
    outputs = []
    for group in groups:
        q, k, v = (
            tokens.index_select(0, group.from_pack)
            .view(group.num_rows, group.width, -1, states.shape[-1])
            .transpose(1, 2)
            for tokens, states in zip(flat, (query, key, value), strict=True)
        )
        mask = None
        if window is not None and group.width > window:
            mask = rows.window_mask(group.width, window)
        if softcap is None:
            output = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] > k.shape[1],
            )
        else:
            if mask is None:
                mask = rows.window_mask(group.width, group.width)
            output = _capped_attention(q, k, v, mask, scaling, softcap)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, to_pack)[None]


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Compute attention with scores capped as `softcap * tanh(score / softcap)`, as in Gemma 2."""
    share = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(share, dim=1) for states in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=precision)
    attended: Tensor = weights.to(query.dtype) @ value
    return attended


IMPLEMENTATIONS: dict[str, PackedAttention] = {
    "varlen": varlen,
    "flex": flex,
    "grouped": grouped,
}


def packed_attention_function(kind: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Build the attention function that transformers calls in every layer, for a kind of packed
    attention ("varlen", "flex" or "grouped"). A call with packed rows gets attention within these
    rows. Any other call, such as an engine's in another thread, goes to `otherwise`."""
    implementation = IMPLEMENTATIONS[kind]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        rows: PackedRows | None = kwargs.get(ROWS_KEYWORD)
        if rows is None:
            plain: tuple[Tensor, Tensor | None] = otherwise(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                **kwargs,
            )
            return plain
        _refuse_extras(module, attention_mask, dropout, kwargs)
        output = _attend(implementation, rows, query, key, value, scaling, sliding_window, softcap)
        return output, None

    return attend


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _attend(
    implementation: PackedAttention,
    rows: PackedRows,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Run an attention function outside of what torch.compile traces: rows differ in every call, so
    a compiled layer would be compiled again for each. (FlexAttention itself is still compiled.)"""
    if window is not None and window >= rows.max_length:
        window = None
    return implementation(rows, query, key, value, scaling, window, softcap)


def _refuse_extras(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    reason = None
    if kwargs.get("s_aux") is not None:
        reason = "attention sinks"
    elif kwargs.get("position_bias") is not None:
        reason = "a position bias"
    elif attention_mask is not None:
        reason = "a mask of its own"
    elif dropout:
        reason = "dropout (put the model into eval mode)"
    elif kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        reason = "bidirectional attention"
    if reason is not None:
        raise ValueError(
            f"{type(module).__name__} uses {reason}, which attention over packed rows does not "
            "support; set train.micro_batches=sorted"
        )
