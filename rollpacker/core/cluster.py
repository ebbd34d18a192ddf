"""The cluster: jobs come and go, are given nodes, and take turns on them. Events in, commands out.

    Submitted -> Start (on the nodes that the policy chose; Open: some were free), or it waits
    Asked     -> Grant, now or when its turn comes
    Left      -> Grant to whoever is next
    Committed    what the job has done so far is counted; it may be told to Start elsewhere
    Ended     -> Close of nodes that nobody needs, Start of jobs that waited for nodes

Groups share no nodes. In a group `coexecution/turns.py` says who is next, and where a job goes is a
policy's choice (`coexecution/placement.py`). Whoever obeys the commands (a simulation, a service)
has the clock: events are stamped with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollpacker.core.coexecution.group import Sharing
from rollpacker.core.coexecution.job import ClusterJob, Phase
from rollpacker.core.coexecution.nodes import Node, Nodes, Pool, check_job, memory_gib
from rollpacker.core.coexecution.placement import Choice, Policy, Rest, Standing, State, is_new
from rollpacker.core.coexecution.turns import Turns
from rollpacker.core.coexecution.waiting import AGEING_H, Devices, Waiting

# -- events ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    at_s: float
    job: ClusterJob


@dataclass(frozen=True, slots=True)
class Asked:
    """The job wants the nodes of a phase."""

    at_s: float
    job: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Left:
    """The job has no use for the nodes any more. With another token than that of its grant it is
    about a grant that is over, and changes nothing."""

    at_s: float
    job: str
    phase: Phase
    token: int


@dataclass(frozen=True, slots=True)
class Committed:
    """An iteration is over."""

    at_s: float
    job: str
    work_s: float
    """What the iteration took without waits for nodes and without switches."""


@dataclass(frozen=True, slots=True)
class Ended:
    at_s: float
    job: str


Event = Submitted | Asked | Left | Committed | Ended

# -- commands ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """These nodes are wanted, and paid for from now on."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Nobody needs these nodes."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Start the job, parked, on these nodes. A job that runs is stopped at the commit that it has
    just made, and goes on from there."""

    job: str
    group: int
    rollout_nodes: tuple[Node, ...]
    train_nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The nodes of the phase are the job's until it leaves. Tokens rise, so that a device can
    refuse whoever comes with an older one."""

    job: str
    phase: Phase
    token: int


Command = Open | Close | Start | Grant

# -- the machine -------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    job: ClusterJob
    group: int
    rollout_nodes: tuple[Node, ...]
    joined: bool = False
    """It takes part in the turns, which it does from its first ask on."""
    token: int = 0
    """Of its last grant."""
    began_s: float = 0.0
    """Its first ask."""
    steps: int = 0
    work_s: float = 0.0
    looked: int = 0
    """The change of the cluster up to which it was asked whether the job should move."""


