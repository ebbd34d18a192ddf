"""Where the samples of a round are, by sample.

Most begin in one engine and end there, so that each has two entries; what few of them go through is
kept for those alone.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from rollpacker.core.fleet.routing import CARRIED_COST
from rollpacker.core.ids import SampleId


class Seats:
    """Where the samples of one round are."""

    __slots__ = ("_by_turn", "carried", "engine", "source", "stopping", "work")

    def __init__(self, *, by_turn: bool) -> None:
        """`by_turn`: what a launch gives is that of a trajectory, of which only a turn is next."""
        self._by_turn = by_turn
        self.engine: dict[SampleId, int] = {}
        """The number of the engine that has it, or has been told to take it; also of those that
        have ended."""
        self.work: dict[SampleId, int] = {}
        """Tokens that are counted as the work of each sample that has not ended, in launch
        order."""
        self.source: dict[SampleId, int] = {}
        """Sample that moves -> the engine that it comes from, and that may still end it."""
        self.carried: dict[SampleId, int] = {}
        """Tokens that its launch gave it; none where that says nothing of it, or a later turn has
        begun."""
        self.stopping: set[SampleId] = set()
        """Samples that were told to stop. Those that have not ended are still to be answered
        for."""

    def clear(self) -> None:
        self.engine.clear()
        self.work.clear()
        self.source.clear()
        self.carried.clear()
        self.stopping.clear()

    def launch(
        self, samples: Sequence[SampleId], carried: Sequence[int], mean_tokens: int
    ) -> Sequence[int]:
        """The work of each of these, which are still to be given engines. `carried` is aligned with
        them, or empty; `mean_tokens` is expected of each."""
        work = [mean_tokens] * len(samples)
        if carried:
            self.carried.update(zip(samples, carried, strict=True))
            most = mean_tokens if self._by_turn else max(carried)
            work = [mean_tokens + min(tokens, most) // CARRIED_COST for tokens in carried]
        self.work.update(zip(samples, work, strict=True))
        return work

    def under_way(self, engines: Set[int]) -> list[SampleId]:
        """In one of these engines, not ended and not told to stop; in launch order."""
        engine, stopping = self.engine, self.stopping
        return [
            sample for sample in self.work if engine[sample] in engines and sample not in stopping
        ]
