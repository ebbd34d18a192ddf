"""The turns in each group of a cluster, with the number (*token*) of each grant of nodes, and the
record of each job that has nodes."""

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
"""A job is given up when it is lost more often than this without a commit, within `LOSSES_S`."""
LOSSES_S = 3600.0
"""Seconds after which a loss of a job counts no more towards `MAX_LOSSES`."""
PATIENCE = 3.0
"""Factor: a job may be away between phases for this many times its longest stated time."""
PATIENCE_S = 30.0
"""Seconds for which a job may be away in any case, before others go on without it."""


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
    """Whether the job takes part in the turns, which begins with its first ask for nodes."""
    token: int = 0
    """Token (number) of the job's present grant of nodes. 0 if the job holds no nodes."""
    began_s: float = 0.0
    """Time of the job's first ask, or when that would have been without a wait for nodes."""
    steps: int = 0
    work_s: float = 0.0
    looked: int = 0
    """Number of the cluster's last change for which it was examined whether the job should move."""
    learned: LearnedTimes | None = None
    rest: Rest | None = None
    """What is left of the job's life: iterations, and seconds that it may wait. None until it has
    committed an iteration or waited for nodes."""
    lost_s: tuple[float, ...] = ()
    """Times in seconds at which the job was lost since its last commit."""
    is_cancelled: bool = False

    def loses(self, at_s: float) -> bool:
        """Record a loss of the job. Returns whether it has more than `MAX_LOSSES` of late."""
        recent = (one for one in self.lost_s if at_s - one < LOSSES_S)
        self.lost_s = (*recent, at_s)
        return len(self.lost_s) > MAX_LOSSES

    def commits(self, event: Committed) -> int:
        """Record a committed iteration. Returns the number of iterations that are left to do."""
        steps = event.step - self.job.steps_before
        if not event.step or event.numbers_otherwise:
            steps = self.steps + 1
        self.steps, self.work_s, self.lost_s = steps, self.work_s + event.work_s, ()
        if event.last is None:
            return self.job.steps - steps
        return 0 if event.last else max(self.job.steps - steps, 1)

    @property
    def patience_s(self) -> float:
        """Seconds for which others wait for the job while it neither holds nor wants nodes."""
        worst = self.job.worst
        return max(PATIENCE_S, PATIENCE * max(worst.between_s, worst.after_s))


class ClusterTurns:
    """The turns of all groups (`turns.py`). Methods return the grants that follow."""

    def __init__(self, running: Mapping[str, Running]) -> None:
        """`running`: records of all jobs that have nodes, kept up to date by the cluster."""
        self._running = running
        self._groups: dict[int, Turns] = {}
        self._num_grants = 0

    def set_order(self, group: int, order: Order) -> None:
        """Set the order of turns of a group, which may be new."""
        if group in self._groups:
            self._groups[group].order = order
        else:
            self._groups[group] = Turns(order)

    def end(self, group: int) -> None:
        """Forget a group that has no jobs any more."""
        del self._groups[group]

    def take_out(self, running: Running, at_s: float) -> list[Command]:
        """Take a job out of the turns until it asks again. Returns what others are granted."""
        if not running.joined:
            return []
        running.joined, running.token = False, 0
        return self._grants(self._groups[running.group].remove(running.job.name, at_s))

    def asked(self, event: Asked, came_s: float | None) -> list[Command]:
        """Take in an ask. `came_s`: when the job came, if it was waiting for nodes until now."""
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
        """Take in that a job has left nodes. An outdated token changes nothing."""
        running = self._running.get(event.job)
        if running is None or running.token != event.token:
            return []
        running.token = 0
        return self._grants(self._groups[running.group].leave(event.job, event.phase, event.at_s))

    def withdrew(self, event: Withdrew) -> list[Command]:
        """Take in that a job has withdrawn an ask for nodes, whether granted by then or not."""
        running = self._running.get(event.job)
        if running is None or not running.joined:
            return []
        turns = self._groups[running.group]
        if running.token:
            running.token = 0
            return self._grants(turns.leave(event.job, event.phase, event.at_s))
        return self._grants(turns.withdraw(event.job, event.at_s))

    def overdue(self, at_s: float) -> list[str]:
        """Jobs that others wait for and that have been away for too long; see `Cluster.overdue`."""
        return [
            job
            for turns in self._groups.values()
            for job, away_s in turns.awaited(at_s).items()
            if away_s > self._running[job].patience_s
        ]

    def kept_for(self, job: str) -> str | None:
        """The other job whose turn it is on free nodes that this job awaits, or None."""
        running = self._running.get(job)
        if running is None or not running.joined:
            return None
        return self._groups[running.group].kept_for(job)

    def stayed_away(self, event: StayedAway) -> list[Command]:
        """Remove a job that stayed away from the turns, if others still wait for it."""
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
