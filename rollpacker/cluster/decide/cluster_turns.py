"""The turns in each group of a cluster, with the tokens of grants, and what is known of each job
that takes part."""

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
"""A job that is lost more often than this without a commit is given up, unless ..."""
LOSSES_S = 3600.0
"""... its losses are further apart than this."""
PATIENCE = 3.0
"""A job may be away for this many times what it said at most, ..."""
PATIENCE_S = 30.0
"""... and for so long in any case, before others go on without it."""


class Running(msgspec.Struct):
    """All that the cluster knows of a job that has nodes, or has had some."""

    job: ClusterJob
    came_s: float
    """Time when it was submitted."""
    group: int = -1
    rollout_nodes: tuple[Node, ...] = ()
    has_waited: bool = False
    """Whether it has ever waited for nodes."""
    joined: bool = False
    """Whether it takes part in the turns, which it does from its first ask on."""
    token: int = 0
    """Token of the grant that stands. 0 if it holds no nodes."""
    began_s: float = 0.0
    """The time of its first ask, or when that would have been if it had not waited for nodes."""
    steps: int = 0
    work_s: float = 0.0
    looked: int = 0
    """The change of the cluster up to which it was asked whether the job should move."""
    learned: LearnedTimes | None = None
    rest: Rest | None = None
    """The rest of its life, once it has committed an iteration or waited for nodes. None before
    that."""
    lost_s: tuple[float, ...] = ()
    """Times at which it was lost since its last commit."""
    is_cancelled: bool = False

    def loses(self, at_s: float) -> bool:
        """Enter that the job is lost. Returns whether that is once too often."""
        recent = (one for one in self.lost_s if at_s - one < LOSSES_S)
        self.lost_s = (*recent, at_s)
        return len(self.lost_s) > MAX_LOSSES

    def commits(self, event: Committed) -> int:
        """Enter that the job has committed an iteration. Returns how many are left to do."""
        steps = event.step - self.job.steps_before
        if not event.step or event.numbers_otherwise:
            steps = self.steps + 1
        self.steps, self.work_s, self.lost_s = steps, self.work_s + event.work_s, ()
        if event.last is None:
            return self.job.steps - steps
        return 0 if event.last else max(self.job.steps - steps, 1)

    @property
    def patience_s(self) -> float:
        """Seconds for which others wait for it while it neither holds nodes nor wants any."""
        worst = self.job.worst
        return max(PATIENCE_S, PATIENCE * max(worst.between_s, worst.after_s))


class ClusterTurns:
    """The turns of all groups (`turns.py`). What it returns is granted by the call."""

    def __init__(self, running: Mapping[str, Running]) -> None:
        """`running`: all jobs that have nodes, kept by the cluster."""
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
        """Take a job out of the turns until it asks again."""
        if not running.joined:
            return []
        running.joined, running.token = False, 0
        return self._grants(self._groups[running.group].remove(running.job.name, at_s))

    def asked(self, event: Asked, came_s: float | None) -> list[Command]:
        """`came_s`: when a job came that had to wait for nodes and now asks for the first time."""
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
        """Take in that a job has left nodes. A token that is over changes nothing."""
        running = self._running.get(event.job)
        if running is None or running.token != event.token:
            return []
        running.token = 0
        return self._grants(self._groups[running.group].leave(event.job, event.phase, event.at_s))

    def withdrew(self, event: Withdrew) -> list[Command]:
        """Take in that a job has withdrawn an ask, whether it was granted by then or not."""
        running = self._running.get(event.job)
        if running is None or not running.joined:
            return []
        turns = self._groups[running.group]
        if running.token:
            running.token = 0
            return self._grants(turns.leave(event.job, event.phase, event.at_s))
        return self._grants(turns.withdraw(event.job, event.at_s))

    def overdue(self, at_s: float) -> list[str]:
        """See `Cluster.overdue`."""
        return [
            job
            for turns in self._groups.values()
            for job, away_s in turns.awaited(at_s).items()
            if away_s > self._running[job].patience_s
        ]

    def kept_for(self, job: str) -> str | None:
        """See `Cluster.kept_for`."""
        running = self._running.get(job)
        if running is None or not running.joined:
            return None
        return self._groups[running.group].kept_for(job)

    def stayed_away(self, event: StayedAway) -> list[Command]:
        """Take a job that stayed away out of the turns, if others still wait for it."""
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
