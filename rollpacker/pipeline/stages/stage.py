"""One stage of a trainer's pipeline: its part of every model, its sweeps, and decisions that all
stages make together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollpacker.pipeline.links.link import ArrivalTimes
from rollpacker.pipeline.plan.choosers import Kind
from rollpacker.pipeline.plan.link_choice import LinkKind
from rollpacker.pipeline.plan.split import layers_of_stages, plan_budget
from rollpacker.pipeline.plan.work import Link, Measured, OpCost, StageCost
from rollpacker.pipeline.stages.crossing import Crossing
from rollpacker.pipeline.stages.cut import Place, Tied, num_layers_of
from rollpacker.pipeline.stages.executor import Executor
from rollpacker.pipeline.stages.orders import NewChooser, SweepChooser
from rollpacker.pipeline.stages.overseer import Arrangement
from rollpacker.pipeline.stages.passes import StagedPasses
from rollpacker.pipeline.stages.peers import Peers, round_trips
from rollpacker.pipeline.stages.staged import StagedCritic, StagedPolicy
from rollpacker.pipeline.stages.times import StageTimes
from rollpacker.trainer.batches import Batcher, Packs
from rollpacker.trainer.critic import Critic
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.frozen import FrozenPolicy
from rollpacker.trainer.micro_batch import MICRO_BATCH_OVERHEAD_TOKENS
from rollpacker.trainer.model_set import ModelSet
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.sharding import Shards
from rollpacker.trainer.trained import Trained
from rollpacker.weights.host_store import local

ATTENTION_OF_F = 1 / 3
"""Share of attention's FLOPs that the forward pass F has. The backward pass for inputs, I, has the
rest, and that for weights none: attention has no weights of its own."""
SENT_OF_WEIGHTS = 3
"""How many times a training step sends a stage's weights between its processes: they are gathered
for two sweeps, and their gradients added up."""


class Links(Protocol):
    """The links of one pipeline stage to its neighbouring stages."""

    def use(self, kind: LinkKind) -> None:
        """Use this kind of links, direct or host, from the next message on. All ranks make this
        call together, with nothing on its way."""
        ...

    @property
    def direct_lost(self) -> bool:
        """Whether a direct link was lost while host links were in use."""
        ...

    def arrivals(self) -> Mapping[Kind, Sequence[ArrivalTimes]]:
        """Return the times of hidden states (F) and gradients (I) arrived since the last call."""
        ...


class Stage:
    """One stage of a trainer's pipeline. `layers`: the policy's layers in each stage; if empty, and
    for a model with another number of layers, stages have about equal work. `shards`: the stage's
    process group, if the network between its processes is to be timed, else None."""

    def __init__(
        self,
        place: Place,
        *,
        layers: Sequence[int] = (),
        peers: Peers,
        executor: Executor,
        new_chooser: NewChooser,
        links: Links | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self.place = place
        self._layers = tuple(layers)
        self._peers = peers
        self._executor = executor
        self._new_chooser = new_chooser
        self._links = links
        self._shards = shards
        self._num_bytes = 0
        """Number of bytes of the policy's weights on this stage."""
        self._head_layers = 0.0
        self._crossing = Crossing()
        self.measured: Measured | None = None
        """Measured costs of ops and messages, the same on all stages, as last given to `arrange`.
        None: nothing was measured yet."""
        self._expected: Measured | None = None
        """Costs in FLOPs to plan with until some are measured. None: policy not cut yet."""

    # -- its part of the models ------------------------------------------------------------

    def policy(self, whole: Policy) -> StagedPolicy:
        """Cut the policy's model down to this stage, in place. Raises what `cut` raises."""
        self._layers = self._layers or self._balanced(whole.model)
        number = num_layers_of(whole.model)
        staged = StagedPolicy(whole, self.place, self._layers, self._crossing)
        flops = staged.flops
        self._head_layers = flops.output * number / max(flops.body, 1.0)
        self._num_bytes = sum(p.numel() * p.element_size() for p in staged.parameters())
        self._expected = expected(flops, self._layers)
        return staged

    def critic(self, whole: Critic) -> StagedCritic:
        """Cut a critic's model down to this stage, in place, after the policy's was cut."""
        return StagedCritic(whole, self.place, self._layers_of(whole.model), self._crossing)

    def frozen(self, whole: FrozenPolicy) -> FrozenPolicy:
        """Cut a teacher's model down to this stage, in place, after the policy's was cut."""
        layers = self._layers_of(whole.policy.model)
        return FrozenPolicy(StagedPolicy(whole.policy, self.place, layers, self._crossing))

    def passes(self, models: ModelSet, batcher: Batcher, shards: Shards | None) -> StagedPasses:
        """Return what runs forward and backward passes of `models`, cut by the methods above."""
        return StagedPasses(
            models,
            batcher,
            place=self.place,
            crossing=self._crossing,
            executor=self._executor,
            new_chooser=self._chooser,
            shards=shards,
        )

    def budget(self, lengths: Sequence[int], packs: Packs, *, most_tokens: int) -> int:
        """Return the number of tokens per micro-batch, at most `most_tokens`, with which samples of
        these lengths, put together by `packs`, should be quickest. No measurement is used, so all
        runs get the same. The policy must have been cut before."""
        assert self._expected is not None
        cost = self._expected
        return plan_budget(lengths, cost.stages, cost.links, most_tokens=most_tokens, packs=packs)

    def _chooser(self) -> SweepChooser:
        known = self.measured or self._expected
        assert known is not None
        return self._new_chooser(known)

    def _layers_of(self, model: nn.Module) -> tuple[int, ...]:
        if num_layers_of(model) == sum(self._layers):
            return self._layers
        return self._balanced(model)

    def _balanced(self, model: nn.Module) -> tuple[int, ...]:
        number, flops = num_layers_of(model), FlopModel.of(model)
        # As if every token were predicted: in reinforcement learning most are.
        of_layer = max(flops.body, 1.0) / number
        return layers_of_stages(
            (),
            num_layers=number,
            num_stages=self.place.count,
            layer_work=of_layer,
            last_work=flops.output,
        )

    # -- between two steps -----------------------------------------------------------------

    def arrange(self, arrangement: Arrangement) -> None:
        """Use this kind of links and these costs from now on. All ranks make this call together."""
        self.measured = arrangement.measured
        if self._links is not None:
            self._links.use(arrangement.links)

    def take_times(self) -> StageTimes:
        """Return this stage's times of ops and messages since the last call."""
        arrivals = {} if self._links is None else self._links.arrivals()
        place = self.place.index
        times = replace(
            self._executor.clock.take(place, self._layers[place], arrivals),
            head_layers=self._head_layers,
            direct_lost=self._links is not None and self._links.direct_lost,
        )
        if self._shards is None or self._shards.size() == 1:
            return times
        return replace(
            times,
            round_trips=round_trips(self._shards),
            shard_bytes=SENT_OF_WEIGHTS * self._num_bytes / self._shards.size(),
        )

    # -- what all stages decide or have together -------------------------------------------

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any stage of the pipeline."""
        return any(value for (value,) in self._peers.gather([float(flag)]))

    def sums(self, own: Sequence[float]) -> list[float]:
        """Return the sums of all stages' numbers, element by element; the same on each stage."""
        return [math.fsum(values) for values in zip(*self._peers.gather(own), strict=True)]

    def norm(self, own: float) -> float:
        """Return the norm of the whole model's gradient, from each stage's norm `own`."""
        return math.sqrt(self.sums([own * own])[0])

    def union(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """On the first stage, yield all stages' names and tensors, in host memory. The others get
        none, but must iterate to the end too. No two stages may use the same name."""
        if self.place.is_first:
            yield from named
            for stage in range(1, self.place.count):
                yield from self._peers.receive_named(stage)
        else:
            self._peers.send_named(named, 0)

    # -- the tied weight -------------------------------------------------------------------

    def mirror_of(self, trained: Trained) -> Tied | None:
        """Return the tied weight (of embeddings and output layer) that the first stage owns and
        this stage has a copy of, trained or not. None: there is no such weight."""
        policy = trained.module
        assert isinstance(policy, StagedPolicy)
        return policy.tied if self.place.is_last else None

    def sum_tied(self, trained: Trained) -> None:
        """Add the gradient of the last stage's tied output layer to that of the first stage's
        embeddings, which own the weight."""
        tied = _tied(trained)
        if tied is None:
            return
        if self.place.is_last:
            gradient = trained.mirror_gradient()
            if gradient is None:
                gradient = torch.zeros_like(_parameter(trained, tied.mirror))
            self._peers.send(local(gradient), 0)
        elif self.place.is_first:
            sums = trained.optimizer.gradients()
            assert tied.owner in sums, "an update without a gradient"
            own = local(sums[tied.owner])
            own.add_(self._peers.receive(own, self.place.count - 1))

    @torch.no_grad()
    def share_tied(self, trained: Trained) -> None:
        """Copy the tied weight from the first stage, which has updated it, to the last."""
        tied = _tied(trained)
        if tied is None:
            return
        if self.place.is_first:
            self._peers.send(local(_parameter(trained, tied.owner)), self.place.count - 1)
        elif self.place.is_last:
            own = local(_parameter(trained, tied.mirror))
            own.copy_(self._peers.receive(own, 0))
            trained.forget_gradients()  # an optimizer forgets its own; it has not the mirror's


def _tied(trained: Trained) -> Tied | None:
    """Return the policy's weight that two stages share. None: none, or it is not trained."""
    policy = trained.module
    assert isinstance(policy, StagedPolicy)
    return policy.tied if policy.tied is not None and policy.tied.is_trained else None


def _parameter(trained: Trained, name: str) -> Tensor:
    policy = trained.module
    assert isinstance(policy, StagedPolicy)
    return policy.model.get_parameter(name)


# -- before anything is measured -------------------------------------------------------------------


def expected(flops: FlopModel, layers: Sequence[int]) -> Measured:
    """Return the expected costs of a model's stages with these layers, in FLOPs, not seconds."""
    last = len(layers) - 1
    stages = [_stage_cost(flops, n / sum(layers), stage == last) for stage, n in enumerate(layers)]
    return Measured(stages=tuple(stages), links=(Link(),) * last, bytes_per_token=0.0)


def _stage_cost(flops: FlopModel, share: float, is_last: bool) -> StageCost:
    """Return the expected FLOPs of a stage with this share of the layers. The layers' matrices cost
    the same in forward, backward for inputs and backward for weights."""
    per_token = max(flops.body, 1.0) * share / 3
    # Windows that end somewhere make pairs of a token and few others, which count as none.
    pairs = share * flops.attention * sum(window is None for window in flops.windows)

    def op(of_attention: float, of_output: float) -> OpCost:
        return OpCost(
            fixed_s=MICRO_BATCH_OVERHEAD_TOKENS * per_token,
            per_token_s=per_token,
            per_pair_s=of_attention * pairs,
            per_target_s=of_output * flops.output if is_last else 0.0,
        )

    return StageCost(
        f=op(ATTENTION_OF_F, 1 / 3),
        i=op(1 - ATTENTION_OF_F, 2 / 3),  # the output layer's weights have their product here
        w=op(0.0, 0.0),
    )
