"""Whose turn it is in each group of a cluster, and the tokens of what is granted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(slots=True)
class Running:
    """One job."""

    job: ClusterJob
    came_s: float
    """When it was submitted."""
    group: int = -1
    rollout_nodes: tuple[Node, ...] = ()
    has_waited: bool = False
    """For nodes."""
    joined: bool = False
    """It takes part in the turns, which it does from its first ask on."""
    token: int = 0
    """Of its last grant."""
    began_s: float = 0.0
    """Its first ask, or when that would have been if it had not waited for nodes."""
    steps: int = 0
    work_s: float = 0.0
    looked: int = 0
    """The change of the cluster up to which it was asked whether the job should move."""
    learned: LearnedTimes | None = None
    rest: Rest | None = None
    """Once it has committed an iteration, or waited for nodes."""
    lost_s: tuple[float, ...] = ()
    """When it was lost, since its last commit."""
    is_cancelled: bool = False

    def loses(self, at_s: float) -> bool:
        """It is lost. Returns whether that is once too often."""
        recent = (one for one in self.lost_s if at_s - one < LOSSES_S)
        self.lost_s = (*recent, at_s)
        return len(self.lost_s) > MAX_LOSSES

    def commits(self, event: Committed) -> int:
        """It has committed an iteration. Returns how many are left to do."""
        steps = event.step - self.job.steps_before
        if not event.step or event.numbers_otherwise:
            steps = self.steps + 1
        self.steps, self.work_s, self.lost_s = steps, self.work_s + event.work_s, ()
        if event.last is None:
            return self.job.steps - steps
        return 0 if event.last else max(self.job.steps - steps, 1)

    @property
    def patience_s(self) -> float:
        """So long others wait for it where it neither holds nodes nor wants any."""
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
        """Of a group that is there, or is new."""
        if group in self._groups:
            self._groups[group].order = order
        else:
            self._groups[group] = Turns(order)

    def end(self, group: int) -> None:
        """Nobody is in it any more."""
        del self._groups[group]

    def take_out(self, running: Running, at_s: float) -> list[Command]:
        """The job has no turn until it asks again."""
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
        """A token that is over changes nothing."""
        running = self._running.get(event.job)
        if running is None or running.token != event.token:
            return []
        running.token = 0
        return self._grants(self._groups[running.group].leave(event.job, event.phase, event.at_s))

    def withdrew(self, event: Withdrew) -> list[Command]:
        """Whether it was granted by then or not."""
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
        """Nothing where nobody waits for it any more."""
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
