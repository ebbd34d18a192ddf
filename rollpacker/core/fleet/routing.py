"""Routing: which engine each sample is given, by the work of the engines (expected tokens).

With "spread" a sample goes to the engine with the least work; with "group" to the engine that has
the prompt's last sample, unless that has too much to do; with "turns" to the next engine, whatever
it has to do, where every command begins with the first one.
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
"""Number of tokens kept from an earlier launch that cost as much as one new token, since they are
computed together in one pass."""

OVERLOAD = 1.5
"""With the routing "group", a sample goes to its prompt's last engine only if that engine then has
at most this many times the mean work of all engines."""


@dataclass(slots=True)
class Engine:
    """State of one engine, as far as the choice of engines needs it."""

    number: int
    incarnation: int = 0
    """How often the engine was replaced. A loss counts at once, before the new engine is there."""
    ready: bool = True
    """True if the engine has the weights of the round and generates."""
    released: bool = False
    """True if the engine's devices were given to the trainer, until the next round begins."""
    tokens: int = 0
    """Work of the engine: tokens that its unfinished samples are expected to cost."""

    @property
    def takes(self) -> bool:
        """Whether the engine may be given samples: it is ready, and not released."""
        return self.ready and not self.released


class Known(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Number and tokens of finished responses, which estimate the work of new samples."""

    num_finished: int = 0
    num_tokens: int = 0

    def mean_tokens(self) -> int:
        """Mean tokens of finished responses, at least 1; before any has finished, 1."""
        return max(self.num_tokens // self.num_finished, 1) if self.num_finished else 1


class Router:
    """Chooses the engine of each sample, and counts the work that each engine is given."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._homes: dict[PromptId, int] = {}
        """Number of the engine of each prompt's last sample. Empty unless routing is "group"."""

    def begin_round(self) -> None:
        self._homes.clear()

    def route(
        self, samples: Sequence[SampleId], work: Sequence[int], engines: Sequence[Engine]
    ) -> tuple[int, ...]:
        """Chooses one of `engines` (at least one) for each sample, and returns their numbers. Each
        sample's `work`, in tokens, is added to its engine."""
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
    """Yields the engine with the least work again and again, the lowest number among equals.
    Between two of them the caller may add work to engines, but not take any away."""
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
