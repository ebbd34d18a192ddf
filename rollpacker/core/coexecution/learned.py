"""How long a job's phases take, as its iterations show: it begins with the profile, which fades.

The last `WINDOW` iterations count, all alike; at the begin they are iterations of the profile, of
which each one that is seen replaces one. So drift is followed with a lag of half a window, and a
kind of round that comes more often, or is new, gets its share. Placement hears of it only where
the mean has changed by more than `MATERIAL`, and by more than luck makes of so few iterations:
noise moves nobody.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from rollpacker.core.coexecution.job import ClusterJob, RoundTimes, Times

WINDOW = 32
"""Iterations."""
MATERIAL = 0.04
"""Of an iteration's mean."""
SURE = 3.0
"""Standard errors of the mean."""
_STEP = (0.7548776662466927, 0.5698402909980532)
"""Of the additive sequence that fills a square most evenly: which iterations of the profile."""


class LearnedTimes:
    """Of one job. What is seen decides alone: the same iterations, the same times."""

    def __init__(self, job: ClusterJob) -> None:
        self._job = job
        self._seen: deque[tuple[str, Times]] = deque(
            (_of_profile(job, number) for number in range(WINDOW)), maxlen=WINDOW
        )

    def saw(self, kind: str, times: Times) -> ClusterJob | None:
        """An iteration: seconds on the devices that the profile is of. Returns the job as it is now
        known, if that has changed materially."""
        self._seen.append((kind, _positive(times)))
        if not self._has_changed():
            return None
        self._job = replace(self._job, rounds=self._rounds())
        return self._job

    def _has_changed(self) -> bool:
        known = self._job.mean
        least = MATERIAL * math.fsum(known)
        for part in range(4):
            seconds = [times[part] for _, times in self._seen]
            mean = math.fsum(seconds) / WINDOW
            change = abs(mean - known[part])
            if change > least:
                spread = math.fsum((one - mean) ** 2 for one in seconds) / WINDOW
                if change > SURE * math.sqrt(spread / WINDOW):
                    return True
        return False

    def _rounds(self) -> tuple[RoundTimes, ...]:
        kinds: dict[str, list[Times]] = {}
        for kind, times in self._seen:
            kinds.setdefault(kind, []).append(times)
        return tuple(
            RoundTimes(
                kind=kind,
                share=len(listed) / WINDOW,
                rollout_s=tuple(one.rollout_s for one in listed),
                train_s=tuple(one.train_s for one in listed),
                between_s=math.fsum(one.between_s for one in listed) / len(listed),
                after_s=math.fsum(one.after_s for one in listed) / len(listed),
            )
            for kind, listed in sorted(kinds.items())
        )


def _of_profile(job: ClusterJob, number: int) -> tuple[str, Times]:
    which, quantile = ((number + 1) * step % 1.0 for step in _STEP)
    one = job.round_at(which)
    return one.kind, one.at(quantile)


def _positive(times: Times) -> Times:
    """A phase that took no time at all, as clocks tell it, took some."""
    rollout_s, between_s, train_s, after_s = times
    return Times(max(rollout_s, 1e-6), max(between_s, 0), max(train_s, 1e-6), max(after_s, 0))
