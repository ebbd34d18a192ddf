"""Where a job could go: candidates in every group, among which a policy chooses.

    candidates of a group   pack into rollout nodes that are there, or add nodes to it
    and besides             a group of its own, in each pair of pools

A policy is a function of what there is (`State`) and the job: the shipped one is in
`cheapest_work.py`, RollMux's in `published.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rollpacker.core.coexecution.forecast import Outlook, foresee
from rollpacker.core.coexecution.job import ClusterJob
from rollpacker.core.coexecution.layout import Layout, Pin
from rollpacker.core.coexecution.nodes import Node, Nodes, pairs
from rollpacker.core.coexecution.turns import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a job goes."""

    group: int | None
    """None: a new one."""
    layout: Layout
    """The group with the job in it; nodes that are not taken yet have negative numbers."""
    pin: Pin
    """The job's own rollout nodes."""
    order: Order

    @property
    def new_nodes(self) -> int:
        """Rollout nodes to take."""
        return sum(is_new(node) for node in self.pin)


def new_node(number: int) -> object:
    """Stands for a rollout node that is free now."""
    return Node("", -1 - number)


def is_new(node: object) -> bool:
    return isinstance(node, Node) and node.number < 0


class Rest(NamedTuple):
    """The rest of a job's life."""

    slowdown: float
    """That it may have, so that the whole keeps the SLO."""
    iterations: int


def rest_of(job: ClusterJob, rest: Mapping[str, Rest]) -> Rest:
    """All of it, if nothing is known."""
    return rest.get(job.name) or Rest(job.slo, job.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What can be said of a group in a microsecond: which groups are worth a closer look."""

    price_of_work: float
    price_per_h: float
    node_price_per_h: float
    train_share: float
    """Of the training pool's time, if no job were slowed down."""
    rollout_share: float
    """The same of the least loaded rollout node."""
    needed_share: float
    """Of the training pool's time, if every job were slowed down as far as its SLO lets it."""
    spare_devices: int

    def could_take(self, job: ClusterJob) -> bool:
        """False: no order of turns keeps all SLOs with this job."""
        mean = job.mean
        return (
            job.train_devices <= self.spare_devices
            and self.needed_share + mean.train_s / (job.slo * sum(mean)) * self._spread(job) <= 1.0
        )

    def rise(self, job: ClusterJob) -> float:
        """About how much the price of work rises, packed or with new nodes."""
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
    """For seconds of an iteration as they are, by job."""
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
            share / rest_of(job, rest).slowdown
            for job, share in zip(layout.jobs, shares, strict=True)
        ),
        spare_devices=layout.num_train_nodes * layout.train_pool.devices_per_node,
    )


@dataclass(slots=True)
class Standing:
    """A group as it stands."""

    layout: Layout
    order: Order
    train_nodes: tuple[Node, ...]
    rest: dict[str, Rest] = field(default_factory=dict)
    """Of jobs that have committed an iteration."""
    _summary: Summary | None = None
    _without: dict[str, float] = field(default_factory=dict)
    _outlooks: dict[tuple[str, Pin, Order], Outlook] = field(default_factory=dict)
    """Of the group with one job more, by that job, its nodes and the order of turns."""

    @property
    def summary(self) -> Summary:
        if self._summary is None:
            layout = self.layout
            forecasts = foresee(layout, self.order)
            seconds = [one.iteration_s for one in forecasts]
            self._summary = summary_of(layout, self.rest, seconds)
        return self._summary

    def changed(self) -> None:
        """What was found out about the group is made anew when it is next asked for."""
        self._summary = None
        self._without.clear()
        self._outlooks.clear()

    def saved_without(self, job: str) -> float:
        """How much the price of work falls if the job leaves."""
        if job not in self._without:
            others = self.layout.minus(job)
            price = 0.0
            if others.jobs:
                forecasts = foresee(others, self.order)
                price = others.price_of_work([one.iteration_s for one in forecasts])
            self._without[job] = self.summary.price_of_work - price
        return self._without[job]

    def outlook(self, choice: Choice, job: ClusterJob, order: Order) -> Outlook:
        """If the job came. A job looks around after each change of the cluster, and most changes
        are of other groups than those it looks at."""
        key = (job.name, choice.pin, order)
        found = self._outlooks.get(key)
        if found is None or found.layout != choice.layout:  # another job of that name
            found = self._outlooks[key] = Outlook(choice.layout, order)
        return found


@dataclass(slots=True, kw_only=True)
class State:
    """What there is when a job comes."""

    nodes: Nodes
    groups: dict[int, Standing] = field(default_factory=dict)
    link_gb_s: float = math.inf
    max_group: int = 5

    def alone(self, job: ClusterJob) -> Iterator[Choice]:
        """A group of its own, in each pair of pools that has room."""
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
        """Packed into the least loaded rollout nodes of the group, then with one, two, ... new ones
        instead, as far as memory and free nodes allow."""
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
    """Chooses where a job goes."""

    @property
    def tail_release(self) -> bool:
        """Whether a rollout's tail leaves the nodes to the next job."""

    def place(self, state: State, job: ClusterJob) -> Choice | None:
        """None: it has to wait for nodes."""

    def move(self, state: State, number: int, job: ClusterJob, *, rest: Rest) -> Choice | None:
        """Where a job of the group should go at a commit; None: it stays."""


class Stays:
    """Of policies that never move a job."""

    def move(self, state: State, number: int, job: ClusterJob, *, rest: Rest) -> Choice | None:
        return None
