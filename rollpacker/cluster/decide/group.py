"""Computes how loaded a group of jobs is that take turns on nodes, and how long a turn takes.

Every job is pinned to rollout nodes, and all share the group's training nodes. When each job
rolls out and trains once a turn, in one cyclic order, the schedule is a timed event graph, whose
period is the largest mean of a cycle:

    period = max(cycle, load)
      cycle = the longest single iteration, switches and stages without a pool included
      load  = the busiest resource: all training together, or all rollouts of one node

This closed form is exact (`closed_form_holds`) where

  1. any two jobs have the same rollout nodes or none in common, and
  2. the busiest rollout node has room for the stages without a pool:
     its load + the longest `between` + the longest `after` <= the period.

Why: a cycle that visits m stretches of rollouts and m of trainings passes m hand-backs from
training to rollout, which cost a token each, and goes around the order of jobs at least once, which
costs another. No event occurs twice in it, so that its seconds are at most
m x (node load + between + after) + all training <= (m + 1) x period. Elsewhere jobs wait for each
other crosswise, and `period_s` takes the largest cycle mean itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollpacker.cluster.decide.job import ClusterJob, Times

LINK_OVERHEAD = 1.17
"""Factor: seconds of sending weights over the link, divided by their bytes over the link's rate.
Measured in RollMux, Fig. 12."""
SPREAD_GB_S = 6.0
"""Rate at which weights spread between the nodes of a rollout pool, in 1e9 bytes per second, fitted
to the same figure of RollMux."""

TAIL_MOVE_S = 3.0
"""Seconds to move the last samples (tail) of a rollout to the few devices that go on with them. It
is the largest value that the RollPacker paper names."""


class Holds(NamedTuple):
    """Seconds of one iteration in a group: with the rollout or training pool held, and without."""

    rollout_s: float
    between_s: float
    train_s: float
    after_s: float

    @property
    def cycle_s(self) -> float:
        return self.rollout_s + self.between_s + self.train_s + self.after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Factors and seconds by which the times of a job alone become the times for which it holds
    pools in its group."""

    rollout_scale: float = 1.0
    """Rollout seconds on this pool over those of the profile, which other GPUs change."""
    train_scale: float = 1.0
    """Training seconds on this pool over those of the profile: below 1 with faster GPUs, or with
    more training nodes than the job asked for."""
    rollout_switch_s: float = 0.0
    train_switch_s: float = 0.0
    """Seconds to park and to wake on the training pool. 0 where no other job uses the pool."""
    publish_s: float = 0.0
    """Seconds in which weights cross the link after training, while the training pool is held."""
    tail: float = 0.0
    """Share of a rollout, at its end, in which its pool is already the next job's."""

    def work_s(self, times: Times) -> float:
        """Seconds of an iteration without waits and switches, by which a slowdown is measured."""
        return sum(self.here(times))

    def here(self, times: Times) -> Times:
        """Return the times on these nodes, without waits and switches. Sending the weights is part
        of training."""
        rollout_s = times.rollout_s * self.rollout_scale
        train_s = times.train_s * self.train_scale + self.publish_s
        return times._replace(rollout_s=rollout_s, train_s=train_s)

    def alone(self, here: Times) -> Times:
        """Return the times alone from those measured on these nodes: the inverse of `here`."""
        rollout_s = here.rollout_s / self.rollout_scale
        train_s = max(here.train_s - self.publish_s, 0.0) / self.train_scale
        return here._replace(rollout_s=rollout_s, train_s=train_s)

    @property
    def tail_move_s(self) -> float:
        """Seconds of moving a rollout's tail to few devices. 0 if the job releases none early."""
        return TAIL_MOVE_S if self.tail else 0.0

    def after_rollout_s(self, times: Times) -> float:
        """Return the seconds from leaving the rollout nodes until training can begin."""
        tail_s = times.rollout_s * self.rollout_scale * self.tail
        return tail_s + self.tail_move_s + times.between_s

    def holds(self, times: Times) -> Holds:
        rollout_s = times.rollout_s * self.rollout_scale
        tail_s = rollout_s * self.tail
        return Holds(
            rollout_s - tail_s + self.rollout_switch_s,
            self.after_rollout_s(times),
            times.train_s * self.train_scale + self.publish_s + self.train_switch_s,
            times.after_s,
        )


def sharing(
    job: ClusterJob,
    *,
    rollout_nodes: int,
    train_devices: int,
    rollout_scale: float = 1.0,
    train_scale: float = 1.0,
    node_shared: bool,
    pool_shared: bool,
    link_gb_s: float = math.inf,
    tail_release: bool = True,
) -> Sharing:
    """Return how a job shares nodes, on this many rollout nodes of a group with this many training
    devices."""
    assert train_devices >= job.train_devices
    lanes = min(job.train_devices, job.rollout_devices)
    publish_s = LINK_OVERHEAD * job.model_gb / (lanes * link_gb_s)
    if rollout_nodes > 1 and math.isfinite(link_gb_s):
        publish_s += job.model_gb / SPREAD_GB_S
    released = job.tail_share * (1 - job.tail_devices_share)
    return Sharing(
        rollout_scale=rollout_scale,
        train_scale=train_scale * job.train_devices / train_devices,
        rollout_switch_s=job.rollout_switch_s if node_shared else 0.0,
        train_switch_s=job.train_switch_s if pool_shared else 0.0,
        publish_s=publish_s,
        tail=released if node_shared and tail_release else 0.0,
    )


