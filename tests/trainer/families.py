"""Tiny models of the families that packs are for, rows for them, and each row by itself."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollpacker.trainer.batches import MicroBatch, Row

CPU = torch.device("cpu")
VOCABULARY = 23
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen2": {},
    "qwen2_windows": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
}


def new_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.partition("_")[0], **SHAPE | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def new_rows(seed: int = 0) -> list[Row]:
    """Not sorted; the shortest goes through the model as one token."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for length in (31, 2, 3, 9, 30, 3, 5, 70):
        tokens = torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()
        rows.append(Row(tokens[: 1 + length // 4], tokens[1 + length // 4 :]))
    return rows


def log_probs_of(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    output = model(input_ids=batch.input_ids, use_cache=False, **batch.model_inputs)
    table = output.logits.flatten(0, 1)[batch.positions].log_softmax(-1)
    return table.gather(-1, batch.targets[:, None])[:, 0]


def textbook_attention(
    module, query, key, value, mask, scaling, sliding_window=None, softcap=None, **_more
):
    """Like transformers' eager one, but whose softmax is float32 also for float64."""
    assert mask is None
    share = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(share, 1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = (distance < 0) | (distance >= (sliding_window or query.shape[2]))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(share, 1)).transpose(1, 2), None


AttentionInterface.register("textbook", textbook_attention)


def alone(model: nn.Module, rows) -> torch.Tensor:
    """Every row by itself."""
    results = []
    for context, targets, _ in rows:
        ids = torch.tensor([[*context, *targets]])
        table = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        results.append(table.gather(-1, ids[0, 1:, None])[len(context) - 1 :, 0])
    return torch.cat(results)


def gradients_of(
    model: nn.Module, log_probs: torch.Tensor, weights: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Of the weighted sum; different weights of either sign if none are given."""
    if weights is None:
        weights = torch.linspace(-1, 2, len(log_probs), dtype=log_probs.dtype)
    model.zero_grad()
    (log_probs * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
