"""A group's turns in virtual time: the same `Turns` as in a cluster, with holds that are given."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from rollpacker.cluster.decide.group import Holds
from rollpacker.cluster.decide.job import Phase
from rollpacker.cluster.decide.turns import Node, Order, Turns

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
        self._names = [str(number) for number in range(len(pins))]
        self._now: list[Holds] = [Holds(0.0, 0.0, 0.0, 0.0)] * len(pins)
        """By job: what it holds in the iteration that is under way."""
        self._heap: list[tuple[float, int, int, str]] = []
        self._num_pushed = 0
        for number, pinned in enumerate(pins):
            self._turns.join(self._names[number], pinned, slos[number] if slos else 1.0)
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
        """Whether anybody has begun an iteration by this."""
        now_s, _, number, what = heapq.heappop(self._heap)
        name = self._names[number]
        if what == "rollout" or what == "train":
            phase: Phase = "rollout" if what == "rollout" else "train"
            granted = self._turns.ask(name, phase, now_s)
        elif what == "left rollout":
            granted = self._turns.leave(name, "rollout", now_s)
            self._push(now_s + self._now[number].between_s, number, "train")
        else:
            granted = self._turns.leave(name, "train", now_s)
            over_s = now_s + self._now[number].after_s
            self.ends_s[number].append(over_s)
            self._push(over_s, number, "rollout")
        return self._granted(granted, now_s)

    def _granted(self, granted: Sequence[tuple[str, Phase]], now_s: float) -> bool:
        has_begun = False
        for name, phase in granted:
            number = int(name)
            if phase == "rollout":
                self._now[number] = self._holds(number, len(self.begins_s[number]))
                self.begins_s[number].append(now_s)
                self._push(now_s + self._now[number].rollout_s, number, "left rollout")
                has_begun = True
            else:
                self._push(now_s + self._now[number].train_s, number, "left train")
        return has_begun
