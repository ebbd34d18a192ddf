"""Models that only score: the reference model and the teacher."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.trainer.batches import MicroBatch
from rollpacker.trainer.model import ModelError, load_model, num_embeddings
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.saved_weights import device_of, reads_later
from rollpacker.trainer.trainer import ModelConfig


class FrozenPolicy:
    """A causal LM without gradients. The given `model`, or a policy around one, is changed in
    place: its parameters require no gradients, and it is in eval mode. `policy` may be sharded."""

    def __init__(self, model: PreTrainedModel | Policy) -> None:
        policy = model if isinstance(model, Policy) else Policy(model)
        self.policy = policy.requires_grad_(False).eval()

    @torch.no_grad()
    def log_probs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities [N] of the batch's targets at `temperature`, in float32
        (float64 for a float64 model)."""
        log_probs: Tensor = self.policy(batch, temperature)[0]
        return log_probs


def frozen_copy(model: PreTrainedModel | Policy) -> FrozenPolicy:
    """Return a frozen copy of the model as it is now, with tensors of its own."""
    return FrozenPolicy(copy.deepcopy(model))


def load_teacher(
    path: str,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None = None,
) -> FrozenPolicy:
    """Load the causal LM in `path` (a Hugging Face folder or a hub name) as a teacher, on the
    policy's device, in `dtype` (None: the policy's dtype). `model` and `tokenizer` are the
    policy's; if the policy reads its weights later, so does the teacher. Raises `ModelError` if the
    teacher cannot be loaded, if its tokenizer gives tokens other numbers, or if it has fewer rows
    of embeddings than the policy. More rows are allowed: models of one family often differ in
    padding rows."""
    dtype = model.dtype if dtype is None else dtype
    name: Literal["bfloat16", "float32"] = "bfloat16" if dtype == torch.bfloat16 else "float32"
    later, device = reads_later(model), device_of(model)
    kind: Literal["cpu", "cuda"] = "cuda" if later and device.type == "cuda" else "cpu"
    config = ModelConfig(path=path, dtype=name, device=kind)
    loaded = load_model(config, setting="model.teacher", weights_later=later)
    check_same_vocabulary(loaded.tokenizer, tokenizer, f"model.teacher {path}")
    rows, needed = num_embeddings(loaded.model), num_embeddings(model)
    if rows < needed:
        raise ModelError(
            f"model.teacher {path} has {rows} rows of embeddings, the policy has {needed}: it could"
            " not score every token that the policy may sample; choose a teacher with as many"
        )
    if not reads_later(loaded.model):
        nn.Module.to(loaded.model, device=device, dtype=dtype)
    return FrozenPolicy(loaded.model)


def check_same_vocabulary(
    other: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, name: str
) -> None:
    """Raise `ModelError`, which calls the model `name`, if its tokenizer gives tokens other numbers
    than the policy's tokenizer."""
    theirs = {number: token for token, number in other.get_vocab().items()}
    ours = {number: token for token, number in policy.get_vocab().items()}
    if theirs == ours:
        return
    number = min(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
    raise ModelError(
        f"{name} has another vocabulary than the policy: token {number} is"
        f" {_shown(theirs.get(number))} there and {_shown(ours.get(number))} in the policy's"
        " tokenizer; choose a model of the policy's family"
    )


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
