"""Learns how long a job's phases take: new iterations replace those that it was submitted with.

The last `WINDOW` iterations count, all alike. At first they are drawn from its profile, and each
measured iteration replaces one of these. So drift is followed with a lag of half a window, and a
kind of round that comes more often, or is new, gets its share. Placement is told only of changes of
the mean by more than `MATERIAL`, and by more than chance explains in so few iterations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from rollpacker.cluster.decide.job import ClusterJob, RoundTimes, Times

WINDOW = 32
"""Number of a job's latest iterations from which its times are learned."""
MATERIAL = 0.04
"""Share of an iteration's mean seconds that a change must exceed for placement to be told."""
SURE = 3.0
"""Number of standard errors that a change of a job's times must exceed not to be taken for luck."""
ENOUGH = 4
"""Fewest iterations of one kind of round from which its times are judged to have changed."""
_STEP = (0.7548776662466927, 0.5698402909980532)
"""Steps in x and y of the sequence that fills a unit square most evenly; its points choose
iterations from the profile."""


class LearnedTimes:
    """Learns the times of a job's phases from its latest `WINDOW` iterations. Until there are so
    many, iterations drawn from the times that it was submitted with take their place."""

    def __init__(self, job: ClusterJob) -> None:
        self._job = job
        self._seen: deque[tuple[str, Times]] = deque(
            (_of_profile(job, number) for number in range(WINDOW)), maxlen=WINDOW
        )

    def saw(self, kind: str, times: Times) -> ClusterJob | None:
        """Take in an iteration: the kind of its round, and its seconds on the devices that the job
        was measured on. Returns the job with new times if they have changed by much, else None."""
        self._seen.append((kind, times.positive()))
        if not self._has_changed():
            return None
        self._job = replace(self._job, rounds=self._rounds())
        return self._job

    def _has_changed(self) -> bool:
        """Whether some kind of round has become more or less frequent, or longer or shorter, by
        more than chance explains and by enough to matter (`MATERIAL`)."""
        least = MATERIAL * math.fsum(self._job.mean)
        known = {one.kind: one for one in self._job.rounds}
        seen = self._by_kind()
        for kind in known.keys() | seen.keys():
            one, listed = known.get(kind), seen.get(kind, [])
            before = 0.0 if one is None else one.share
            share = len(listed) / WINDOW
            luck = math.sqrt(max(before * (1 - before), share * (1 - share)) / WINDOW)
            change = abs(share - before)
            means = listed[0] if one is None else one.mean
            if change > SURE * luck and change * math.fsum(means) > least:
                return True
            if one is not None and len(listed) >= ENOUGH:
                for known_s, seconds in zip(one.mean, zip(*listed, strict=True), strict=True):
                    if _differs(seconds, known_s, least / share):
                        return True
        return False

    def _by_kind(self) -> dict[str, list[Times]]:
        kinds: dict[str, list[Times]] = {}
        for kind, times in self._seen:
            kinds.setdefault(kind, []).append(times)
        return kinds

    def _rounds(self) -> tuple[RoundTimes, ...]:
        return tuple(
            RoundTimes(
                kind=kind,
                share=len(listed) / WINDOW,
                rollout_s=tuple(one.rollout_s for one in listed),
                train_s=tuple(one.train_s for one in listed),
                between_s=math.fsum(one.between_s for one in listed) / len(listed),
                after_s=math.fsum(one.after_s for one in listed) / len(listed),
            )
            for kind, listed in sorted(self._by_kind().items())
        )


def _differs(seconds: Sequence[float], known_s: float, least: float) -> bool:
    """Whether the mean of `seconds` is more than `least`, and more than chance, off `known_s`."""
    mean = math.fsum(seconds) / len(seconds)
    change = abs(mean - known_s)
    if change <= least:
        return False
    spread = math.fsum((one - mean) ** 2 for one in seconds) / len(seconds)
    return change > SURE * math.sqrt(spread / len(seconds))


def _of_profile(job: ClusterJob, number: int) -> tuple[str, Times]:
    which, quantile = ((number + 1) * step % 1.0 for step in _STEP)
    one = job.round_at(which)
    return one.kind, one.at(quantile)
