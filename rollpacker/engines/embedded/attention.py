"""One attention function for training, prefill and decoding.

The function is registered with transformers under the name "rollpacker". Called plainly it is
causal attention over right-padded rows, which needs no mask: a padding position comes after every
real one of its row. Called with a rollout step (a keyword argument that transformers hands through
to every layer) it also reads and writes the engine's key-value slots. So trainer and engine share
one module and one set of weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "rollpacker"
STEP_KEYWORD = "rollout_step"
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModelError(ValueError):
    """The model cannot run with RollPacker's attention; the message says why."""


class Scores(NamedTuple):
    """The factor, sliding window and soft cap with which attention scores queries against keys."""

    scaling: float
    sliding_window: int | None
    """Number of tokens that a query sees, its own included. None: it sees all tokens before it."""
    softcap: float | None
    """Bound of the scores, which become `softcap * tanh(score / softcap)`. None: no bound."""


class RolloutStep(Protocol):
    """A forward pass of the engine, which gives attention layers the cached keys and values."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """Return the output [rows, tokens, heads, head_dim] of attention layer number `layer`.
        `query`, `key` and `value` of the new tokens are [rows, heads, tokens, head_dim]; key and
        value have the key-value heads."""
        ...


def install_attention(model: PreTrainedModel) -> None:
    """Switch `model` to RollPacker's attention, for training and rollout alike. Idempotent.

    From then on attention masks are ignored: batches must be padded on the right, and
    `model.generate` must not be used unless `model.set_attn_implementation` restores another
    implementation first.

    Raises:
        UnsupportedModelError: the model does not choose its attention through transformers'
            `AttentionInterface`, or needs more than causal attention over keys and values.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    foreign = other_layers(model)
    if foreign:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(foreign)}, and RollPacker's own engine runs "
            "models whose layers are all full or sliding-window attention: for rollpacker train "
            "set rollout.engine.name=vllm, or choose a model such as Qwen3, Llama or Mistral"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not support transformers' AttentionInterface; choose a model such as "
            "Qwen2, Qwen3, Llama, Mistral or Gemma"
        )
    AttentionInterface.register(ATTENTION_NAME, rollpacker_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    if config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError(
            f"{name} kept its own attention implementation ({config._attn_implementation})"
        )


def other_layers(model: PreTrainedModel) -> list[str]:
    """The types of the model's layers that are not attention over a row's keys and values, as the
    model's config names them: linear attention, for example, which keeps a state instead."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return sorted(set(types) - _LAYER_TYPES)


def rollpacker_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the shape that transformers asks for.

    query is [rows, heads, tokens, head_dim], key and value have the key-value heads. Returns the
    output [rows, tokens, heads, head_dim], and None in the place of attention weights.
    """
    _refuse_extras(module, attention_mask, is_causal, kwargs)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    step: RolloutStep | None = kwargs.get(STEP_KEYWORD)
    if step is not None:
        layer = module.layer_idx
        assert isinstance(layer, int)
        scores = Scores(scaling, sliding_window, softcap)
        return step.attend(layer, query, key, value, scores), None
    if query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(
            "a model with RollPacker's attention was called with a key-value cache, which it "
            "ignores; pass use_cache=False, or call "
            'model.set_attn_implementation("sdpa") to use generate'
        )
    output = causal_attention(query, key, value, scaling, sliding_window, softcap, dropout)
    return output.transpose(1, 2), None


def _refuse_extras(
    module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    reason = None
    if kwargs.get("s_aux") is not None:
        reason = "attention sinks"
    elif kwargs.get("position_bias") is not None:
        reason = "a position bias"
    elif attention_mask is not None:
        reason = "a mask of its own"
    elif kwargs.get("packed_rows") is not None:
        reason = "packed rows outside of the trainer's own attention"
    elif is_causal is False or not getattr(module, "is_causal", True):
        reason = "bidirectional attention"
    if reason is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} uses {reason}, which RollPacker's attention does not support"
        )


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention over the keys and values of this pass alone, which begins at each row's
    first token. Returns [rows, heads, tokens, head_dim], the shape of the query."""
    num_tokens = query.shape[2]
    window = num_tokens if sliding_window is None else min(sliding_window, num_tokens)
    windowed = window < num_tokens
    groups = query.shape[1] // key.shape[1]
    if not windowed and softcap is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=num_tokens > 1,
            scale=scaling,
            enable_gqa=groups > 1,
        )
    distance = torch.arange(num_tokens, device=query.device)
    distance = distance[:, None] - distance[None, :]
    visible = distance >= 0
    if windowed:
        visible &= distance < window
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~visible, float("-inf"))
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling
        )
    return capped_attention(query, key, value, bias, scaling, softcap, dropout)


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scores: Scores
) -> Tensor:
    """Attention under a mask: a key counts where `bias` is 0 and not where it is minus infinity.
    Returns [rows, heads, tokens, head_dim], the shape of the query. `scores` has the scale and
    the soft cap of attention scores; its sliding window is ignored and must be in the bias."""
    if scores.softcap is not None:
        return capped_attention(query, key, value, bias, scores.scaling, scores.softcap)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scores.scaling)


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attention whose scores are bent by `softcap * tanh(score / softcap)`, as in Gemma 2."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if dropout:
        weights = F.dropout(weights, p=dropout)
    return torch.matmul(weights, value)
