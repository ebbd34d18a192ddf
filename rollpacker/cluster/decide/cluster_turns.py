"""The turns in each group (jobs that share nodes), with the number (*token*) of each grant of
nodes, and the record of each job that has nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from rollpacker.cluster.decide.events import (
    Asked,
    Command,
    Committed,
    Grant,
    Left,
    StayedAway,
    Withdrew,
)
from rollpacker.cluster.decide.forecast import Rest
from rollpacker.cluster.decide.job import ClusterJob, Phase
from rollpacker.cluster.decide.learned import LearnedTimes
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.decide.turns import Order, Turns

MAX_LOSSES = 3
"""Most times that a job may lose all processes without a commit (finished iteration) between, in
`LOSSES_S` seconds. At one more the job is given up."""
LOSSES_S = 3600.0
"""Seconds after which a loss of a job counts no more towards `MAX_LOSSES`."""
PATIENCE = 3.0
"""Factor: a job may stay away between two phases for this many times its longest planned pause."""
PATIENCE_S = 30.0
"""Least seconds between two phases after which a job's turn passes to others (`PATIENCE`)."""


class Running(msgspec.Struct):
    """The cluster's record of a job that has nodes, or has had some."""

    job: ClusterJob
    came_s: float
    """Time in seconds when the job was submitted."""
    group: int = -1
    rollout_nodes: tuple[Node, ...] = ()
    has_waited: bool = False
    """Whether the job has ever waited for nodes."""
    joined: bool = False
    """Whether the job takes part in the turns: from its first ask for nodes after a start."""
    token: int = 0
    """Token (number) of the job's present grant of nodes. 0 if the job holds no nodes."""
    began_s: float = 0.0
    """Time in seconds when the job first began to wait for nodes: its slowdown counts from it."""
    steps: int = 0
    work_s: float = 0.0
    looked: int = 0
    """Number of the cluster's changes (`Cluster`) at the last search for better nodes for it."""
    learned: LearnedTimes | None = None
    rest: Rest | None = None
    """Iterations that the job has left, and seconds that its SLO lets it wait. None until the job
    has finished an iteration or waited for nodes."""
    lost_s: tuple[float, ...] = ()
    """Times in seconds when all the job's processes were lost, since its last iteration."""
    is_cancelled: bool = False

    def loses(self, at_s: float) -> bool:
        """Record that all processes of the job were lost at this time. Returns whether that has
        happened more than `MAX_LOSSES` times of late."""
        recent = (one for one in self.lost_s if at_s - one < LOSSES_S)
        self.lost_s = (*recent, at_s)
        return len(self.lost_s) > MAX_LOSSES

    def commits(self, event: Committed) -> int:
        """Record a finished iteration. Returns the number of iterations that the job has left."""
        steps = event.step - self.job.steps_before
        if not event.step or event.numbers_otherwise:
            steps = self.steps + 1
        self.steps, self.work_s, self.lost_s = steps, self.work_s + event.work_s, ()
        if event.last is None:
            return self.job.steps - steps
        return 0 if event.last else max(self.job.steps - steps, 1)

    @property
    def patience_s(self) -> float:
        """Seconds for which others wait for the job between two phases, before its turn goes on."""
        worst = self.job.worst
        return max(PATIENCE_S, PATIENCE * max(worst.between_s, worst.after_s))


class ClusterTurns:
    """The turns of all groups of jobs that share nodes. Methods return the `Grant`s that follow."""

    def __init__(self, running: Mapping[str, Running]) -> None:
        """`running`: records of all jobs that have nodes, kept up to date by the cluster."""
        self._running = running
        self._groups: dict[int, Turns] = {}
        self._num_grants = 0

    def set_order(self, group: int, order: Order) -> None:
        """Set the order in which the jobs of a group take turns. The group is made if it is new."""
        if group in self._groups:
            self._groups[group].order = order
        else:
            self._groups[group] = Turns(order)

    def end(self, group: int) -> None:
        """Forget a group that has no jobs any more."""
        del self._groups[group]

    def take_out(self, running: Running, at_s: float) -> list[Command]:
        """Take a job out of the turns until it asks for nodes again. Returns grants to others."""
        if not running.joined:
            return []
        running.joined, running.token = False, 0
        return self._grants(self._groups[running.group].remove(running.job.name, at_s))

    def asked(self, event: Asked, came_s: float | None) -> list[Command]:
        """Record that a job asks for nodes, and return the grants. `came_s`: time when it began to
        wait for nodes to be started on; None if it has asked since, or did not wait."""
        running = self._running[event.job]
        turns = self._groups[running.group]
        if not running.joined:
            running.joined = True
            came_s = math.inf if came_s is None else came_s
            due_s = min(came_s + running.job.cold_start_s, event.at_s)
            running.began_s = running.began_s or due_s
            turns.join(event.job, running.rollout_nodes, running.job.slo)
        return self._grants(turns.ask(event.job, event.phase, event.at_s))

    def left(self, event: Left) -> list[Command]:
        """Record that a job has left nodes, and return the grants to others. An outdated token
        (number of the grant) changes nothing."""
        running = self._running.get(event.job)
        if running is None or running.token != event.token:
            return []
        running.token = 0
        return self._grants(self._groups[running.group].leave(event.job, event.phase, event.at_s))

    def withdrew(self, event: Withdrew) -> list[Command]:
        """Record that a job no longer wants the nodes that it asked for, whether it was granted
        them or not. Returns the grants to others."""
        running = self._running.get(event.job)
        if running is None or not running.joined:
            return []
        turns = self._groups[running.group]
        if running.token:
            running.token = 0
            return self._grants(turns.leave(event.job, event.phase, event.at_s))
        return self._grants(turns.withdraw(event.job, event.at_s))

    def overdue(self, at_s: float) -> list[str]:
        """Return the jobs that other jobs wait for and that have been away for too long."""
        return [
            job
            for turns in self._groups.values()
            for job, away_s in turns.awaited(at_s).items()
            if away_s > self._running[job].patience_s
        ]

    def kept_for(self, job: str) -> str | None:
        """Return another job whose turn it is on the free nodes that this job awaits, or None."""
        running = self._running.get(job)
        if running is None or not running.joined:
            return None
        return self._groups[running.group].kept_for(job)

    def stayed_away(self, event: StayedAway) -> list[Command]:
        """Take a job that stayed away out of the turns if others wait. Returns others' grants."""
        running = self._running.get(event.job)
        if running is None or event.job not in self._groups[running.group].awaited(event.at_s):
            return []
        return self.take_out(running, event.at_s)

    def _grants(self, granted: Sequence[tuple[str, Phase]]) -> list[Command]:
        found: list[Command] = []
        for job, phase in granted:
            self._num_grants += 1
            self._running[job].token = self._num_grants
            found.append(Grant(job, phase, self._num_grants))
        return found
