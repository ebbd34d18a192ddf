"""A group's turns in virtual time: the same `Turns` as in a cluster, with holds that are given."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from rollpacker.core.coexecution.group import Holds
from rollpacker.core.coexecution.job import Phase
from rollpacker.core.coexecution.turns import Node, Order, Turns

HoldsOf = Callable[[int, int], Holds]
"""Of a job, by its number, in an iteration, from 0."""


class GroupTimeline:
    """Runs a group forward; `begins_s` has when each job's iterations began."""

    def __init__(
        self,
        pins: Sequence[Sequence[Node]],
        holds: HoldsOf,
        *,
        order: Order = "round_robin",
        slos: Sequence[float] = (),
    ) -> None:
        self.begins_s: list[list[float]] = [[] for _ in pins]
        """By job: when each rollout was granted."""
        self.ends_s: list[list[float]] = [[] for _ in pins]
        """By job: when each iteration was over, with what comes after its training."""
        self._holds = holds
        self._turns = Turns(order)
        self._heap: list[tuple[float, int, int, str]] = []
        self._num_pushed = 0
        for number, pinned in enumerate(pins):
            self._turns.join(str(number), pinned, slos[number] if slos else 1.0)
        for number in range(len(pins)):
            self._push(0.0, number, "rollout")

    def run_until(self, iterations: int, *, of_all: bool = True) -> None:
        """Until every job, or any, has begun so many iterations."""
        assert self._heap
        enough = all if of_all else any
        while not enough([len(begun) >= iterations for begun in self.begins_s]):
            while not self._step():
                pass

    def _push(self, at_s: float, number: int, what: str) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_s, self._num_pushed, number, what))

    def _step(self) -> bool:
        """Whether anything was granted."""
        now_s, _, number, what = heapq.heappop(self._heap)
        if what in ("rollout", "train"):
            phase: Phase = "rollout" if what == "rollout" else "train"
            granted = self._turns.ask(str(number), phase, now_s)
        else:
            phase = "rollout" if what == "left rollout" else "train"
            own = self._holds(number, len(self.begins_s[number]) - 1)
            granted = self._turns.leave(str(number), phase, now_s)
            if phase == "rollout":
                self._push(now_s + own.between_s, number, "train")
            else:
                self.ends_s[number].append(now_s + own.after_s)
                self._push(now_s + own.after_s, number, "rollout")
        for name, given in granted:
            self._granted(int(name), given, now_s)
        return bool(granted)

    def _granted(self, number: int, phase: Phase, now_s: float) -> None:
        if phase == "rollout":
            self.begins_s[number].append(now_s)
        own = self._holds(number, len(self.begins_s[number]) - 1)
        held_s = own.rollout_s if phase == "rollout" else own.train_s
        self._push(now_s + held_s, number, f"left {phase}")
