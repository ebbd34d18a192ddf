"""Which engine a sample is given: the places of a round's samples, and the work of each engine.

spread    to the engine with the least work
group     to the engine that has its prompt's last one, unless that has too much to do
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollpacker.core.commands import NOWHERE
from rollpacker.core.ids import PromptId, SampleId

CARRIED_COST = 8
"""So many carried tokens are as much work as one that is drawn: they are looked at together."""

OVERLOAD = 1.5
"""An engine with more than this times the mean work gets no more of a group that it has begun."""


@dataclass(slots=True)
class Engine:
    """One slot of the fleet."""

    number: int
    incarnation: int = 0
    """How often it was replaced. That of the one to come, from the moment of a loss on."""
    ready: bool = True
    """It is there, with the weights of the round."""
    released: bool = False
    """Its devices are the trainer's until the next round."""
    tokens: int = 0
    """Work: what its samples are expected to take, in tokens."""

    @property
    def takes(self) -> bool:
        """It may be given samples."""
        return self.ready and not self.released


class Seat:
    """Where a sample of the round is."""

    __slots__ = ("aborted", "carried", "ended", "engine", "source", "tokens")

    def __init__(self, tokens: int, carried: int) -> None:
        self.engine = NOWHERE
        """The number of the engine that has it, or has been told to take it."""
        self.source: int | None = None
        """While it moves: the engine that it comes from, and that may still end it."""
        self.tokens = tokens
        """Work that is counted for it."""
        self.carried = carried
        """Tokens that its launch gave it."""
        self.aborted = False
        """It was told to stop, and the answer is awaited."""
        self.ended = False


@dataclass(slots=True)
class Known:
    """What the fleet knows of lengths, for the work of samples that have just begun."""

    num_finished: int = 0
    num_tokens: int = 0

    def mean_tokens(self) -> int:
        """At least 1: before anything has finished, all samples are alike."""
        return max(self.num_tokens // self.num_finished, 1) if self.num_finished else 1


class Router:
    """Gives samples their engines, and each engine the work of its samples."""

    def __init__(self, *, together: bool) -> None:
        """`together`: the samples of a prompt are kept together."""
        self.together = together
        self._homes: dict[PromptId, int] = {}
        """The engine that took a prompt's last sample."""

    def begin_round(self) -> None:
        self._homes.clear()

    def route(
        self, samples: Sequence[SampleId], seats: Sequence[Seat], engines: Sequence[Engine]
    ) -> tuple[int, ...]:
        """Seat these samples, whose work is nobody's yet, on engines that all take samples. With
        no engine nothing changes."""
        if not engines:
            return (NOWHERE,) * len(samples)
        least = _least_loaded(engines)
        together = self.together
        most = 0.0
        takers: dict[int, Engine] = {}
        if together:
            work = sum(engine.tokens for engine in engines) + sum(seat.tokens for seat in seats)
            most = OVERLOAD * work / len(engines)
            takers = {engine.number: engine for engine in engines}
        for sample, seat in zip(samples, seats, strict=True):
            engine = takers.get(self._homes.get(sample.prompt, NOWHERE)) if together else None
            if engine is None or engine.tokens + seat.tokens > most:
                engine = next(least)
            engine.tokens += seat.tokens
            seat.engine = engine.number
            if together:
                self._homes[sample.prompt] = engine.number
        return tuple([seat.engine for seat in seats])


def _least_loaded(engines: Sequence[Engine]) -> Iterator[Engine]:
    """At each turn the engine with the least work, the first of several. Work may be added between
    turns, not taken away."""
    by_number = {engine.number: engine for engine in engines}
    heap = [(engine.tokens, engine.number) for engine in engines]
    heapq.heapify(heap)
    while True:
        tokens, number = heap[0]
        engine = by_number[number]
        if engine.tokens != tokens:
            heapq.heapreplace(heap, (engine.tokens, number))
        else:
            yield engine
