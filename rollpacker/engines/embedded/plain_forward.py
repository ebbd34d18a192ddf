"""The forward pass of Llama-shaped decoders as plain tensor calls on the model's own weights.

On a small model, or at a few rows, most of a decode step is the dispatch of modules, not their
arithmetic. `plain_forward` recognises Llama, Mistral, Qwen2 and Qwen3 as transformers builds them,
down to the class of every module, with or without peft's low-rank adapters on their matrices. Any
other model runs through its own modules, as do models with another kind of adapter, a hook or a
quantised layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from rollpacker.engines.embedded.attention import RolloutStep, Scores

STATIC_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding whose frequencies do not depend on the length of the sequence."""
FAMILIES = {"Llama": llama, "Mistral": mistral, "Qwen2": qwen2, "Qwen3": qwen3}
LogitsAfter = Callable[[slice | Tensor], Tensor]
"""Function from indices of some tokens of a pass to the logits [some tokens, vocabulary] after
these tokens."""
_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_TORCH_PARTS = {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, SiLUActivation}


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor
    """The matrix [in, out], a view of the parameter."""
    bias: Tensor | None
    adapter: _Adapter | None = None


@dataclass(frozen=True, slots=True)
class _Adapter:
    """A low-rank addition to a matrix. Its dtype may be more precise than the matrix's."""

    down: Tensor
    """The matrix [in, rank], a view of the parameter."""
    up: Tensor
    """The matrix [rank, out], a view of the parameter."""
    scaling: float


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: Tensor
    """The norm's epsilon [1], in float32."""
    mean_factor: float
    """1 / (number of elements): the factor that makes a mean of a sum."""


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    num_heads: int
    num_kv_heads: int
    scores: Scores
    attention_norm: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: _Linear
    mlp_norm: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear


def plain_forward(model: PreTrainedModel) -> PlainForward | None:
    """The plain forward pass of `model`, or None if the model has any part that is not known here.
    The pass reads the weights in place at every call. It must be made again when a parameter gets
    other storage, that is when `addresses` differ."""
    family = next(
        (
            part
            for name, part in FAMILIES.items()
            if type(model) is getattr(part, f"{name}ForCausalLM")
        ),
        None,
    )
    if family is None or not _is_as_built(model, family):
        return None
    rope = model.model.rotary_emb
    if rope.rope_type not in STATIC_ROPE_TYPES:
        return None
    attention = model.model.layers[0].self_attn
    if 2 * rope.inv_freq.numel() != attention.head_dim:
        return None
    weights = [weight for name, weight in model.named_parameters() if ".lora_" not in name]
    if len({(weight.dtype, weight.device) for weight in weights}) != 1:
        return None
    return PlainForward(model)


def _is_as_built(model: PreTrainedModel, family: object) -> bool:
    """Whether every module is the transformers class for the model's `family` (a module of
    transformers) or peft's plain adapter, without any hooks."""
    name = type(model).__name__.removesuffix("ForCausalLM")
    known = {getattr(family, name + part) for part in _PARTS} | _TORCH_PARTS
    modules = list(model.modules())
    adapted = [module for module in modules if _is_adapted(module)]
    inside = {id(part) for module in adapted for part in module.modules()}
    return all(
        (type(module) in known or id(module) in inside)
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        for module in modules
    ) and all(type(layer.mlp.act_fn) in (nn.SiLU, SiLUActivation) for layer in model.model.layers)


