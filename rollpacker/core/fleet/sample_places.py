"""The engine of each sample of a round, and the sample's work.

Most samples begin and end in one engine, so that each has two entries; further entries are kept
only for the few that move, carry tokens or are stopped.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from rollpacker.core.fleet.routing import CARRIED_COST
from rollpacker.core.ids import SampleId


class Seats:
    """The engine of each sample of one round, and the sample's expected work in tokens."""

    __slots__ = ("_by_turn", "carried", "engine", "source", "stopping", "work")

    def __init__(self, *, by_turn: bool) -> None:
        """`by_turn`: carried-over tokens are a trajectory's, of which only one turn comes next."""
        self._by_turn = by_turn
        self.engine: dict[SampleId, int] = {}
        """Number of the engine that has each sample, or is to take it; ended ones keep theirs."""
        self.work: dict[SampleId, int] = {}
        """Tokens that count as the work of each sample that has not ended, in launch order."""
        self.source: dict[SampleId, int] = {}
        """Number of the engine that each moving sample comes from, which may still end it."""
        self.carried: dict[SampleId, int] = {}
        """Tokens that its launch gave each sample, until a later turn begins; missing if none."""
        self.stopping: set[SampleId] = set()
        """Samples that were told to stop; engines still answer for those that have not ended."""

    def clear(self) -> None:
        self.engine.clear()
        self.work.clear()
        self.source.clear()
        self.carried.clear()
        self.stopping.clear()

    def launch(
        self, samples: Sequence[SampleId], carried: Sequence[int], mean_tokens: int
    ) -> Sequence[int]:
        """Notes the expected work of these samples, which have no engines yet, and returns it.
        `carried` has each sample's carried-over tokens, or is empty; `mean_tokens` is the expected
        length of a response."""
        work = [mean_tokens] * len(samples)
        if carried:
            self.carried.update(zip(samples, carried, strict=True))
            most = mean_tokens if self._by_turn else max(carried)
            work = [mean_tokens + min(tokens, most) // CARRIED_COST for tokens in carried]
        self.work.update(zip(samples, work, strict=True))
        return work

    def under_way(self, engines: Set[int]) -> list[SampleId]:
        """Samples in one of these engines, not ended and not told to stop, in launch order."""
        engine, stopping = self.engine, self.stopping
        return [
            sample for sample in self.work if engine[sample] in engines and sample not in stopping
        ]
