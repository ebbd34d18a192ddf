"""The view that the run's own process has of its trainer's pipeline, and its instructions to the
ranks between steps.

    ranks --StageTimes--> Overseer --> the log: which link or stage has turned slow, or well again
                                   --> Arrangement: which links to use, what all of it costs

The overseer outlives the ranks: ranks that replace lost ones are told the same. No torch is needed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollpacker.pipeline.plan.choosers import KINDS
from rollpacker.pipeline.plan.link_choice import LinkChoice, LinkKind
from rollpacker.pipeline.plan.watch import Finding, Messages, PipelineWatch, SweepTimes, link_of
from rollpacker.pipeline.plan.work import Measured, fit_stage_cost
from rollpacker.pipeline.stages.times import StageTimes
from rollpacker.trainer.trainer import PipelineConfig

logger = logging.getLogger(__name__)

PREFIX = "perf/pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """What all ranks of a trainer are told between steps: kind of links, and costs to plan with."""

    links: LinkKind
    measured: Measured | None
    """Measured costs of ops and messages. None: nothing was measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A slow (or again well) link or stage in one of the trainer's pipelines. Pipeline n
    consists of shard n (one process) of every stage."""

    version: int
    """Version of the weights after the step in which this was found."""
    shard: int
    finding: Finding


def first_arrangement(config: PipelineConfig) -> Arrangement:
    """Return what ranks are told at the start: no measured costs, and direct links for `auto`."""
    return Arrangement(links="direct" if config.links == "auto" else config.links, measured=None)


class Overseer:
    """Watches one trainer, whose ranks are arranged as [stages, shards]. Each shard's ranks,
    one per stage, are a pipeline, and watched by themselves: one slow link holds up all."""

    def __init__(self, config: PipelineConfig, num_shards: int) -> None:
        self.arrangement = first_arrangement(config)
        """What the ranks are to be told before the next step."""
        self.found: list[Found] = []
        """All links and stages found slow, or well again, so far."""
        self._choice = LinkChoice() if config.links == "auto" else None
        self._num_stages = config.stages
        self._watches = [PipelineWatch(config.stages) for _ in range(num_shards)]

    def observe(self, version: int, times: Sequence[StageTimes]) -> dict[str, float]:
        """Judge an optimizer step by the times that each rank measured, in the order of ranks.
        `version`: that of the weights after it. Returns the step's metrics."""
        stages = [times[at : at + len(self._watches)] for at in self._places(times)]
        used = self.arrangement.links
        for shard, watch in enumerate(self._watches):
            sweep = sweep_times([shards[shard] for shards in stages], used)
            for finding in watch.observe(sweep):
                self._tell(Found(version=version, shard=shard, finding=finding))
        self._arrange(
            _measured(stages) or self.arrangement.measured,
            direct_lost=any(one.direct_lost for one in times),
        )
        return self._metrics(stages, used)

    def of_layout(self, config: PipelineConfig, *, same_places: bool) -> Overseer:
        """Return an overseer for ranks in another layout of as many stages, with the same kind of
        links. `same_places`: ranks keep their devices, so the links keep their usual times."""
        assert config.stages == self._num_stages
        found = Overseer(config, len(self._watches))
        found.found += self.found
        found._choice = self._choice
        found.arrangement = Arrangement(links=self.arrangement.links, measured=None)
        if same_places:
            for new, old in zip(found._watches, self._watches, strict=True):
                new.take_links(old)
        return found

    @property
    def slow_links(self) -> set[int]:
        """Numbers of links that are slow in any of the trainer's pipelines."""
        return {number for watch in self._watches for number in watch.slow_links}

    @property
    def slow_links_of_shards(self) -> set[tuple[int, int]]:
        """The links that are slow now, as pairs of the pipeline's number and the link's."""
        watches = enumerate(self._watches)
        return {(shard, number) for shard, watch in watches for number in watch.slow_links}

    @property
    def slow_stages(self) -> set[int]:
        """Numbers of stages that are slow in any of the trainer's pipelines."""
        return {number for watch in self._watches for number in watch.slow_stages}

    def _places(self, times: Sequence[StageTimes]) -> range:
        places = range(0, len(times), len(self._watches))
        assert [times[at].stage for at in places] == list(range(self._num_stages))
        return places

    def _tell(self, found: Found) -> None:
        self.found.append(found)
        finding = found.finding
        level = logging.WARNING if finding.slow else logging.INFO
        shard = "" if len(self._watches) == 1 else f", shard {found.shard}"
        logger.log(level, "after step %d%s: pipeline %s", found.version, shard, finding)

    def _arrange(self, measured: Measured | None, *, direct_lost: bool) -> None:
        links = self.arrangement.links
        if self._choice is not None:
            links = self._choice.observe(self.slow_links, direct_lost=direct_lost)
        if links != self.arrangement.links:
            why = "all have been well for a while" if links == "direct" else "one is slow"
            logger.warning("from the next step on, pipeline stages use %s links: %s", links, why)
        self.arrangement = Arrangement(links=links, measured=measured)

    def _metrics(self, stages: Sequence[Sequence[StageTimes]], used: LinkKind) -> dict[str, float]:
        everybodys = [one for shards in stages for one in shards]
        busy_s, waiting_s = _busy_s(everybodys), math.fsum(one.waiting_s for one in everybodys)
        metrics = {f"{PREFIX}/host_links": float(used == "host")}
        if busy_s:
            metrics[f"{PREFIX}/bubble_ratio"] = waiting_s / (busy_s + waiting_s)
        for number, shards in enumerate(stages):
            name = f"{PREFIX}/stage_{number}"
            own_s, all_s = _busy_s(shards), _busy_s(shards) + sum(s.waiting_s for s in shards)
            metrics[f"{name}/layers"] = float(shards[0].num_layers)
            metrics[f"{name}/busy_s"] = own_s / len(shards)
            metrics[f"{name}/busy_ratio"] = own_s / all_s if all_s else 0.0
            metrics[f"{name}/live_tokens/max"] = float(max(s.peak_live_tokens for s in shards))
            metrics[f"{name}/slow"] = float(number in self.slow_stages)
        for number in range(self._num_stages - 1):
            name = f"{PREFIX}/link_{number}"
            ways = _pooled(stages, number)
            if all(ways):
                both = math.fsum(statistics.median(s for _, s in way) for way in ways)
                metrics[f"{name}/message_s"] = both / 2
            metrics[f"{name}/slow"] = float(number in self.slow_links)
        return metrics


