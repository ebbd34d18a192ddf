"""Whose turn it is in each group of a cluster, and the tokens of what is granted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollpacker.cluster.decide.events import Asked, Command, Grant, Left, StayedAway, Withdrew
from rollpacker.cluster.decide.job import Phase
from rollpacker.cluster.decide.running import Running
from rollpacker.cluster.decide.turns import Order, Turns


class ClusterTurns:
    """The turns of all groups (`coexecution/turns.py`). What it returns is granted by the call."""

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
