"""The models that a step runs, as whole modules on this device (or this rank's shards of them)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.trainer.activation_checkpointing import enable_checkpointing, layers_in_training
from rollpacker.trainer.compiling import compile_layers
from rollpacker.trainer.critic import Critic
from rollpacker.trainer.frozen import FrozenPolicy, frozen_copy
from rollpacker.trainer.lora import adapter_off, has_adapter
from rollpacker.trainer.losses import Outputs
from rollpacker.trainer.micro_batch import MicroBatch
from rollpacker.trainer.policy import Policy


class Cut(Protocol):
    """Cuts each model down, in place, to the layers of one pipeline stage."""

    def policy(self, whole: Policy) -> Policy: ...

    def critic(self, whole: Critic) -> Critic: ...

    def frozen(self, whole: FrozenPolicy) -> FrozenPolicy: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSet:
    """The models that the algorithm needs: a policy, and maybe a critic, a reference, a teacher."""

    policy: Policy
    critic: Critic | None
    reference: FrozenPolicy | None
    """The reference model. None: the algorithm needs none, or the policy with its adapter switched
    off serves as the reference."""
    teacher: FrozenPolicy | None
    algorithm: AlgorithmConfig
    temperature: float
    """The sampling temperature, at which log-probs are taken."""
    checkpointed: tuple[nn.Module, ...]
    """Layers with gradient checkpointing, which compute their activations again in the backward
    pass. Empty: it is off."""
    scores_policy: bool = False
    """Whether `scores` returns the policy's log-probs even if the algorithm's
    advantages do not use them."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        *,
        critic: Critic | None,
        teacher: FrozenPolicy | None,
        algorithm: AlgorithmConfig,
        temperature: float,
        gradient_checkpointing: bool,
        compiled: bool,
        scores_policy: bool = False,
        stage: Cut | None = None,
    ) -> ModelSet:
        """Make the set around `model`, which is trained in place. A reference is a copy of the
        model as it is now. With a `stage`, all models are cut down in place to that stage's
        layers."""
        policy = Policy(model)
        if stage is not None:
            policy = stage.policy(policy)
            critic = None if critic is None else stage.critic(critic)
            teacher = None if teacher is None else stage.frozen(teacher)
        reference = None
        if algorithm.needs_reference and not has_adapter(model):
            reference = frozen_copy(policy)
        checkpointed: list[nn.Module] = []
        if gradient_checkpointing:
            checkpointed += enable_checkpointing(model)
        if compiled:
            compile_layers(model)
        if gradient_checkpointing and critic is not None:
            checkpointed += enable_checkpointing(critic.model)
        return cls(
            policy=policy,
            critic=critic,
            reference=reference,
            teacher=teacher,
            algorithm=algorithm,
            temperature=temperature,
            checkpointed=tuple(checkpointed),
            scores_policy=scores_policy,
        )

    @property
    def frozen(self) -> list[Policy]:
        """The policies that are run but not trained: the reference and the teacher, if any."""
        return [one.policy for one in (self.reference, self.teacher) if one is not None]

    def besides_the_policy(self) -> Iterator[nn.Module]:
        """Yield the transformers models of reference, teacher and critic, as far as they exist."""
        yield from (one.model for one in self.frozen)
        if self.critic is not None:
            yield self.critic.model

    def for_backward(self) -> AbstractContextManager[None]:
        """A context for forward and backward passes in which gradient checkpointing is on."""
        return layers_in_training(self.checkpointed)

    def outputs(self, batch: MicroBatch) -> Outputs:
        """Run policy, reference and critic on a micro-batch, and return their outputs for its
        targets. The reference runs only if the algorithm's loss uses it."""
        reference = None
        if self.algorithm.reference_in_loss:
            reference = self._reference_log_probs(batch)
        log_probs, entropy = self.policy(batch, self.temperature)
        values = None if self.critic is None else self.critic(batch)
        return Outputs(log_probs=log_probs, entropy=entropy, ref_log_probs=reference, values=values)

    @torch.no_grad()
    def scores(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Run the models on a micro-batch, without gradients, for what advantages are
        computed from: log-probs and values. Returns tensors [N] for the N targets, by the
        names of `TokenScores`' fields."""
        columns: dict[str, Tensor] = {}
        if self.algorithm.reference_in_scores:
            columns["ref_log_probs"] = self._reference_log_probs(batch)
        if self.teacher is not None:
            columns["teacher_log_probs"] = self.teacher.log_probs(batch, self.temperature)
        if self.scores_policy or self.algorithm.policy_in_scores:
            columns["log_probs"] = self.policy(batch, self.temperature)[0]
        if self.critic is not None:
            columns["values"] = self.critic(batch)
        return columns

    @torch.no_grad()
    def plain_scores(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Run the policy alone on a micro-batch, without gradients and at temperature 1. Returns
        its log-probs [N] as `scores` does."""
        return {"log_probs": self.policy(batch, 1.0)[0]}

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        if self.reference is not None:
            return self.reference.log_probs(batch, self.temperature)
        with torch.no_grad(), adapter_off(self.policy.model):
            log_probs: Tensor = self.policy(batch, self.temperature)[0]
        return log_probs