def sweep_times(stages: Sequence[StageTimes], over: LinkKind) -> SweepTimes:
    """Return one pipeline's times of ops and messages, from what each of its stages measured."""
    return SweepTimes(
        ops=[stage.ops for stage in stages],
        down=[stage.from_previous for stage in stages[1:]],
        up=[stage.from_next for stage in stages[:-1]],
        over=over,
    )


def _measured(stages: Sequence[Sequence[StageTimes]]) -> Measured | None:
    """Return costs fitted to all ranks' times, [stage][pipeline]. None: some have no times."""
    messages = [_pooled(stages, number) for number in range(len(stages) - 1)]
    ops = [
        {kind: [pair for s in shards for pair in s.ops[kind]] for kind in KINDS}
        for shards in stages
    ]
    if not (all(map(all, messages)) and all(map(all, (of.values() for of in ops)))):
        return None
    num_bytes = [size for down, _ in messages for size, _ in down]
    tokens = [load.tokens for of in ops[1:] for load, _ in of["F"]]
    return Measured(
        stages=tuple(
            fit_stage_cost(
                {kind: ([x for x, _ in of[kind]], [s for _, s in of[kind]]) for kind in of}
            )
            for of in ops
        ),
        links=tuple(link_of(*both) for both in messages),
        bytes_per_token=statistics.fmean(num_bytes) / max(statistics.fmean(tokens), 1.0),
    )


def _pooled(stages: Sequence[Sequence[StageTimes]], link: int) -> tuple[Messages, Messages]:
    """Return all pipelines' messages over this link: to the next stage, and back."""
    down = [message for shard in stages[link + 1] for message in shard.from_previous]
    return down, [message for shard in stages[link] for message in shard.from_next]


def _busy_s(shards: Iterable[StageTimes]) -> float:
    return math.fsum(one.busy_s for one in shards)
