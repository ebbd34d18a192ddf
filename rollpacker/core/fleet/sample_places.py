"""The engine of each sample of a round, and the sample's expected work.

A sample that begins and ends in one engine has only its entries in `engine` and `work`; the few
that move, carry tokens or are stopped have further ones.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from rollpacker.core.fleet.routing import CARRIED_COST
from rollpacker.core.ids import SampleId


class Seats:
    """The engine of each sample of one round, and the sample's expected work in tokens."""

    __slots__ = ("_by_turn", "carried", "engine", "source", "stopping", "work")

    def __init__(self, *, by_turn: bool) -> None:
        """`by_turn`: as the work of a sample, at most as many of its tokens from an earlier launch
        count as a mean response has. False: all of them count."""
        self._by_turn = by_turn
        self.engine: dict[SampleId, int] = {}
        """Number of the engine that has, or had, each sample; `NOWHERE`: none has it yet."""
        self.work: dict[SampleId, int] = {}
        """Expected cost, in tokens, of each sample that has not ended, in launch order."""
        self.source: dict[SampleId, int] = {}
        """Number of the engine that each moving sample leaves. The sample may still end there."""
        self.carried: dict[SampleId, int] = {}
        """Number of tokens of an earlier launch that each sample began with. Samples that began
        with none, or whose environment has answered since, are missing."""
        self.stopping: set[SampleId] = set()
        """Samples that were told to stop; the engine of each still reports its end."""

    def clear(self) -> None:
        self.engine.clear()
        self.work.clear()
        self.source.clear()
        self.carried.clear()
        self.stopping.clear()

    def launch(
        self, samples: Sequence[SampleId], carried: Sequence[int], mean_tokens: int
    ) -> Sequence[int]:
        """Records and returns the expected work of these samples, which have no engine yet.
        `carried`: tokens that each begins with; empty: none. `mean_tokens`: expected length of a
        response."""
        work = [mean_tokens] * len(samples)
        if carried:
            self.carried.update(zip(samples, carried, strict=True))
            most = mean_tokens if self._by_turn else max(carried)
            work = [mean_tokens + min(tokens, most) // CARRIED_COST for tokens in carried]
        self.work.update(zip(samples, work, strict=True))
        return work

    def under_way(self, engines: Set[int]) -> list[SampleId]:
        """Samples in one of these engines, neither ended nor told to stop, in launch order."""
        engine, stopping = self.engine, self.stopping
        return [
            sample for sample in self.work if engine[sample] in engines and sample not in stopping
        ]
