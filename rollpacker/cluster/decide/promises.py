"""Which slowdowns a layout would bring to its jobs, and which of them break a promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.cluster.decide.forecast import Forecast
from rollpacker.cluster.decide.layout import Layout
from rollpacker.cluster.decide.placement import Rest, limits, rest_of

_TOLERANCE = 1e-9


def bounds(
    layout: Layout, forecasts: Sequence[Forecast], rest: Mapping[str, Rest], confidence: float
) -> list[float]:
    """By job: the slowdown over the rest of its life that is not passed with this confidence, for
    `rest` as in `Standing`. Who joins turns that are under way makes everybody wait once more, by
    an iteration at most."""
    joins = len(layout.jobs) > 1
    found = []
    for job, one in zip(layout.jobs, forecasts, strict=True):
        iterations = rest_of(job, rest).iterations
        once = one.slowdown / iterations if joins else 0.0
        found.append(one.bound(confidence, iterations) + once)
    return found


def broken(
    layout: Layout, forecasts: Sequence[Forecast], rest: Mapping[str, Rest], confidence: float
) -> dict[str, tuple[float, float]]:
    """Jobs whose SLO would not be kept: the slowdown that each would have (`bounds`), and the one
    that would keep it."""
    pairs = zip(bounds(layout, forecasts, rest, confidence), limits(layout, rest), strict=True)
    return {
        job.name: (bound, limit)
        for job, (bound, limit) in zip(layout.jobs, pairs, strict=True)
        if bound > limit + _TOLERANCE
    }


def kept(
    layout: Layout, forecasts: Sequence[Forecast], rest: Mapping[str, Rest], confidence: float
) -> bool:
    """Whether every job's SLO is kept."""
    pairs = zip(bounds(layout, forecasts, rest, confidence), limits(layout, rest), strict=True)
    return all(bound <= limit + _TOLERANCE for bound, limit in pairs)
