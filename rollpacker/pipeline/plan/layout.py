"""Proposals of other layouts for a pipeline's layers and processes, by measured times.

A stage that became slow is to have fewer layers. Two processes of one stage between which the
network became slow are to be in two stages: between processes of a stage go a step's weights and
gradients, between stages hidden states and their gradients alone, which hold no sender up.

For example, stage 0 has devices 0 and 1, stage 1 has 2 and 3, and the network between 0 and 1 is
slow: then stage 0 gets 0 and 2, stage 1 gets 1 and 3, and the slow way is a link between stages.

Either change takes a switch between two steps, which must pay before the run ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollpacker.pipeline.plan.choosers import KINDS
from rollpacker.pipeline.plan.plan import ready_choosers
from rollpacker.pipeline.plan.split import split_layers
from rollpacker.pipeline.plan.virtual_time import run
from rollpacker.pipeline.plan.watch import LinkWatch, WatchConfig
from rollpacker.pipeline.plan.work import Link, Load, OpCost, StageCost, Work, constant

MIN_GAIN = 0.1
"""Least share of a sweep's (layers) or step's time (devices) that a new layout must save."""

Pair = tuple[int, int]
"""Numbers of two places (devices of the trainer's ranks), the lower one first."""

CONFIRM_STEPS = 3
"""Number of steps in a row in which another split of the layers must be predicted faster."""
QUIET_STEPS = 10
"""Number of steps after a proposed layout in which no other is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a pipeline: how many layers each stage has, and which device each rank has."""

    layers: tuple[int, ...]
    """Number of the model's layers in each stage."""
    places: tuple[int, ...]
    """Number of the device of each rank. The ranks of stage 0 come first, then those of stage 1;
    the n-th ranks of all stages together are pipeline n."""

    def __str__(self) -> str:
        return f"{list(self.layers)} layers, at places {list(self.places)}"


# -- layers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSplit:
    """Another split of the layers among stages. `before_s` and `after_s`: predicted seconds of a
    sweep (all micro-batches once through the stages) with the present split and with this one."""

    layers: tuple[int, ...]
    before_s: float
    after_s: float


def faster_split(
    costs: Sequence[StageCost],
    layers: Sequence[int],
    loads: Sequence[Load],
    links: Sequence[Link],
    *,
    head_layers: float = 0.0,
    bytes_per_token: float = 0.0,
) -> NewSplit | None:
    """Return the split of the layers that is predicted to save more than `MIN_GAIN` of a sweep of
    micro-batches of sizes `loads`, or None. `costs` were measured with the present split, `layers`.
    The last stage also has the output layer, the work of `head_layers` layers."""
    if not loads:
        return None
    work = Work.of(costs, loads, bytes_per_token=bytes_per_token)
    heads = [0.0] * (len(layers) - 1) + [head_layers]
    slowness = [
        work.stage_s(stage) / (count + head)
        for stage, (count, head) in enumerate(zip(layers, heads, strict=True))
    ]
    if min(slowness) <= 0:
        return None
    found = split_layers([1.0] * sum(layers), len(layers), last_s=head_layers, slowness=slowness)
    if found == list(layers):
        return None
    scaled = [
        _times(cost, (after + head) / (before + head))
        for cost, before, after, head in zip(costs, layers, found, heads, strict=True)
    ]
    after = Work.of(scaled, loads, bytes_per_token=bytes_per_token)
    before_s, after_s = (
        run(ready_choosers(len(layers)), one, constant(links)).makespan_s for one in (work, after)
    )
    if before_s - after_s <= MIN_GAIN * before_s:
        return None
    return NewSplit(layers=tuple(found), before_s=before_s, after_s=after_s)


def _times(cost: StageCost, factor: float) -> StageCost:
    return StageCost(*(_sum([cost.of(kind)], factor) for kind in KINDS))


def _mean(costs: Sequence[StageCost]) -> StageCost:
    return StageCost(*(_sum([one.of(kind) for one in costs], 1 / len(costs)) for kind in KINDS))


def _sum(ops: Sequence[OpCost], factor: float) -> OpCost:
    return OpCost(
        fixed_s=factor * math.fsum(op.fixed_s for op in ops),
        per_token_s=factor * math.fsum(op.per_token_s for op in ops),
        per_pair_s=factor * math.fsum(op.per_pair_s for op in ops),
        per_target_s=factor * math.fsum(op.per_target_s for op in ops),
    )


# -- places ------------------------------------------------------------------------------------


def shard_pairs(places: Sequence[int], num_stages: int) -> Iterator[Pair]:
    """Yield the pairs of devices in the same stage. `places`: the device of each rank, by stage."""
    size = len(places) // num_stages
    for first in range(0, len(places), size):
        for one, other in itertools.combinations(places[first : first + size], 2):
            yield _pair(one, other)


def link_pairs(places: Sequence[int], num_stages: int) -> Iterator[Pair]:
    """Yield the pairs of devices that a link connects. `places`: each rank's device, by stage."""
    size = len(places) // num_stages
    for one, other in zip(places, places[size:], strict=False):
        yield _pair(one, other)


def better_places(
    places: Sequence[int], num_stages: int, *, slow: Collection[Pair], fast: Collection[Pair]
) -> tuple[int, ...] | None:
    """Return another assignment of devices to ranks than `places`, with fewer `slow` pairs in a
    stage; among such, one with the fewest connections not known to be `fast`. None: there is none.
    Rank 0 keeps its device; pairs are swapped while that helps, so most others do, too."""

    def cost(order: Sequence[int]) -> tuple[int, int]:
        inside, between = (list(of(order, num_stages)) for of in (shard_pairs, link_pairs))
        unproven = sum(pair not in fast for pair in (*inside, *between))
        return sum(pair in slow for pair in inside), unproven

    best = tuple(places)
    least = first = cost(best)
    while True:
        swapped = (
            _swapped(best, one, other)
            for one, other in itertools.combinations(range(1, len(places)), 2)
        )
        found = min(swapped, key=cost, default=best)
        if cost(found) >= least:
            return best if least[0] < first[0] else None
        best, least = found, cost(found)


def _swapped(places: Sequence[int], one: int, other: int) -> tuple[int, ...]:
    order = list(places)
    order[one], order[other] = order[other], order[one]
    return tuple(order)


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTimes:
    """Times of messages between devices of the same stage, measured after a step."""

    there_and_back_s: Mapping[Pair, float]
    """Seconds of one message there and back, by pair of devices."""
    message_bytes: int
    step_bytes: float
    """Bytes that one device sends to another of the same stage in a training step."""
    step_s: float


class PairWatch:
    """Finds devices of the same stage between which the network turned slow, as `LinkWatch` does
    for links between stages. The times of test messages are scaled to a step's bytes."""

    def __init__(self, config: WatchConfig | None = None) -> None:
        self._config = WatchConfig() if config is None else config
        self._watches: dict[Pair, LinkWatch] = {}
        self._lost_s: dict[Pair, float] = {}
        self.last_s: dict[Pair, float] = {}
        """Seconds of the last message there and back, by pair of devices."""

    def observe(self, times: ShardTimes) -> list[Pair]:
        """Judge the times of a step. Returns the pairs of devices that turned slow in it."""
        turned = []
        steps_bytes = times.step_bytes / times.message_bytes
        for pair, seconds in times.there_and_back_s.items():
            watch = self._watches.setdefault(pair, LinkWatch(self._config))
            self.last_s[pair] = seconds
            way = [(times.message_bytes, seconds / 2)]
            whole_s = times.step_s / max(steps_bytes, 1e-9)
            changed, factor = watch.observe((way, way), whole_s, "direct")
            if factor is not None and not math.isinf(factor):
                seconds *= 1 - 1 / factor
            self._lost_s[pair] = seconds * steps_bytes
            if changed and watch.mark.slow:
                turned.append(pair)
        return turned

    @property
    def slow(self) -> list[Pair]:
        return [pair for pair, watch in self._watches.items() if watch.mark.slow]

    def lost_s(self, pair: Pair) -> float:
        """Return the seconds per step by which messages between these two devices exceed the usual;
        of a pair that was slow from the first step on, all their seconds."""
        return max(self._lost_s[pair], 0.0)


# -- when --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A proposal to change the pipeline's layout, with the reason and the seconds that it saves."""

    layout: Layout
    why: str
    saved_s: float
    """Seconds per training step that the proposed layout is expected to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSweep:
    """Costs of one step's sweep (all micro-batches forward and backward), as measured."""

    costs: Sequence[StageCost]
    """Costs of the three ops (F, I and W), by stage."""
    loads: Sequence[Load]
    links: Sequence[Link]
    bytes_per_token: float


class Relayouts:
    """Judges each step's times, and proposes a layout that saves more than the switch costs."""

    def __init__(self, layout: Layout, *, head_layers: float = 0.0) -> None:
        self.layout = layout
        self._head_layers = head_layers
        self._pairs = PairWatch()
        self._wait_steps = 0
        self._for: list[MeasuredSweep] = []
        """The last steps' sweeps, while another split would have been faster in each of them."""
        self._proposed: set[Layout] = set()

    def observe(
        self,
        *,
        sweep: MeasuredSweep | None,
        shards: ShardTimes | None,
        slow_links: Collection[Pair] = (),
        left_steps: float,
        switch_s: float,
    ) -> Proposal | None:
        """Judge a step (`sweep`, `shards`: None if not measured). Returns a layout that saves more
        in the run's `left_steps` steps than a switch takes (`switch_s`), once until a switch; or
        None. `slow_links`: devices in neighbouring stages between which a link is slow."""
        if shards is not None:
            self._pairs.observe(shards)
        if sweep is None or self._other_layers(sweep) is None:
            self._for = []
        else:
            self._for = [*self._for, sweep][-CONFIRM_STEPS:]
        if self._wait_steps > 0:
            self._wait_steps -= 1
            return None
        found = self._other_places(sweep, shards, slow_links)
        if found is None and len(self._for) == CONFIRM_STEPS:
            rows = zip(*(one.costs for one in self._for), strict=True)
            found = self._other_layers(replace(self._for[-1], costs=[_mean(row) for row in rows]))
        if found is None or found.layout in self._proposed:
            return None
        if found.saved_s * left_steps <= switch_s:
            return None
        self._proposed.add(found.layout)
        self._wait_steps = QUIET_STEPS
        return found

    def switched(self, layout: Layout) -> None:
        """Record that the run uses this layout now. Earlier proposals may be made again."""
        self.layout = layout
        self._proposed = set()
        self._for = []

    def _other_layers(self, sweep: MeasuredSweep) -> Proposal | None:
        layers = self.layout.layers
        found = faster_split(
            sweep.costs,
            layers,
            sweep.loads,
            sweep.links,
            head_layers=self._head_layers,
            bytes_per_token=sweep.bytes_per_token,
        )
        if found is None:
            return None
        why = (
            f"with {list(found.layers)} layers in the stages instead of {list(layers)} a sweep "
            f"would take {found.after_s:.2f} s instead of {found.before_s:.2f} s"
        )
        layout = replace(self.layout, layers=found.layers)
        return Proposal(layout=layout, why=why, saved_s=found.before_s - found.after_s)

    def _other_places(
        self, sweep: MeasuredSweep | None, shards: ShardTimes | None, slow_links: Collection[Pair]
    ) -> Proposal | None:
        places, stages = self.layout.places, len(self.layout.layers)
        slow = {*self._pairs.slow, *slow_links}
        inside = [pair for pair in shard_pairs(places, stages) if pair in slow]
        if shards is None or not inside:
            return None
        known = self._pairs.last_s | self._link_s(sweep, shards.message_bytes)
        at_least_s = min(known[pair] for pair in inside) / 2
        slow |= {pair for pair, seconds in known.items() if seconds > at_least_s}
        if 2 * len(slow) > len(known.keys() | slow):
            return None  # it is the network as a whole
        order = better_places(places, stages, slow=slow, fast=known.keys() - slow)
        saved_s = max(map(self._pairs.lost_s, inside))
        if order is None or saved_s <= MIN_GAIN * shards.step_s:
            return None
        named = ", ".join(f"{one} and {other}" for one, other in inside)
        why = (
            f"the network between places {named}, of the same stage, is slow and costs some "
            f"{saved_s:.2f} s of a step; with ranks at places {list(order)} they would be of "
            "neighbouring stages, or need not reach one another"
        )
        return Proposal(layout=replace(self.layout, places=order), why=why, saved_s=saved_s)

    def _link_s(self, sweep: MeasuredSweep | None, num_bytes: int) -> dict[Pair, float]:
        """Return a message's seconds there and back by linked devices; empty without `sweep`."""
        if sweep is None:
            return {}
        places, stages = self.layout.places, len(self.layout.layers)
        size = len(places) // stages
        return {
            pair: 2 * sweep.links[number // size].seconds(num_bytes)
            for number, pair in enumerate(link_pairs(places, stages))
        }
