"""The cluster: jobs come and go, are given nodes, and take turns on them. Events in, commands out.

    Submitted -> Start (on the nodes that the policy chose; Open: some were free), or it waits
    Asked     -> Grant, now or when its turn comes
    Left      -> Grant to whoever is next
    Committed    what the job has done so far is counted; it may be told to Start elsewhere
    Ended     -> Close of nodes that nobody needs, Start of jobs that waited for nodes
    Lost         its process is gone: it is out of its turn, and Start once more (or GiveUp)
    Drained      jobs leave the node at their next commit: Start elsewhere, or Stop and it waits
    Cancelled -> Stop; it is the job's own end that frees its nodes

Groups share no nodes. In a group `coexecution/turns.py` says who is next, and where a job goes is a
policy's choice (`coexecution/placement.py`). Whoever obeys the commands (a simulation, a service)
has the clock: events are stamped with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollpacker.core.cluster_events import (
    Asked,
    Cancelled,
    Close,
    Command,
    Committed,
    Drained,
    Ended,
    Event,
    GiveUp,
    Grant,
    Left,
    Lost,
    Open,
    Restored,
    Start,
    Stop,
    Submitted,
    Withdrew,
)
from rollpacker.core.coexecution.group import Sharing
from rollpacker.core.coexecution.job import ClusterJob, Phase
from rollpacker.core.coexecution.nodes import Node, Nodes, Pool, check_job, memory_gib
from rollpacker.core.coexecution.placement import Choice, Policy, Rest, Standing, State, is_new
from rollpacker.core.coexecution.turns import Turns

__all__ = [
    "LOSSES_S",
    "MAX_LOSSES",
    "Asked",
    "Cancelled",
    "Close",
    "Cluster",
    "Command",
    "Committed",
    "Drained",
    "Ended",
    "Event",
    "GiveUp",
    "Grant",
    "Left",
    "Lost",
    "Open",
    "Restored",
    "Start",
    "Stop",
    "Submitted",
    "Withdrew",
]

MAX_LOSSES = 3
"""A job that is lost more often than this without a commit is given up, unless ..."""
LOSSES_S = 3600.0
"""... its losses are further apart than this."""


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
    lost_s: tuple[float, ...] = ()
    """When it was lost, since its last commit."""
    is_cancelled: bool = False


class Cluster:
    """All jobs of a cluster. A job's name is its own: one name is submitted once."""

    def __init__(
        self,
        pools: Sequence[Pool],
        policy: Policy,
        *,
        link_gb_s: float = math.inf,
        max_group: int = 5,
    ) -> None:
        self.state = State(nodes=Nodes(pools), link_gb_s=link_gb_s, max_group=max_group)
        self._pools = tuple(pools)
        self._policy = policy
        self._turns: dict[int, Turns] = {}
        self._running: dict[str, _Running] = {}
        self._waiting: list[ClusterJob] = []
        self._paused: dict[str, _Running] = {}
        """Of jobs that wait and have run before: what they have done so far."""
        self._num_groups = 0
        self._num_grants = 0
        self._num_changes = 0
        """Of who is where."""

    @property
    def pools(self) -> Sequence[Pool]:
        return self._pools

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> Sequence[str]:
        """Jobs that wait for nodes."""
        return [job.name for job in self._waiting]

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
            case Withdrew():
                return self._withdrew(event)
            case Lost():
                return self._lost(event)
            case Cancelled():
                return self._cancelled(event)
            case Drained():
                return self._drained(event)
            case Restored():
                self.state.nodes.restore(event.node)
                return self._start_waiting()

    # -- coming and going --------------------------------------------------------------

    def _submitted(self, event: Submitted) -> list[Command]:
        job = event.job
        if job.name in self._running or any(one.name == job.name for one in self._waiting):
            raise ValueError(f"job {job.name} is here already: give each job a name of its own")
        check_job(job, self._pools)
        self._wait(job)
        return self._start_waiting()

    def _wait(self, job: ClusterJob) -> None:
        self._waiting.append(job)
        self._waiting.sort(key=lambda one: -one.priority)

    def _wait_no_more(self, name: str) -> bool:
        """Whether it waited."""
        found = [one for one in self._waiting if one.name == name]
        for one in found:
            self._waiting.remove(one)
        self._paused.pop(name, None)
        return bool(found)

    def _start_waiting(self) -> list[Command]:
        """Those that fit are started; who does not fit lets nobody of its priority overtake."""
        commands: list[Command] = []
        while self._waiting:
            choice = self._policy.place(self.state, self._waiting[0])
            if choice is None:
                break
            commands += self._start(self._waiting.pop(0), choice)
        return commands

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
        before = self._paused.pop(job.name, None) or _Running(job, number, rollout_nodes)
        running = self._running.setdefault(job.name, before)
        running.group, running.rollout_nodes, running.joined = number, rollout_nodes, False
        self._num_changes += 1
        start = Start(job.name, number, rollout_nodes, standing.train_nodes)
        return [Open(opened), start] if opened else [start]

    def _ended(self, event: Ended) -> list[Command]:
        commands = self._let_go(event.job, event.at_s)
        return commands + self._start_waiting()

    def _let_go(self, job: str, at_s: float) -> list[Command]:
        """The job is none of the cluster's any more."""
        running = self._running.get(job)
        if running is None:
            self._wait_no_more(job)
            return []
        commands = self._detach(running, at_s)
        del self._running[job]
        return commands

    def _detach(self, running: _Running, at_s: float) -> list[Command]:
        """The job leaves its group and its nodes."""
        job = running.job.name
        standing = self.state.groups[running.group]
        commands = self._out_of_turn(running, at_s)
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

    def _out_of_turn(self, running: _Running, at_s: float) -> list[Command]:
        """Until it asks again."""
        if not running.joined:
            return []
        running.joined, running.token = False, 0
        granted = self._turns[running.group].remove(running.job.name, at_s)
        return [self._grant(one, phase) for one, phase in granted]

    # -- losses, cancellations, nodes that go ------------------------------------------

    def _lost(self, event: Lost) -> list[Command]:
        running = self._running.get(event.job)
        if running is None:
            return []
        at_s = event.at_s
        recent = (one for one in running.lost_s if at_s - one < LOSSES_S)
        running.lost_s = (*recent, at_s)
        if running.is_cancelled or len(running.lost_s) > MAX_LOSSES:
            told: list[Command] = [] if running.is_cancelled else [GiveUp(event.job)]
            return told + self._let_go(event.job, at_s) + self._start_waiting()
        commands = self._out_of_turn(running, at_s)
        if self._is_drained(running):
            return commands + self._displace(running, at_s)
        standing = self.state.groups[running.group]
        return [
            *commands,
            Start(event.job, running.group, running.rollout_nodes, standing.train_nodes),
        ]

    def _cancelled(self, event: Cancelled) -> list[Command]:
        if self._wait_no_more(event.job):
            return self._start_waiting()
        running = self._running.get(event.job)
        if running is None or running.is_cancelled:
            return []
        running.is_cancelled = True
        return [Stop(event.job, "it was cancelled", of_cancelled=True)]

    def _drained(self, event: Drained) -> list[Command]:
        self.state.nodes.drain(event.node)
        for standing in self.state.groups.values():
            standing.changed()
        self._num_changes += 1
        return []

    def _is_drained(self, running: _Running) -> bool:
        nodes = self.state.nodes
        train_nodes = self.state.groups[running.group].train_nodes
        return any(map(nodes.is_drained, (*running.rollout_nodes, *train_nodes)))

    def _displace(self, running: _Running, at_s: float) -> list[Command]:
        """The job leaves nodes that are drained, for others or to wait for some."""
        job = running.job
        commands = self._detach(running, at_s)
        choice = self._policy.place(self.state, job)
        if choice is not None:
            return commands + self._start(job, choice) + self._start_waiting()
        self._paused[job.name] = self._running.pop(job.name)
        self._wait(job)
        return [*commands, Stop(job.name, "its nodes are drained"), *self._start_waiting()]

    # -- turns -------------------------------------------------------------------------

    def _asked(self, event: Asked) -> list[Command]:
        running = self._running[event.job]
        turns = self._turns[running.group]
        if not running.joined:
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

    def _withdrew(self, event: Withdrew) -> list[Command]:
        running = self._running.get(event.job)
        if running is None or not running.joined:
            return []
        turns = self._turns[running.group]
        if running.token:
            running.token = 0
            granted = turns.leave(event.job, event.phase, event.at_s)
        else:
            granted = turns.withdraw(event.job, event.at_s)
        return [self._grant(job, phase) for job, phase in granted]

    def _grant(self, job: str, phase: Phase) -> Grant:
        self._num_grants += 1
        self._running[job].token = self._num_grants
        return Grant(job, phase, self._num_grants)

    def _committed(self, event: Committed) -> list[Command]:
        running = self._running[event.job]
        running.steps += 1
        running.work_s += event.work_s
        running.lost_s = ()
        iterations = running.job.steps - running.steps
        if iterations <= 0:
            return []
        mean_s = running.work_s / running.steps
        allowed_s = running.job.slo * mean_s * running.job.steps - (event.at_s - running.began_s)
        rest = Rest(allowed_s / (iterations * mean_s), iterations)
        self.state.groups[running.group].rest[event.job] = rest
        if running.is_cancelled or running.token:  # who holds nodes stays on them
            return []
        if self._is_drained(running):
            return self._displace(running, event.at_s)
        if running.looked == self._num_changes:
            return []
        running.looked = self._num_changes
        choice = self._policy.move(self.state, running.group, running.job, rest=rest)
        if choice is None:
            return []
        commands = self._detach(running, event.at_s)
        return commands + self._start(running.job, choice) + self._start_waiting()
