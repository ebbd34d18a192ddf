"""Which samples keep their rows (keys and values) in an engine while their environments answer.

A row that is kept saves the time to compute it again, and takes room until its environment has
answered. Both grow with its tokens, so only the wait that is still to come counts: the row with the
longest one is dropped first. A sample that has waited for less than answers take on average is
expected to wait for the rest of that average, and any other for as long again as it has waited.
"""

from __future__ import annotations

from typing import NamedTuple

from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId


class _Away(NamedTuple):
    engine: tuple[int, int]
    """Number of the engine that holds the row, and its incarnation: how often it was replaced."""
    num_tokens: int
    since_s: float


class KeptRows:
    """The samples whose rows (keys and values) engines keep while environments answer. Report each
    sample to `leave` and `back`; engines report their free memory themselves."""

    def __init__(self) -> None:
        self._away: dict[SampleId, _Away] = {}
        self._answers: dict[str, tuple[int, float]] = {}
        """Number of answers so far, and the seconds they took together, by source of prompts."""

    def begin_round(self) -> None:
        """Forgets all samples and their rows, since a round begins."""
        self._away.clear()

    def leave(self, event: SampleGenerated) -> list[SampleId]:
        """Records that this sample now waits for its environment. Returns the samples whose rows
        (keys and values) the engine should drop for lack of memory; this sample may be among
        them."""
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
        """Records that the sample does not wait any more: its row is in use again, or dropped.
        `time_s`: when its environment answered. None: it did not."""
        away = self._away.pop(sample, None)
        if away is not None and time_s is not None:
            count, seconds = self._answers.get(sample.prompt.source, (0, 0.0))
            seconds += time_s - away.since_s
            self._answers[sample.prompt.source] = count + 1, seconds

    def _by_absence(self, engine: tuple[int, int], now_s: float) -> list[SampleId]:
        """Samples whose rows this engine keeps, the one with the longest expected wait first; of
        equals the shortest first, which is the cheapest to compute again."""

        def expected_s(sample: SampleId) -> float:
            count, seconds = self._answers.get(sample.prompt.source, (0, 0.0))
            left_s = (seconds / count if count else 0.0) - (now_s - self._away[sample].since_s)
            return left_s if left_s > 0 else now_s - self._away[sample].since_s

        here = [sample for sample, away in self._away.items() if away.engine == engine]
        return sorted(here, key=lambda one: (-expected_s(one), self._away[one].num_tokens))
