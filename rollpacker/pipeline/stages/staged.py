"""The policy and the critic as one pipeline stage runs them: hidden states come from the stage
before and go to the one after, by a `Crossing`, unless the stage is the first or the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rollpacker.pipeline.stages.crossing import Crossing
from rollpacker.pipeline.stages.cut import Absent, Place, cut, decoder_of, tied_weight
from rollpacker.trainer.critic import Critic
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.micro_batch import MicroBatch
from rollpacker.trainer.policy import Policy


class StagedPolicy(Policy):
    """One stage of a policy, made by cutting the whole policy's model in place. Raises `ValueError`
    as `cut` does, and if logits cannot be computed for a block of tokens at a time."""

    def __init__(
        self, whole: Policy, place: Place, layers: Sequence[int], crossing: Crossing
    ) -> None:
        nn.Module.__init__(self)
        if not whole.runs_in_blocks:
            raise ValueError(
                f"{type(whole.model).__name__} cannot be cut into pipeline stages: it does "
                "something to its logits that is not known here; leave train.pipeline.stages at 1"
            )
        self.flops = FlopModel.of(whole.model)
        """Numbers of FLOPs of the whole model, not of this stage alone."""
        self.tied = tied_weight(whole.model)
        cut(whole.model, place, layers)
        self.mirror = self.tied.mirror if self.tied is not None and place.is_last else None
        """Name of this stage's copy of the tied weight. None: this stage has no such copy."""
        self.model = whole.model
        self.block_elements = whole.block_elements
        self.runs_in_blocks = True
        self._transform = whole._transform
        self._place = place
        self._crossing = crossing

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies; before the last stage: hidden states for both."""
        hidden = _hidden_states(self.model, batch, self._place, self._crossing)
        if not self._place.is_last:
            return hidden, hidden
        return self.from_hidden_states(hidden, batch, temperature)


class StagedCritic(Critic):
    """One stage of a critic, made by cutting the whole critic's body in place."""

    def __init__(
        self, whole: Critic, place: Place, layers: Sequence[int], crossing: Crossing
    ) -> None:
        nn.Module.__init__(self)
        cut(whole.model, place, layers)
        self.model = whole.model
        if place.is_last:
            self.value_head = whole.value_head
        else:
            self.value_head = Absent()  # type: ignore[assignment]  # it is not called
        self._place = place
        self._crossing = crossing
        self.eval()

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the critic's values; a stage before the last: its hidden states."""
        hidden = _hidden_states(self.model, batch, self._place, self._crossing)
        return self.from_hidden_states(hidden, batch) if self._place.is_last else hidden


def _hidden_states(model: nn.Module, batch: MicroBatch, place: Place, crossing: Crossing) -> Tensor:
    """Return the hidden states [batch, width, dimension] after this stage's layers."""
    decoder = decoder_of(model)
    inputs = {"input_ids": batch.input_ids}
    if not place.is_first:
        size = decoder.config.get_text_config().hidden_size
        shape = torch.Size((*batch.input_ids.shape, size))
        inputs = {"inputs_embeds": crossing.enter(shape, decoder.dtype, batch.input_ids.device)}
    hidden: Tensor = decoder(**inputs, use_cache=False, **batch.model_inputs)[0]
    if not place.is_last:
        crossing.leave(hidden)
    return hidden
