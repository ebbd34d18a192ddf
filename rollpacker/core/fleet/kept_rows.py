"""Which trajectories stay in their engines' memory while their environments have the turn.

A row that is kept saves the time to compute it again, which grows with its tokens, and takes room
until its environment has answered, which grows with its tokens too: what a token of room is worth
hangs on the time that is left alone. So who will be away the longest goes first:

    away for less than answers take in the mean      the rest of that mean
    away for longer                                  as long again as it has been
"""

from __future__ import annotations

from typing import NamedTuple

from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId


class _Away(NamedTuple):
    engine: tuple[int, int]
    """Number and incarnation of the engine that holds the row. An engine that was replaced has a
    new incarnation."""
    num_tokens: int
    since_s: float


class KeptRows:
    """The samples whose rows (keys and values) engines keep while their environments have the turn.
    Call `leave` and `back`; free memory is as engines report it."""

    def __init__(self) -> None:
        self._away: dict[SampleId, _Away] = {}
        self._answers: dict[str, tuple[int, float]] = {}
        """Number of answers so far, and the seconds they took together, by source of prompts."""

    def begin_round(self) -> None:
        """Forget all kept rows."""
        self._away.clear()

    def leave(self, event: SampleGenerated) -> list[SampleId]:
        """Records that a sample's environment has the turn. Returns the samples whose rows this
        engine should drop, for which it has no room; this sample may be among them."""
        engine = event.engine, event.incarnation
        if event.num_held:
            self._away[event.sample] = _Away(engine, event.num_held, event.time_s)
        missing = -(event.room or 0)
        if missing <= 0:
            return []
        found = []
        for sample in self._by_absence(engine, event.time_s):
            if missing <= 0:
                break
            missing -= self._away.pop(sample).num_tokens
            found.append(sample)
        return found

    def back(self, sample: SampleId, time_s: float | None = None) -> None:
        """The row of the sample is not held any more: the sample goes on, or is over. `time_s` is
        when its environment answered; None: it did not."""
        away = self._away.pop(sample, None)
        if away is not None and time_s is not None:
            count, seconds = self._answers.get(sample.prompt.source, (0, 0.0))
            seconds += time_s - away.since_s
            self._answers[sample.prompt.source] = count + 1, seconds

    def _by_absence(self, engine: tuple[int, int], now_s: float) -> list[SampleId]:
        """Samples whose rows this engine holds. The one whose answer is expected last comes first;
        of equals the shortest, which is the cheapest to compute again."""

        def expected_s(sample: SampleId) -> float:
            count, seconds = self._answers.get(sample.prompt.source, (0, 0.0))
            left_s = (seconds / count if count else 0.0) - (now_s - self._away[sample].since_s)
            return left_s if left_s > 0 else now_s - self._away[sample].since_s

        here = [sample for sample, away in self._away.items() if away.engine == engine]
        return sorted(here, key=lambda one: (-expected_s(one), self._away[one].num_tokens))