# -- the period --------------------------------------------------------------------

Pins = Sequence[frozenset[object]]
"""For each job, the set of its rollout nodes."""


def cycle_s(holds: Sequence[Holds]) -> float:
    """Seconds of the longest iteration of any job."""
    return max(one.cycle_s for one in holds)


def rollout_load_s(holds: Sequence[Holds], pins: Pins) -> float:
    """Return the seconds that one turn of every job takes on the busiest rollout node."""
    nodes: dict[object, float] = {}
    for one, pinned in zip(holds, pins, strict=True):
        for node in pinned:
            nodes[node] = nodes.get(node, 0.0) + one.rollout_s
    return max(nodes.values())


def load_s(holds: Sequence[Holds], pins: Pins) -> float:
    """Return the seconds that one turn of every job takes on the busiest resource: all training, or
    a rollout node."""
    return max(math.fsum(one.train_s for one in holds), rollout_load_s(holds, pins))


def closed_period_s(holds: Sequence[Holds], pins: Pins) -> float:
    """A lower bound of the period in seconds; the period itself where `closed_form_holds`."""
    return max(cycle_s(holds), load_s(holds, pins))


def closed_form_holds(holds: Sequence[Holds], pins: Pins) -> bool:
    """Whether the closed form of the period is known to be exact, by the module's conditions."""
    owner: dict[object, frozenset[object]] = {}
    if not all(owner.setdefault(node, pinned) == pinned for pinned in pins for node in pinned):
        return False
    outside_s = max(one.between_s for one in holds) + max(one.after_s for one in holds)
    return len(holds) == 1 or (
        rollout_load_s(holds, pins) + outside_s <= closed_period_s(holds, pins)
    )


def period_s(holds: Sequence[Holds], pins: Pins) -> float:
    """Seconds in which all jobs have one turn each, in the order given; exact for fixed holds."""
    if closed_form_holds(holds, pins):
        return closed_period_s(holds, pins)
    return largest_cycle_mean(_event_graph(holds, pins))


Edges = Mapping[tuple[int, int], tuple[float, int]]
"""For pairs of events, the seconds between them and by how many turns the second is later."""


def _event_graph(holds: Sequence[Holds], pins: Pins) -> Edges:
    """Return the event graph, whose events 2k and 2k + 1 begin job k's rollout and training."""
    edges: dict[tuple[int, int], tuple[float, int]] = {}

    def add(source: int, target: int, seconds: float, tokens: int) -> None:
        known = edges.get((source, target))
        # Of two edges with the same tokens only the longer matters; with fewer, both would.
        if known is None or known[0] < seconds:
            assert known is None or known[1] == tokens
            edges[source, target] = (seconds, tokens)

    for k, one in enumerate(holds):
        add(2 * k, 2 * k + 1, one.rollout_s + one.between_s, 0)
        add(2 * k + 1, 2 * k, one.train_s + one.after_s, 1)
    for node in set[object]().union(*pins):
        there = [k for k, pinned in enumerate(pins) if node in pinned]
        for a, b in zip(there, there[1:] + there[:1], strict=True):
            add(2 * a, 2 * b, holds[a].rollout_s, int(b <= a))
    for a in range(len(holds)):
        b = (a + 1) % len(holds)
        add(2 * a + 1, 2 * b + 1, holds[a].train_s, int(b <= a))
    return edges


def largest_cycle_mean(edges: Edges) -> float:
    """Return the largest mean of a cycle, its seconds over its tokens, by Howard-like ascent."""
    nodes = sorted({node for edge in edges for node in edge})
    mean = 0.0
    while True:
        better = _cycle_above(edges, nodes, mean)
        if better is None:
            return mean
        mean = better


def _cycle_above(edges: Edges, nodes: Sequence[int], mean: float) -> float | None:
    """Return the mean of a cycle that is larger than `mean`, or None if there is none."""
    slack = 1e-13 * max(mean, *(seconds for seconds, _ in edges.values()))
    reach = dict.fromkeys(nodes, 0.0)
    before: dict[int, int] = {}
    changed = None
    for _ in range(len(nodes) + 1):
        changed = None
        for (source, target), (seconds, tokens) in edges.items():
            new = reach[source] + seconds - mean * tokens
            if new > reach[target] + slack:
                reach[target], before[target], changed = new, source, target
        if changed is None:
            return None
    assert changed is not None
    for _ in nodes:  # back into the cycle
        changed = before[changed]
    seconds, tokens, node = 0.0, 0, changed
    while True:
        edge = edges[before[node], node]
        seconds, tokens, node = seconds + edge[0], tokens + edge[1], before[node]
        if node == changed:
            break
    found = seconds / tokens
    return found if found > mean else None
