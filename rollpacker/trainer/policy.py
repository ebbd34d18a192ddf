"""The model that is trained, as a function from a micro-batch to log-probabilities and entropies.

The output layer is applied in blocks (`logprobs.chunked_log_probs`), and only to those hidden
states that predict a target. A model that does more to its logits than is known here runs as a
whole, with all logits of these positions at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollpacker.trainer.logprobs import LogitTransform, chunked_log_probs, full_precision
from rollpacker.trainer.micro_batch import MicroBatch
from rollpacker.trainer.saved_weights import device_of

CHECKED_TOKENS = 8
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""The largest difference allowed between logits computed in blocks and the model's own, as a share
of the largest logit. The two differ only in the order of sums."""
LOW_PRECISION_TOLERANCE = 0.05

logger = logging.getLogger(__name__)


class Policy(nn.Module):
    """A causal language model of transformers, or such a model with peft's adapters, as a function
    to log-probabilities. Parameters are touched inside `forward` only, so that the module can be
    the root of a sharded model (FSDP2). The model is not changed, and its mode (training,
    evaluation) is left as it is. Construction compares, on `CHECKED_TOKENS` tokens, logits computed
    in blocks with the model's own; if they differ, one warning says so and all logits of a
    micro-batch are computed at once."""

    def __init__(self, model: nn.Module, *, block_elements: int | None = None) -> None:
        super().__init__()
        assert block_elements is None or block_elements > 0, block_elements
        self.model = model
        self.block_elements = block_elements
        self._transform = _logit_transform(_base_model(model).config.get_text_config())
        self.runs_in_blocks = self._blocks_give_the_logits()
        if not self.runs_in_blocks:
            logger.warning(
                "%s does something to its logits that is not known here: the logits of a "
                "micro-batch are kept as a whole, which costs memory; lower "
                "train.micro_batch_tokens if that is too much",
                type(_base_model(model)).__name__,
            )

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N] of the batch's targets and entropies [N] of the
        distributions that they are drawn from, under softmax(logits / temperature). Both are
        differentiable, in float32 (float64 for a float64 model). There is no attention mask: with
        causal attention no real token sees the padding on its right."""
        if not self.runs_in_blocks:
            return _log_probs(self._logits_at(batch), batch.targets, temperature)
        hidden = self._hidden_states(batch.input_ids, batch.model_inputs)
        return self.from_hidden_states(hidden, batch, temperature)

    def from_hidden_states(
        self, hidden: Tensor, batch: MicroBatch, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the same as `forward`, from hidden states [B, W, D] after the last norm, with the
        logits computed in blocks."""
        head = _base_model(self.model).get_output_embeddings()
        return chunked_log_probs(
            hidden.flatten(0, 1).index_select(0, batch.positions),
            head.weight,
            head.bias,
            batch.targets,
            temperature=temperature,
            transform=self._transform,
            block_elements=self.block_elements,
        )

    def _hidden_states(self, input_ids: Tensor, model_inputs: Mapping[str, Any]) -> Tensor:
        """Return the decoder's hidden states [B, W, D] after the last norm."""
        decoder = _base_model(self.model).get_decoder()
        hidden: Tensor = decoder(input_ids=input_ids, use_cache=False, **model_inputs)[0]
        return hidden

    def _logits_at(self, batch: MicroBatch) -> Tensor:
        """Run the whole model, and return its logits [N, V] at the batch's positions, with all that
        the model does to its logits. The output layer gets only the hidden states of these
        positions."""
        head = _base_model(self.model).get_output_embeddings()
        owner = threading.get_ident()

        def keep_positions(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor] | None:
            # An engine may be using the same layer in a thread of its own.
            if threading.get_ident() != owner:
                return None
            (hidden,) = arguments
            return (hidden.flatten(0, 1).index_select(0, batch.positions).unsqueeze(0),)

        hook = head.register_forward_pre_hook(keep_positions)
        try:
            outputs = self.model(input_ids=batch.input_ids, use_cache=False, **batch.model_inputs)
        finally:
            hook.remove()
        logits: Tensor = outputs.logits
        assert logits.shape[:2] == (1, len(batch.positions)), logits.shape
        return logits[0]

    @torch.no_grad()
    def _blocks_give_the_logits(self) -> bool:
        base = _base_model(self.model)
        head = base.get_output_embeddings()
        if type(head) is not nn.Linear or not hasattr(base, "get_decoder"):
            return False
        device = device_of(self.model)
        input_ids = torch.arange(min(CHECKED_TOKENS, len(head.weight)), device=device)[None]
        with _evaluation(self.model):
            expected = self.model(input_ids=input_ids, use_cache=False).logits
            try:
                hidden = self._hidden_states(input_ids, {})
            except TypeError:  # a decoder with another signature
                return False
        if hidden.shape[-1] != head.in_features or expected.shape[-1] != head.out_features:
            return False
        actual = self._transform.apply_(head(hidden).to(full_precision(hidden.dtype)))
        tolerance = TOLERANCE.get(expected.dtype, LOW_PRECISION_TOLERANCE)
        difference = (actual - expected).abs().max()
        return bool(difference <= tolerance * expected.abs().max())


def _base_model(model: Any) -> Any:
    """Return the model without peft's wrapper, but with the adapters inside its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _logit_transform(config: Any) -> LogitTransform:
    """Read from a model's config what it does to its logits: Granite divides them, Cohere and
    Falcon-H1 multiply, Gemma caps."""
    scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def _log_probs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    table = (logits.to(full_precision(logits.dtype)) / temperature).log_softmax(-1)
    chosen = table.gather(-1, targets[:, None])[:, 0]
    return chosen, -(table.exp() * table).sum(-1)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """A context with every module in evaluation mode; afterwards each has its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