def _is_adapted(module: Any) -> bool:
    """Whether the module is peft's plain low-rank adapter around a plain matrix. The class is
    compared by name, since peft takes a second to import and need not be installed."""
    kind = type(module)
    return (
        (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear")
        and type(module.base_layer) is nn.Linear
        and module.active_adapters == list(module.lora_A) == list(module.lora_B)
        and len(module.active_adapters) == 1
        and all(type(dropout) is nn.Identity for dropout in module.lora_dropout.values())
        and not (module.lora_variant or module.disable_adapters or module.merged)
        and not any(module.lora_bias.values())
    )


class PlainForward:
    """Runs the forward passes of a model as plain tensor calls, under `torch.inference_mode`."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.model
        self._rotary = decoder.rotary_emb
        self._embedding = decoder.embed_tokens.weight.detach()
        self._head_dim = decoder.layers[0].self_attn.head_dim
        self._layers = [_layer(layer) for layer in decoder.layers[: model.config.num_hidden_layers]]
        self._norm = _norm(decoder.norm)
        self._head = _linear(model.lm_head)
        self._rotations = self._embedding.new_zeros((0, 2, self._head_dim))
        self.addresses = (
            *(weight.data_ptr() for weight in model.parameters()),
            self._rotary.inv_freq.data_ptr(),
        )

    def reserve(self, width: int) -> None:
        """Compute the rotary embedding's rotations for rows of up to `width` positions."""
        old_width = len(self._rotations)
        if width <= old_width:
            return
        places = torch.arange(max(width, 2 * old_width), device=self._embedding.device)
        with torch.inference_mode():
            cos, sin = (part[0] for part in self._rotary(self._embedding, places[None]))
            half = self._head_dim // 2
            sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
            self._rotations = torch.stack((cos, sin), dim=1)

    def decode(self, tokens: Tensor, positions: Tensor, step: RolloutStep) -> Tensor:
        """Logits [rows, vocabulary] after one token per row: `tokens` at `positions` [rows]."""
        return self._logits(self._hidden(tokens, positions, tokens.shape[0], step))

    def prefill(self, tokens: Tensor, ends: Tensor, step: RolloutStep) -> Tensor:
        """Return the logits [prompts, vocabulary] after each prompt's last token. `tokens` is
        [prompts, tokens], padded on the right; the last tokens are at `ends` [prompts]."""
        num_prompts, num_tokens = tokens.shape
        positions = torch.arange(num_tokens, device=tokens.device).repeat(num_prompts)
        hidden = self._hidden(tokens.view(-1), positions, num_prompts, step)
        starts = torch.arange(num_prompts, device=tokens.device) * num_tokens
        return self._logits(hidden.index_select(0, starts + ends))

    def extend(self, tokens: Tensor, positions: Tensor, step: RolloutStep) -> LogitsAfter:
        """Feed one sequence of `tokens` [tokens] at `positions` [tokens]; `step` may hold several
        rows' tokens in it. Returns a function that gives the logits [some tokens, vocabulary] after
        those of these tokens whose indices it is given."""
        hidden = self._hidden(tokens, positions, 1, step)
        return lambda places: self._logits(hidden[places])

    def _logits(self, hidden: Tensor) -> Tensor:
        return _project(_normalize(hidden, self._norm), self._head)

    def _hidden(
        self, tokens: Tensor, positions: Tensor, num_rows: int, step: RolloutStep
    ) -> Tensor:
        """Hidden states [tokens, hidden size] after the last layer. The tokens of `num_rows` rows
        of equal length lie one row after the other."""
        hidden: Tensor = self._embedding.index_select(0, tokens)
        rotations = self._rotations.index_select(0, positions)
        cos, sin = rotations.narrow(1, 0, 1), rotations.narrow(1, 1, 1)
        for layer in self._layers:
            normed = _normalize(hidden, layer.attention_norm)
            attended = self._attend(layer, normed, cos, sin, num_rows, step)
            _add_projected(hidden, attended, layer.output)
            normed = _normalize(hidden, layer.mlp_norm)
            gated = F.silu(_project(normed, layer.gate)).mul_(_project(normed, layer.up))
            _add_projected(hidden, gated, layer.down)
        return hidden

    def _attend(
        self,
        layer: _Layer,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_rows: int,
        step: RolloutStep,
    ) -> Tensor:
        """Outputs of all heads of a layer's attention side by side, [tokens, heads x head_dim], for
        the normed hidden states. `step` reads and writes the cache."""
        head_dim, num_heads = self._head_dim, layer.num_heads
        value = _project(normed, layer.value)
        # Query and key heads are normed and rotated together.
        heads = torch.cat((_project(normed, layer.query), _project(normed, layer.key)), dim=1)
        heads = heads.view(-1, num_heads + layer.num_kv_heads, head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            heads = _scale_to_unit(heads, layer.query_norm)
            heads[:, :num_heads].mul_(layer.query_norm.weight)
            heads[:, num_heads:].mul_(layer.key_norm.weight)
        swapped = heads.roll(head_dim // 2, -1)
        heads = heads.mul_(cos).add_(swapped.mul_(sin))
        query = heads.narrow(1, 0, num_heads)
        key = heads.narrow(1, num_heads, layer.num_kv_heads)
        output = step.attend(
            layer.index,
            _by_row(query, num_rows),
            _by_row(key, num_rows),
            _by_row(value.view(-1, layer.num_kv_heads, head_dim), num_rows),
            layer.scores,
        )
        return output.reshape(normed.shape[0], -1)


def _by_row(heads: Tensor, num_rows: int) -> Tensor:
    """Turn heads [rows x tokens, heads, head_dim] into [rows, heads, tokens, head_dim]."""
    if heads.shape[0] == num_rows:
        return heads.unsqueeze(2)
    rows = torch.unflatten(heads, 0, (num_rows, -1))
    return rows.transpose(1, 2)


def _normalize(hidden: Tensor, norm: _Norm) -> Tensor:
    return _scale_to_unit(hidden, norm).mul_(norm.weight)


def _scale_to_unit(hidden: Tensor, norm: _Norm) -> Tensor:
    """Divide each vector along the last dimension by its root mean square, in the roundings of
    transformers' RMSNorm. The sum of squares comes from a vector norm: half the time of a mean on a
    CPU."""
    is_wide = hidden.dtype == torch.float32
    wide = hidden if is_wide else hidden.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scaled = wide * torch.addcmul(norm.eps, length, length, value=norm.mean_factor).rsqrt_()
    return scaled if is_wide else scaled.to(hidden.dtype)


def _project(hidden: Tensor, linear: _Linear) -> Tensor:
    if linear.bias is None:
        output = torch.mm(hidden, linear.weight)
    else:
        output = torch.addmm(linear.bias, hidden, linear.weight)
    if linear.adapter is None:
        return output
    # The roundings of peft, so that the engine computes what the trainer does.
    inner = hidden.to(linear.adapter.down.dtype) @ linear.adapter.down @ linear.adapter.up
    return (output + inner * linear.adapter.scaling).to(output.dtype)


def _add_projected(hidden: Tensor, inner: Tensor, linear: _Linear) -> None:
    """Add the projection of `inner` to `hidden` in place (the residual connection). In half
    precision it rounds twice, as training does."""
    if linear.bias is None and linear.adapter is None and hidden.dtype == torch.float32:
        hidden.addmm_(inner, linear.weight)
    else:
        hidden.add_(_project(inner, linear))


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_dim = attention.head_dim
    if isinstance(attention, mistral.MistralAttention):
        sliding_window = attention.config.sliding_window
    else:
        sliding_window = getattr(attention, "sliding_window", None)
    has_head_norms = hasattr(attention, "q_norm")
    return _Layer(
        index=attention.layer_idx,
        num_heads=attention.q_proj.out_features // head_dim,
        num_kv_heads=attention.k_proj.out_features // head_dim,
        scores=Scores(attention.scaling, sliding_window, softcap=None),
        attention_norm=_norm(layer.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        query_norm=_norm(attention.q_norm) if has_head_norms else None,
        key_norm=_norm(attention.k_norm) if has_head_norms else None,
        output=_linear(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(module: Any) -> _Linear:
    adapter = None
    if hasattr(module, "base_layer"):
        (name,) = module.active_adapters
        adapter = _Adapter(
            module.lora_A[name].weight.detach().t(),
            module.lora_B[name].weight.detach().t(),
            float(module.scaling[name]),
        )
        module = module.base_layer
    bias = module.bias
    return _Linear(module.weight.detach().t(), None if bias is None else bias.detach(), adapter)


def _norm(module: Any) -> _Norm:
    weight = module.weight.detach()
    eps = torch.full((1,), module.variance_epsilon, dtype=torch.float32, device=weight.device)
    return _Norm(weight, eps, 1 / len(weight))
