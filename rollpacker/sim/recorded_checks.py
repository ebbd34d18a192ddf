"""Draws a run's recorded checks and calls of a reward again, for simulated ones. Both classes are
picklable and hold no state: `luck`, a random number in [0, 1), chooses among what was recorded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property

from rollpacker.report.reward_fit import Call, Calls, Check

NEIGHBOURS = 0.1
"""Share of recorded calls, the nearest in number of samples, that a simulated one is drawn from."""
MIN_NEIGHBOURS = 8
"""Fewest recorded calls that a simulated call is drawn from, unless fewer were recorded."""


class RecordedChecks:
    """A run's recorded verdicts and calls of rewards, to be drawn again in a simulation."""

    def __init__(
        self, by_row: Mapping[int, Sequence[Check]], calls: Calls | None, *, warm: bool = False
    ) -> None:
        """`by_row` maps a row of the data to the recorded checks of responses to it. `calls` None:
        rewards check one sample a call, and no calls are drawn. `warm`: rewards run already, so
        that the slower first calls are left out."""
        self.calls = None if calls is None else RecordedCalls(calls, warm=warm)
        self._by_row = {row: sorted(checks, key=_length) for row, checks in by_row.items()}

    @cached_property
    def _all(self) -> list[Check]:
        return sorted((c for checks in self._by_row.values() for c in checks), key=_length)

    def check(self, row: int, num_tokens: int, luck: float) -> Check | None:
        """A recorded check of a response to this row of the data, or to any row if this one has
        none: one whose number of tokens is nearest to `num_tokens`. `luck`, in [0, 1), chooses
        among several. None: no check was recorded."""
        checks = self._by_row.get(row) or self._all
        if not checks:
            return None
        at = bisect_left(checks, num_tokens, key=_length)
        near = checks[max(0, at - 1) : at + 1]
        length = min((check.num_tokens for check in near), key=lambda n: abs(n - num_tokens))
        first = bisect_left(checks, length, key=_length)
        last = bisect_left(checks, length + 1, key=_length)
        return checks[first + int(luck * (last - first))]


class RecordedCalls:
    """Recorded seconds of a run's calls of a reward, with one or more samples, to draw from."""

    def __init__(self, calls: Calls, *, warm: bool = False) -> None:
        self.num_workers = calls.num_workers
        self.warm_ups = () if warm else calls.warm_ups
        """Seconds of each of the first calls, in which a reward starts. Empty: it runs already."""
        self._line_s = calls.line_s
        alone = [call for call in calls.recorded if call.alone]
        beside = [call for call in calls.recorded if not call.alone]
        self._recorded = {
            is_alone: some if len(some) >= MIN_NEIGHBOURS else calls.recorded
            for is_alone, some in ((True, alone), (False, beside))
        }
        """Recorded calls by whether no engine generated during the call. Where fewer than
        `MIN_NEIGHBOURS` are of a kind, all recorded calls stand in for them."""

    def call_s(self, num_samples: int, luck: float, *, alone: bool) -> float:
        """Seconds of a call that checks `num_samples` samples, scaled from a recorded call of about
        as many, which `luck` chooses. `alone`: whether nothing is generated during the call."""
        recorded = self._recorded[alone]
        num = min(len(recorded), max(MIN_NEIGHBOURS, int(NEIGHBOURS * len(recorded))))
        at = bisect_left(recorded, num_samples, key=_size)
        last = bisect_left(recorded, num_samples + 1, key=_size)
        if last - at < num:
            at = min(max(0, (at + last - num) // 2), len(recorded) - num)
            last = at + num
        drawn = recorded[at + int(luck * (last - at))]
        return drawn.seconds * self._line_s(num_samples) / self._line_s(drawn.num_samples)


def _length(check: Check) -> int:
    return check.num_tokens


def _size(call: Call) -> int:
    return call.num_samples
