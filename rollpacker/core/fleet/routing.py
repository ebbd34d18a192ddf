"""Which engine a sample is given: the places of a round's samples, and the work of each engine.

spread    to the engine with the least work
group     to the engine that has its prompt's last one, unless that has too much to do
turns     to the next engine, whatever it has to do; every command begins with the first
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import msgspec

from rollpacker.core.commands import NOWHERE
from rollpacker.core.ids import PromptId, SampleId

Routing = Literal["spread", "group", "turns"]

CARRIED_COST = 8
"""Number of carried-over tokens that are as much work as one new token, since they are computed
together in one pass."""

OVERLOAD = 1.5
"""An engine with more than this times the mean work gets no more of a group that it has begun."""


@dataclass(slots=True)
class Engine:
    """One engine of the fleet."""

    number: int
    incarnation: int = 0
    """How often the engine was replaced; from a loss on, the number of the replacement to come."""
    ready: bool = True
    """True if the engine has the weights of the round and generates."""
    released: bool = False
    """True if the engine's devices are the trainer's until the next round."""
    tokens: int = 0
    """Work of the engine: tokens that its samples are expected to take."""

    @property
    def takes(self) -> bool:
        """Whether the engine may be given samples."""
        return self.ready and not self.released


class Known(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Finished responses and their tokens, from which the fleet estimates the work of samples that
    have just begun."""

    num_finished: int = 0
    num_tokens: int = 0

    def mean_tokens(self) -> int:
        """Mean tokens of finished responses, at least 1; before any has finished, 1."""
        return max(self.num_tokens // self.num_finished, 1) if self.num_finished else 1


class Router:
    """Gives samples their engines, and each engine the work of its samples."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._homes: dict[PromptId, int] = {}
        """Number of the engine that took each prompt's last sample, if samples are grouped."""

    def begin_round(self) -> None:
        self._homes.clear()

    def route(
        self, samples: Sequence[SampleId], work: Sequence[int], engines: Sequence[Engine]
    ) -> tuple[int, ...]:
        """Number of the engine chosen for each sample. The samples' `work`, in tokens, is added to
        those engines. `engines` are those that may be given samples, at least one."""
        if self._routing == "turns":
            for turn, one in enumerate(engines):
                one.tokens += sum(work[turn :: len(engines)])
            return tuple(islice(cycle([engine.number for engine in engines]), len(samples)))
        least = _least_loaded(engines)
        together = self._routing == "group"
        most = 0.0
        takers: dict[int, Engine] = {}
        if together:
            most = OVERLOAD * (sum(engine.tokens for engine in engines) + sum(work)) / len(engines)
            takers = {engine.number: engine for engine in engines}
        routed: list[int] = []
        for sample, tokens in zip(samples, work, strict=True):
            engine = takers.get(self._homes.get(sample.prompt, NOWHERE)) if together else None
            if engine is None or engine.tokens + tokens > most:
                engine = next(least)
            engine.tokens += tokens
            routed.append(engine.number)
            if together:
                self._homes[sample.prompt] = engine.number
        return tuple(routed)


def _least_loaded(engines: Sequence[Engine]) -> Iterator[Engine]:
    """Yields, each time, the engine with the least work, the first of equals. Work may be added
    between two times, but not taken away."""
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
