"""Checks as a run recorded them, drawn again for another simulated response or call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property

from rollpacker.report.reward_fit import Call, Calls, Check

NEIGHBOURS = 0.1
"""Share of the recorded calls, those nearest in size, that a call is drawn from."""
MIN_NEIGHBOURS = 8


class RecordedChecks:
    """What rewards said and took. Picklable, and without any state: `luck` lies in [0, 1)."""

    def __init__(
        self, by_row: Mapping[int, Sequence[Check]], calls: Calls | None, *, warm: bool = False
    ) -> None:
        """`calls` None: a check is a call of its own, since its kind has workers or a deadline.
        `warm`: the rewards' workers have had their first calls already."""
        self.calls = calls
        self.warm_ups = () if warm or calls is None else calls.warm_ups
        """Seconds of the first calls."""
        self._by_row = {row: sorted(checks, key=_length) for row, checks in by_row.items()}

    @cached_property
    def _all(self) -> list[Check]:
        return sorted((c for checks in self._by_row.values() for c in checks), key=_length)

    def check(self, row: int, num_tokens: int, luck: float) -> Check | None:
        """Of the recorded responses to this row, or else of all, one of the nearest length; None:
        nothing was recorded."""
        checks = self._by_row.get(row) or self._all
        if not checks:
            return None
        at = bisect_left(checks, num_tokens, key=_length)
        near = checks[max(0, at - 1) : at + 1]
        length = min((check.num_tokens for check in near), key=lambda n: abs(n - num_tokens))
        first = bisect_left(checks, length, key=_length)
        last = bisect_left(checks, length + 1, key=_length)
        return checks[first + int(luck * (last - first))]

    @cached_property
    def _recorded(self) -> dict[bool, Sequence[Call]]:
        """By whether something was generated beside them, or all where those are few."""
        assert self.calls is not None
        every = self.calls.recorded
        found: dict[bool, Sequence[Call]] = {}
        for alone in (False, True):
            some = [call for call in every if call.alone is alone]
            found[alone] = some if len(some) >= MIN_NEIGHBOURS else every
        return found

    def call_s(self, num_samples: int, luck: float, *, alone: bool) -> float:
        """Seconds of a call: those of a recorded one of about as many samples, in proportion.
        `alone`: nothing is generated any more."""
        recorded = self._recorded[alone]
        num = min(len(recorded), max(MIN_NEIGHBOURS, int(NEIGHBOURS * len(recorded))))
        at = bisect_left(recorded, num_samples, key=_size)
        last = bisect_left(recorded, num_samples + 1, key=_size)
        if last - at < num:
            at = min(max(0, (at + last - num) // 2), len(recorded) - num)
            last = at + num
        drawn = recorded[at + int(luck * (last - at))]
        usual_s = self._usual_s(num_samples) / self._usual_s(drawn.num_samples)
        return drawn.seconds * usual_s

    def _usual_s(self, num_samples: int) -> float:
        assert self.calls is not None
        return self.calls.fixed_s + self.calls.per_sample_s * num_samples + 1e-9


def _length(check: Check) -> int:
    return check.num_tokens


def _size(call: Call) -> int:
    return call.num_samples
