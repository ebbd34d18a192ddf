"""The places where a job could go, among which a policy chooses.

In each group (jobs that share nodes) a job may be packed onto rollout nodes that are there, or add
nodes to the group. Besides, it may have a group of its own, in each pair of pools. A policy is a
function of what there is (`State`) and the job: the shipped one is in `cheapest_work.py`, RollMux's
in `cluster/sim/policies.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from rollpacker.cluster.decide.forecast import Forecast, Outlook, Rest, foresee, limits
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.layout import Layout, Pin
from rollpacker.cluster.decide.nodes import Node, Nodes, memory_gib, pairs
from rollpacker.cluster.decide.turns import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A place for a job that a policy has chosen: group, rollout nodes and order of turns."""

    group: int | None
    """Number of the group (jobs that share nodes) that the job joins. None for a new group."""
    layout: Layout
    """The group with the job in it. Free nodes to be taken have negative numbers (`new_node`)."""
    pin: Pin
    """The rollout nodes of this job."""
    order: Order

    @property
    def new_nodes(self) -> int:
        """Number of rollout nodes, free so far, that the job would take."""
        return sum(is_new(node) for node in self.pin)

    @property
    def takes_nodes(self) -> bool:
        """Whether the job would take nodes that are free now."""
        return self.group is None or self.new_nodes > 0


def new_node(number: int) -> object:
    """Return a rollout node with a negative number, for a free node to be chosen at the start."""
    return Node("", -1 - number)


def is_new(node: object) -> bool:
    return isinstance(node, Node) and node.number < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A group's loads and prices, quickly computed: they show if it deserves a closer look."""

    price_of_work: float
    price_per_h: float
    node_price_per_h: float
    train_share: float
    """Share of the training nodes' time that the group's jobs take, if nothing slowed them down."""
    rollout_share: float
    """Share of the least loaded rollout node's time that jobs take, if nothing slowed them down."""
    needed_share: float
    """Share of the training nodes' time that jobs take, if each is as slow as its SLO allows."""
    spare_devices: int

    def could_take(self, job: ClusterJob) -> bool:
        """Whether the job might join: the group has devices enough, and time to keep all SLOs."""
        mean = job.mean
        return (
            job.train_devices <= self.spare_devices
            and self.needed_share + mean.train_s / (job.slo * sum(mean)) * self._spread(job) <= 1.0
        )

    def rise(self, job: ClusterJob) -> float:
        """Estimate how much the group's price of work (price per hour over the jobs' speeds) rises
        if this job joins it at its best place."""
        mean = job.mean
        whole = sum(mean)
        train = self.train_share + mean.train_s / whole * self._spread(job)
        rollout = self.rollout_share + mean.rollout_s / whole
        packed = self.price_per_h * max(1.0, train, rollout)
        wider = (self.price_per_h + self.node_price_per_h) * max(1.0, train)
        return min(packed, wider) - self.price_of_work

    def _spread(self, job: ClusterJob) -> float:
        return job.train_devices / self.spare_devices


def summary_of(layout: Layout, rest: Mapping[str, Rest], iteration_s: Sequence[float]) -> Summary:
    """Return the summary of a group. `rest`: iterations and seconds to wait that jobs have left, by
    name. `iteration_s`: mean seconds of each job's iterations."""
    holds, works = layout.holds(), layout.works_s()
    busy: dict[object, float] = {}
    for pin, one, work in zip(layout.pins, holds, works, strict=True):
        for node in pin:
            busy[node] = busy.get(node, 0.0) + one.rollout_s / work
    shares = [one.train_s / work for one, work in zip(holds, works, strict=True)]
    return Summary(
        price_of_work=layout.price_of_work(iteration_s),
        price_per_h=layout.price_per_h,
        node_price_per_h=layout.rollout_pool.node_price_per_h,
        train_share=math.fsum(shares),
        rollout_share=min(busy.values()),
        needed_share=math.fsum(
            share / max(limit, 1.0)
            for share, limit in zip(shares, limits(layout, rest), strict=True)
        ),
        spare_devices=layout.num_train_nodes * layout.train_pool.devices_per_node,
    )


