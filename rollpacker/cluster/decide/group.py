"""Computes how long a group of jobs takes for one turn of each, and how busy its nodes are.

A job has rollout nodes of its own or shared ones; all jobs share the group's training nodes. In a
turn a job rolls out once and trains once, and the turns follow each other in one cyclic order. The
*period* is the seconds in which each job has one turn:

    period = max(cycle, load)
      cycle = the longest iteration of any job, with switches and stages that hold no pool
      load  = the seconds of use of the busiest resource: all training, or the rollouts of one node

This formula is exact (`closed_form_holds`) if

  1. any two jobs have the same rollout nodes or none in common, and
  2. load of the busiest rollout node + longest `between` + longest `after` <= period, where these
     are the stages before and after training that hold no pool.

Otherwise jobs wait for each other crosswise, and the period may be longer. It is the largest mean
of a cycle (its seconds over the turns that it spans) in a graph of events (begins of phases) and
the seconds between them, which `period_s` searches.

Why the formula is exact: a cycle with m stretches of rollouts and m of trainings spans m + 1 turns
or more, one for each step from training to rollout and one for the order of jobs. No event occurs
twice in it: its seconds are at most m x (node load + between + after) + all training, which is at
most (m + 1) x period.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollpacker.cluster.decide.job import ClusterJob, Times

LINK_OVERHEAD = 1.17
"""Factor: seconds of sending weights over their bytes by the link's rate (RollMux, Fig. 12)."""
SPREAD_GB_S = 6.0
"""Rate at which weights spread among a rollout pool's nodes, in 1e9 bytes/s (RollMux, Fig. 12)."""

TAIL_MOVE_S = 3.0
"""Seconds to move the last samples (tail) of a rollout to the few devices that go on with them. It
is the largest value that the RollPacker paper names."""


class Holds(NamedTuple):
    """Seconds of a job's iteration in a group: rollout (it holds the rollout pool), from then to
    training (no pool), training (the training pool), and the rest (no pool)."""

    rollout_s: float
    between_s: float
    train_s: float
    after_s: float

    @property
    def cycle_s(self) -> float:
        return self.rollout_s + self.between_s + self.train_s + self.after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a job's times in its group (jobs that share nodes) differ from those alone."""

    rollout_scale: float = 1.0
    """Factor: rollout seconds on this group's GPUs over those that the job was submitted with."""
    train_scale: float = 1.0
    """Factor: training seconds in this group over those that the job was submitted with. Below 1
    with faster GPUs, or with more training nodes than the job asked for."""
    rollout_switch_s: float = 0.0
    train_switch_s: float = 0.0
    """Seconds to move the job off the training devices (park) and back. 0 if it is alone there."""
    publish_s: float = 0.0
    """Seconds after training to send the weights over the link, with the training pool held."""
    tail: float = 0.0
    """Share of a rollout's node seconds that its last part (tail) leaves to the next job."""

    def work_s(self, times: Times) -> float:
        """Seconds of the job's iteration in this group, less waits and switches between jobs."""
        return sum(self.here(times))

    def here(self, times: Times) -> Times:
        """Return a job's times as they are in this group, without waits and without moving jobs
        onto and off devices. Sending the weights is part of training."""
        rollout_s = times.rollout_s * self.rollout_scale
        train_s = times.train_s * self.train_scale + self.publish_s
        return times._replace(rollout_s=rollout_s, train_s=train_s)

    def alone(self, here: Times) -> Times:
        """Return the times that the job would have alone. `here`: its times in this group."""
        rollout_s = here.rollout_s / self.rollout_scale
        train_s = max(here.train_s - self.publish_s, 0.0) / self.train_scale
        return here._replace(rollout_s=rollout_s, train_s=train_s)

    @property
    def tail_move_s(self) -> float:
        """Seconds to move a rollout's last part (tail) to few devices. 0 if the job has no tail."""
        return TAIL_MOVE_S if self.tail else 0.0

    def after_rollout_s(self, times: Times) -> float:
        """Return the seconds of a rollout's last part (tail) on few devices and of the wait for
        rewards, after which the job can train."""
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
    """Return what sharing costs a job in a group of so many rollout nodes and training devices.
    `rollout_scale` and `train_scale`: seconds here over those the job was submitted with.
    `tail_release`: whether a rollout's last part leaves nodes to the next job."""
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
    """Return the seconds of the longest single iteration among the jobs."""
    return max(one.cycle_s for one in holds)


def rollout_load_s(holds: Sequence[Holds], pins: Pins) -> float:
    """Return the seconds for which one turn of each job keeps the busiest rollout node busy."""
    nodes: dict[object, float] = {}
    for one, pinned in zip(holds, pins, strict=True):
        for node in pinned:
            nodes[node] = nodes.get(node, 0.0) + one.rollout_s
    return max(nodes.values())


def load_s(holds: Sequence[Holds], pins: Pins) -> float:
    """Return the seconds for which one turn of each job keeps the busiest resource busy: the
    training nodes together, or one rollout node."""
    return max(math.fsum(one.train_s for one in holds), rollout_load_s(holds, pins))


def closed_period_s(holds: Sequence[Holds], pins: Pins) -> float:
    """Return a lower bound of the seconds for one turn of each job, exact if
    `closed_form_holds`."""
    return max(cycle_s(holds), load_s(holds, pins))


def closed_form_holds(holds: Sequence[Holds], pins: Pins) -> bool:
    """Whether `closed_period_s` is exact: any two jobs have the same rollout nodes or none in
    common, and the busiest rollout node is idle for at least the longest stages without a pool."""
    owner: dict[object, frozenset[object]] = {}
    if not all(owner.setdefault(node, pinned) == pinned for pinned in pins for node in pinned):
        return False
    outside_s = max(one.between_s for one in holds) + max(one.after_s for one in holds)
    return len(holds) == 1 or (
        rollout_load_s(holds, pins) + outside_s <= closed_period_s(holds, pins)
    )


def period_s(holds: Sequence[Holds], pins: Pins) -> float:
    """Return the seconds in which each job has one turn, in the order of `holds`, if all iterations
    of a job are alike."""
    if closed_form_holds(holds, pins):
        return closed_period_s(holds, pins)
    return largest_cycle_mean(_event_graph(holds, pins))


Edges = Mapping[tuple[int, int], tuple[float, int]]
"""For each pair of events (begins of jobs' phases): the seconds between them, and by how many turns
the second event is later."""


def _event_graph(holds: Sequence[Holds], pins: Pins) -> Edges:
    """Return the graph of events: event 2k begins job k's rollout, event 2k + 1 its training."""
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
    """Return the largest ratio of seconds to turns of any cycle in the graph of events. The search
    goes from one cycle to a larger one, as Howard's algorithm does."""
    nodes = sorted({node for edge in edges for node in edge})
    mean = 0.0
    while True:
        better = _cycle_above(edges, nodes, mean)
        if better is None:
            return mean
        mean = better


def _cycle_above(edges: Edges, nodes: Sequence[int], mean: float) -> float | None:
    """Return the seconds per turn of some cycle that has more than `mean`; None without one."""
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
