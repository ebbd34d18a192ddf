"""Rows laid end to end without padding: a pack's tensors, and the switch of the model's attention.
`core/packs.py` chooses which rows share a pack.

Everything that works token by token (projections, norms, the feed-forward) then sees real tokens
only. Attention alone needs to know where rows begin: `varlen.py` has its implementations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollpacker.trainer.micro_batch import MicroBatch, Row, micro_batch, row_length
from rollpacker.trainer.varlen import (
    ROWS_KEYWORD,
    PackedRows,
    packed_attention_function,
    varlen_function,
)

PackedKind = Literal["varlen", "flex", "grouped"]
KINDS: tuple[PackedKind, ...] = ("varlen", "flex", "grouped")
"""Kinds of packed attention, all implemented in `varlen.py`, the fastest first."""

_names: dict[tuple[PackedKind, str | None], str] = {}
"""Names under which packed attention is registered with transformers. The key is the kind of packed
attention and the name of the attention that it replaces (None: the default)."""
_replaced: dict[str, str | None] = {}
"""Mapping from the name of each registered packed attention to the name of the attention that it
replaces. None: transformers' default attention."""


def pack(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Lay rows end to end, in the given order, into a micro-batch of one row [1, N]. The model must
    run on it inside the context `packed_attention`, also to compute activations again."""
    lengths = [row_length(row) for row in rows]
    packed = PackedRows(lengths, device)
    tokens = [token for row in rows for token in (*row.context, *row.response[:-1])]
    return micro_batch(
        rows,
        np.asarray([tokens], dtype=np.int64),
        np.cumsum([0, *lengths[:-1]]),
        {"position_ids": packed.position_ids(), ROWS_KEYWORD: packed},
        device,
    )


def best_kind(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None
) -> PackedKind | None:
    """Return the fastest kind of packed attention that this model can use on this device in `dtype`
    (None: the dtype of the weights). Returns None if the model can use no kind."""
    return next((kind for kind in KINDS if why_not(model, kind, device, dtype) is None), None)


def why_not(
    model: nn.Module, kind: PackedKind, device: torch.device, dtype: torch.dtype | None = None
) -> str | None:
    """Return a text that says why `model` cannot use this kind of packed attention on `device`;
    None if it can. `dtype` is that of the computation; None: the dtype of the weights."""
    transformer = _outermost_transformer(model)
    if transformer is None:
        return f"{type(model).__name__} is no transformers model"
    config, name = transformer.config.get_text_config(), type(transformer).__name__
    state = layers_with_state(transformer)
    if state is not None:
        return f"{name} has {state}: a row of a pack would begin with what the one before it left"
    if not getattr(transformer, "_supports_attention_backend", False):
        return f"{name} does not support transformers' AttentionInterface"
    if kind == "grouped":
        return None
    if device.type != "cuda":
        return f"{kind} attention trains on CUDA only"
    dtype = dtype if dtype is not None else transformer.dtype
    if kind == "varlen":
        return _why_not_varlen(config, device, dtype)
    return _why_not_flex(config, dtype)


def layers_with_state(model: PreTrainedModel) -> str | None:
    """Return words for the model's layers that are not attention over a row's keys and values, such
    as linear attention, a convolution or a recurrence. None: all layers are such attention."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    foreign = sorted(set(types) - {"full_attention", "sliding_attention"})
    if foreign:
        return f"layers of type {', '.join(foreign)}"
    return "a recurrent state" if getattr(model, "_is_stateful", False) else None


def _why_not_varlen(config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    if varlen_function() is None:
        return "this torch has no varlen_attn with windows and grouped queries"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen attention takes bfloat16 and float16, not {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "varlen attention needs compute capability 8.0"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "varlen attention has no soft cap"
    if getattr(config, "v_head_dim", None) is not None:
        return "varlen attention takes keys and values of one size only"
    size = _head_dim(config)
    if size % 8 or size > 256:
        return f"varlen attention takes heads of a multiple of 8 up to 256, not {size}"
    return None


def _why_not_flex(config: Any, dtype: torch.dtype) -> str | None:
    if find_spec("triton") is None:
        return "flex attention needs triton"
    if dtype == torch.float64:
        return "flex attention does not take float64"
    if _head_dim(config) < 16:
        return f"flex attention takes heads of 16 or more, not {_head_dim(config)}"
    return None


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


@contextmanager
def packed_attention(model: nn.Module, kind: PackedKind) -> Iterator[None]:
    """A context in which calls on packed rows, and their backward passes, use packed attention;
    other calls use the model's own attention. Afterwards the model is as it was. `model` may be a
    wrapper of the transformers model (peft, a policy, a critic)."""
    configs = _configs(model)
    before = [config._attn_implementation for config in configs]
    try:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = _registered_name(kind, implementation)
        yield
    finally:
        # A config's setter reaches into its sub-configs, so the outer ones come first here too.
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def _outermost_transformer(model: nn.Module) -> PreTrainedModel | None:
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def _configs(model: nn.Module) -> list[Any]:
    """Return every config in which a part of the model may look up its attention, outer configs
    before the configs inside them."""
    found: dict[int, Any] = {}
    waiting = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) in found:
            continue
        found[id(config)] = config
        parts = (getattr(config, name, None) for name in config.sub_configs)
        waiting.extend(part for part in parts if part is not None)
    return list(found.values())


def _registered_name(kind: PackedKind, before: str | None) -> str:
    """Return the name under which packed attention in place of the attention `before` (None: the
    default) is registered with transformers. The name does not contain `before`: transformers
    searches names for words such as "flash"."""
    before = _replaced.get(before, before) if before is not None else None
    name = _names.get((kind, before))
    if name is None:
        name = f"rollpacker_packed_{kind}_{len(_names)}"
        otherwise = ALL_ATTENTION_FUNCTIONS.get(before, _needs_a_pack)
        AttentionInterface.register(name, packed_attention_function(kind, otherwise))
        _names[kind, before] = name
        _replaced[name] = before
    return name


def _needs_a_pack(module: nn.Module, *_arguments: Any, **_keywords: Any) -> NoReturn:
    raise ValueError(
        f"{type(module).__name__} was called without packed rows while packed attention is on, and "
        "its own attention is no function that transformers knows; leave packed_attention first"
    )