@dataclass(slots=True)
class Standing:
    """A group of jobs that share nodes: the jobs with their nodes (`layout`), the order of their
    turns, and what was computed about them so far."""

    layout: Layout
    order: Order
    train_nodes: tuple[Node, ...]
    rest: dict[str, Rest] = field(default_factory=dict)
    """Of jobs that have run or waited, by name: iterations left, seconds that they may wait."""
    tried: dict[str, int] = field(default_factory=dict)
    """Iterations that a job had left when other nodes or turns were last sought for it, by name."""
    _forecasts: list[Forecast] | None = None
    _summary: Summary | None = None
    _without: dict[str, float] = field(default_factory=dict)
    _outlooks: dict[tuple[str, Pin, Order], Outlook] = field(default_factory=dict)
    """Forecasts of the group with one more job, by that job's name, nodes and order of turns."""

    @property
    def summary(self) -> Summary:
        if self._summary is None:
            seconds = [one.iteration_s for one in self.forecasts]
            self._summary = summary_of(self.layout, self.rest, seconds)
        return self._summary

    @property
    def forecasts(self) -> list[Forecast]:
        """The forecast of each job of the group as it is now, in the order of `layout.jobs`."""
        if self._forecasts is None:
            self._forecasts = foresee(self.layout, self.order)
        return self._forecasts

    def with_layout(self, layout: Layout, order: Order) -> Standing:
        """Return the group with other jobs or another order of turns, and without forecasts."""
        names = {job.name for job in layout.jobs}
        rest = {name: one for name, one in self.rest.items() if name in names}
        return Standing(layout, order, self.train_nodes, rest)

    def changed(self) -> None:
        """Forget all that was computed about the group; it is computed anew when needed."""
        self._summary = self._forecasts = None
        self._without.clear()
        self.tried.clear()
        self._outlooks.clear()

    def saved_without(self, job: str) -> float:
        """Return by how much the group's price of work (price per hour over the jobs' speeds) falls
        if this job leaves it."""
        if job not in self._without:
            others = self.layout.minus(job)
            price = 0.0
            if others.jobs:
                forecasts = foresee(others, self.order)
                price = others.price_of_work([one.iteration_s for one in forecasts])
            self._without[job] = self.summary.price_of_work - price
        return self._without[job]

    def outlook(self, choice: Choice, job: ClusterJob, order: Order) -> Outlook:
        """Return the forecasts of the group with this job at the place `choice`, in this order.
        They are kept: jobs are examined after each change of the cluster, often in another
        group."""
        key = (job.name, choice.pin, order)
        found = self._outlooks.get(key)
        if found is None or found.layout != choice.layout:  # another job of that name
            found = self._outlooks[key] = Outlook(choice.layout, order)
        return found


class Settled(NamedTuple):
    """The group's number, and the nodes, that a job was given."""

    group: int
    rollout_nodes: tuple[Node, ...]
    train_nodes: tuple[Node, ...]
    opened: tuple[Node, ...]
    """The job's nodes that were free until now."""