class Cluster:
    """All jobs of a cluster. A job's name is its own: one name is submitted once."""

    def __init__(
        self,
        pools: Sequence[Pool],
        policy: Policy,
        *,
        link_gb_s: float = math.inf,
        max_group: int = 5,
        quotas: Mapping[str, Devices] | None = None,
        ageing_s: float = AGEING_H * 3600,
    ) -> None:
        """`quotas`: by owner; `ageing_s`: what a priority more is worth (`waiting.py`)."""
        self.state = State(nodes=Nodes(pools), link_gb_s=link_gb_s, max_group=max_group)
        self._pools = tuple(pools)
        self._policy = policy
        self._turns: dict[int, Turns] = {}
        self._running: dict[str, _Running] = {}
        self._waiting = Waiting(pools, quotas, ageing_s)
        self._num_groups = 0
        self._num_grants = 0
        self._num_changes = 0
        """Of who is where."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> Sequence[str]:
        """Jobs that wait for nodes, the next one first."""
        return [job.name for job in self._waiting.in_order(self._running_jobs())]

    def sharing(self, job: str) -> Sharing:
        """How the job's iterations go in its group as it is now."""
        layout = self.state.groups[self._running[job].group].layout
        number = next(n for n, one in enumerate(layout.jobs) if one.name == job)
        return layout.sharings[number]

    def handle(self, event: Event) -> list[Command]:
        """What to do about it. Raises `ValueError` for a job that no nodes here can take."""
        match event:
            case Submitted():
                return self._submitted(event)
            case Asked():
                return self._asked(event)
            case Left():
                return self._left(event)
            case Committed():
                return self._committed(event)
            case Ended():
                return self._ended(event)

    # -- coming and going --------------------------------------------------------------

    def _submitted(self, event: Submitted) -> list[Command]:
        job = event.job
        if job.name in self._running or any(one.name == job.name for one in self._waiting):
            raise ValueError(f"job {job.name} is here already: give each job a name of its own")
        check_job(job, self._pools)
        self._waiting.add(job, event.at_s)
        return self._start_waiting()

    def _start_waiting(self) -> list[Command]:
        """Those that fit are started; who fits nowhere lets nobody overtake."""
        commands: list[Command] = []
        while self._waiting:
            job = self._waiting.next(self._running_jobs())
            choice = None if job is None else self._policy.place(self.state, job)
            if job is None or choice is None:
                break
            self._waiting.remove(job.name)
            commands += self._start(job, choice)
        return commands

    def _running_jobs(self) -> list[ClusterJob]:
        return [one.job for one in self._running.values()]

    def _start(self, job: ClusterJob, choice: Choice) -> list[Command]:
        nodes = self.state.nodes
        layout = choice.layout
        taken = nodes.take(layout.rollout_pool.name, choice.new_nodes)
        opened = taken
        named = dict(zip(sorted((n for n in choice.pin if is_new(n)), key=str), taken, strict=True))
        pin = frozenset(named.get(node, node) for node in choice.pin)
        if choice.group is None:
            number = self._num_groups
            self._num_groups += 1
            train_nodes = nodes.take(layout.train_pool.name, layout.num_train_nodes)
            opened += train_nodes
            self._turns[number] = Turns(choice.order)
            standing = Standing(layout, choice.order, train_nodes)
            self.state.groups[number] = standing
        else:
            number = choice.group
            standing = self.state.groups[number]
            self._turns[number].order = standing.order = choice.order
        pins = tuple(
            pin if one.name == job.name else old
            for one, old in zip(layout.jobs, layout.pins, strict=True)
        )
        standing.layout = replace(layout, pins=pins, tail_release=self._policy.tail_release)
        standing.changed()
        rollout_nodes = tuple(sorted(node for node in pin if isinstance(node, Node)))
        nodes.settle(job.name, rollout_nodes, memory_gib(job, "rollout"))
        nodes.settle(job.name, standing.train_nodes, memory_gib(job, "train"))
        running = self._running.setdefault(job.name, _Running(job, number, rollout_nodes))
        running.group, running.rollout_nodes, running.joined = number, rollout_nodes, False
        self._num_changes += 1
        start = Start(job.name, number, rollout_nodes, standing.train_nodes)
        return [Open(opened), start] if opened else [start]

    def _ended(self, event: Ended) -> list[Command]:
        commands = self._detach(self._running[event.job], event.at_s)
        del self._running[event.job]
        return commands + self._start_waiting()

    def _detach(self, running: _Running, at_s: float) -> list[Command]:
        """The job leaves its group and its nodes."""
        job = running.job.name
        standing = self.state.groups[running.group]
        commands: list[Command] = []
        if running.joined:
            granted = self._turns[running.group].remove(job, at_s)
            commands += [self._grant(one, phase) for one, phase in granted]
        nodes = self.state.nodes
        nodes.unsettle(job, (*running.rollout_nodes, *standing.train_nodes))
        closed = [node for node in running.rollout_nodes if not nodes.jobs_on(node)]
        standing.rest.pop(job, None)
        standing.layout = standing.layout.minus(job)
        standing.changed()
        self._num_changes += 1
        if not standing.layout.jobs:
            closed += standing.train_nodes
            del self.state.groups[running.group], self._turns[running.group]
        if closed:
            nodes.give_back(closed)
            commands.append(Close(tuple(closed)))
        return commands

    # -- turns -------------------------------------------------------------------------

    def _asked(self, event: Asked) -> list[Command]:
        running = self._running[event.job]
        turns = self._turns[running.group]
        if not running.joined:
            assert event.phase == "rollout", event
            running.joined = True
            running.began_s = running.began_s or event.at_s
            turns.join(event.job, running.rollout_nodes, running.job.slo)
        granted = turns.ask(event.job, event.phase, event.at_s)
        return [self._grant(job, phase) for job, phase in granted]

    def _left(self, event: Left) -> list[Command]:
        running = self._running.get(event.job)
        if running is None or running.token != event.token:
            return []
        running.token = 0
        granted = self._turns[running.group].leave(event.job, event.phase, event.at_s)
        return [self._grant(job, phase) for job, phase in granted]

    def _grant(self, job: str, phase: Phase) -> Grant:
        self._num_grants += 1
        self._running[job].token = self._num_grants
        return Grant(job, phase, self._num_grants)

    def _committed(self, event: Committed) -> list[Command]:
        running = self._running[event.job]
        running.steps += 1
        running.work_s += event.work_s
        iterations = running.job.steps - running.steps
        if iterations <= 0:
            return []
        mean_s = running.work_s / running.steps
        allowed_s = running.job.slo * mean_s * running.job.steps - (event.at_s - running.began_s)
        rest = Rest(allowed_s / (iterations * mean_s), iterations)
        self.state.groups[running.group].rest[event.job] = rest
        if running.looked == self._num_changes:
            return []
        running.looked = self._num_changes
        choice = self._policy.move(self.state, running.group, running.job, rest=rest)
        if choice is None:
            return []
        commands = self._detach(running, event.at_s)
        return commands + self._start(running.job, choice) + self._start_waiting()
