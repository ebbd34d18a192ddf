"""One stage of a trainer's pipeline: which part of every model its rank has, how its sweeps run,
and what all stages decide as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from rollpacker.host_store import local
from rollpacker.trainer.batches import Batcher
from rollpacker.trainer.critic import Critic
from rollpacker.trainer.frozen import FrozenPolicy
from rollpacker.trainer.model_set import ModelSet
from rollpacker.trainer.pipeline.crossing import Crossing
from rollpacker.trainer.pipeline.cut import Place, num_layers_of
from rollpacker.trainer.pipeline.executor import Executor
from rollpacker.trainer.pipeline.passes import NewChooser, StagedPasses
from rollpacker.trainer.pipeline.peers import Peers
from rollpacker.trainer.pipeline.staged import StagedCritic, StagedPolicy
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.trained import Trained


class Stage:
    """`layers`: how many of the policy's layers each stage has. A model with another number of them
    is split evenly."""

    def __init__(
        self,
        place: Place,
        *,
        layers: Sequence[int],
        peers: Peers,
        executor: Executor,
        new_chooser: NewChooser,
    ) -> None:
        self.place = place
        self._layers = tuple(layers)
        self._peers = peers
        self._executor = executor
        self._new_chooser = new_chooser
        self._crossing = Crossing()

    # -- its part of the models ------------------------------------------------------------

    def policy(self, whole: Policy) -> StagedPolicy:
        """Cuts the policy's model in place. Raises `ValueError` as `cut` does."""
        return StagedPolicy(whole, self.place, self._layers_of(whole.model), self._crossing)

    def critic(self, whole: Critic) -> StagedCritic:
        """The same for a critic."""
        return StagedCritic(whole, self.place, self._layers_of(whole.model), self._crossing)

    def frozen(self, whole: FrozenPolicy) -> FrozenPolicy:
        """The same for a reference or a teacher."""
        return FrozenPolicy(self.policy(whole.policy))

    def passes(self, models: ModelSet, batcher: Batcher) -> StagedPasses:
        """Of models that went through the calls above."""
        return StagedPasses(
            models,
            batcher,
            place=self.place,
            crossing=self._crossing,
            executor=self._executor,
            new_chooser=self._new_chooser,
        )

    def _layers_of(self, model: nn.Module) -> Sequence[int]:
        number = num_layers_of(model)
        return self._layers if number == sum(self._layers) else even_layers(number, self.place)

    # -- what all stages decide as one -----------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Whether it is true on any stage."""
        return any(value for (value,) in self._peers.gather([float(flag)]))

    def norm(self, own: float) -> float:
        """Of the whole gradient, from each stage's."""
        return math.sqrt(math.fsum(norm * norm for (norm,) in self._peers.gather([own])))

    def sum_tied(self, trained: Trained) -> None:
        """Add the gradient of the output layer that is tied to the embeddings to theirs: the first
        stage owns the weight, the last one has a mirror of it."""
        policy = trained.module
        assert isinstance(policy, StagedPolicy)
        tied = policy.tied
        if tied is None or not (self.place.is_first or self.place.is_last):
            return
        weight = policy.model.get_parameter(tied)
        if self.place.is_last:
            gradient = trained.mirror_gradient()
            gradient = torch.zeros_like(weight) if gradient is None else gradient
            self._peers.send(local(gradient), 0)
            return
        sums = trained.optimizer.gradients()
        assert tied in sums, "a step without a gradient"
        own = local(sums[tied])
        own.add_(self._peers.receive(own, self.place.count - 1))

    @torch.no_grad()
    def share_tied(self, trained: Trained) -> None:
        """Bring the mirror up to date, after the owner's weight has changed."""
        policy = trained.module
        assert isinstance(policy, StagedPolicy)
        if policy.tied is None:
            return
        last = self.place.count - 1
        if self.place.is_first:
            self._peers.send(local(policy.model.get_parameter(policy.tied).detach()), last)
        elif self.place.is_last:
            own = local(policy.model.get_parameter(policy.tied).detach())
            own.copy_(self._peers.receive(own, 0))


def even_layers(num_layers: int, place: Place) -> list[int]:
    """Earlier stages have one more where it does not come out even."""
    share, rest = divmod(num_layers, place.count)
    return [share + (stage < rest) for stage in range(place.count)]