@dataclass(slots=True, kw_only=True)
class State:
    """A cluster's nodes and groups (jobs that share nodes), from which a policy chooses."""

    nodes: Nodes
    groups: dict[int, Standing] = field(default_factory=dict)
    link_gb_s: float = math.inf
    max_group: int = 5
    num_groups: int = 0
    """Number of groups made so far, which is the number of the next group."""

    def copy(self) -> State:
        """Return a copy on which changes can be tried. Groups that do not change are shared."""
        return replace(self, nodes=self.nodes.copy(), groups=dict(self.groups))

    def as_if_full(self) -> State:
        """Return a copy with no free node, to see which places there are on used nodes alone."""
        nodes = self.nodes.copy()
        nodes.hide_free()
        return replace(self, nodes=nodes)

    def settle(
        self, job: ClusterJob, choice: Choice, *, tail_release: bool, rest: Rest | None = None
    ) -> Settled:
        """Put the job on the chosen nodes, and return its group's number and its nodes. `rest`:
        iterations that it has left and seconds that it may wait; None: all of its steps.
        `tail_release`: whether a rollout's last part leaves nodes to the next job."""
        layout, nodes = choice.layout, self.nodes
        taken = opened = nodes.take(layout.rollout_pool.name, choice.new_nodes)
        named = dict(zip(sorted((n for n in choice.pin if is_new(n)), key=str), taken, strict=True))
        pin = frozenset(named.get(node, node) for node in choice.pin)
        pins = tuple(
            pin if one.name == job.name else old
            for one, old in zip(layout.jobs, layout.pins, strict=True)
        )
        layout = replace(layout, pins=pins, tail_release=tail_release)
        if choice.group is None:
            number = self.num_groups
            self.num_groups += 1
            train_nodes = nodes.take(layout.train_pool.name, layout.num_train_nodes)
            opened += train_nodes
            standing = Standing(layout, choice.order, train_nodes)
        else:
            number = choice.group
            standing = self.groups[number].with_layout(layout, choice.order)
        if rest is not None:
            standing.rest[job.name] = rest
        self.groups[number] = standing
        rollout_nodes = tuple(sorted(node for node in pin if isinstance(node, Node)))
        nodes.settle(job.name, rollout_nodes, memory_gib(job, "rollout"))
        nodes.settle(job.name, standing.train_nodes, memory_gib(job, "train"))
        return Settled(number, rollout_nodes, standing.train_nodes, opened)

    def unsettle(self, name: str, number: int) -> tuple[Node, ...]:
        """Take the job `name` out of group `number`. Returns the nodes that become free by that."""
        standing, nodes = self.groups[number], self.nodes
        layout = standing.layout
        pin = next(
            pin for job, pin in zip(layout.jobs, layout.pins, strict=True) if job.name == name
        )
        rollout_nodes = sorted(node for node in pin if isinstance(node, Node))
        nodes.unsettle(name, (*rollout_nodes, *standing.train_nodes))
        closed = [node for node in rollout_nodes if not nodes.jobs_on(node)]
        self.groups[number] = standing.with_layout(layout.minus(name), standing.order)
        if not self.groups[number].layout.jobs:
            closed += standing.train_nodes
            del self.groups[number]
        nodes.give_back(closed)
        return tuple(closed)

    def alone(self, job: ClusterJob) -> Iterator[Choice]:
        """Yield places for the job in a group of its own, for each pair of pools with room."""
        for rollout, train in pairs(self.nodes.pools.values()):
            pin = Pin(new_node(n) for n in range(rollout.nodes_for(job.rollout_devices)))
            layout = Layout(
                rollout_pool=rollout,
                train_pool=train,
                num_train_nodes=train.nodes_for(job.train_devices),
                jobs=(job,),
                pins=(pin,),
                link_gb_s=self.link_gb_s,
            )
            if (
                len(pin) <= self.nodes.num_free(rollout.name)
                and layout.num_train_nodes <= self.nodes.num_free(train.name)
                and layout.memory_fits()
            ):
                yield Choice(group=None, layout=layout, pin=pin, order="round_robin")

    def in_group(self, number: int, job: ClusterJob) -> Iterator[Choice]:
        """Yield places for the job in this group (its number): on the least loaded of its rollout
        nodes, then with one, two and more free nodes in place of these, as far as memory allows."""
        standing = self.groups[number]
        layout = standing.layout
        if len(layout.jobs) >= self.max_group:
            return
        if any(map(self.nodes.is_drained, standing.train_nodes)):
            return
        train = layout.train_pool
        if job.train_devices > layout.num_train_nodes * train.devices_per_node:
            return
        wanted = layout.rollout_pool.nodes_for(job.rollout_devices)
        loads: dict[object, float] = {}
        for pin, own in zip(layout.pins, layout.holds(), strict=True):
            for node in pin:
                loads[node] = loads.get(node, 0.0) + own.rollout_s
        there = sorted(loads, key=lambda node: (loads[node], str(node)))
        room = [node for node in there if self._has_room(node, job)]
        free = self.nodes.num_free(layout.rollout_pool.name)
        for new in range(max(wanted - len(room), 0), min(wanted, free) + 1):
            pin = Pin((*room[: wanted - new], *map(new_node, range(new))))
            changed = layout.plus(job, pin)
            if changed.memory_fits():
                yield Choice(group=number, layout=changed, pin=pin, order=standing.order)

    def _has_room(self, node: object, job: ClusterJob) -> bool:
        assert isinstance(node, Node)
        free_gib = self.nodes.free_gib(node)
        return free_gib >= job.rollout_memory_gib and not self.nodes.is_drained(node)


class Policy(Protocol):
    """Chooses the nodes of jobs when they start, and whether they move later."""

    @property
    def tail_release(self) -> bool:
        """Whether a rollout, for its last part (tail), leaves most of its nodes to the next job."""

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        """Choose a place for a job. None: the job has to wait for nodes. `rest`: iterations that it
        has left and seconds that it may wait; None: it has not run or waited."""

    def obstacle(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> str:
        """Return in words why `place` finds no nodes for a job. Empty if no reason is known."""

    @property
    def makes_room(self) -> bool:
        """Whether running jobs are moved or stopped so that a waiting one can start (`room.py`)."""

    @property
    def learns(self) -> bool:
        """Whether the measured times of iterations replace those of a job's profile."""

    def is_endangered(self, standing: Standing) -> bool:
        """Whether a job of the group is likely to miss its SLO (slowdown promised) where it is."""

    def move(self, state: State, number: int, job: ClusterJob, *, rest: Rest) -> Choice | None:
        """Choose a new place for a running job of group `number` at its commit (end of an
        iteration). None: it stays. A place in its own group: only the order of turns changes."""


class Stays:
    """Base of policies that never move a job."""

    learns = False
    makes_room = False

    def obstacle(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> str:
        return ""

    def is_endangered(self, standing: Standing) -> bool:
        return False

    def move(self, state: State, number: int, job: ClusterJob, *, rest: Rest) -> Choice | None:
        return None
