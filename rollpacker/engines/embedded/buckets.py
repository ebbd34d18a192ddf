"""Splits the rows of a decode step into buckets, each with its own width of the cache.

A decode step runs the linear layers once over all rows, but attention costs rows times width.
Splitting the rows into a few contiguous ranges, each as wide as its own longest row, spares short
rows the width of long ones at the price of one more call per layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_BUCKETS = 4
CALL_COST_ELEMENTS = 25_000
"""Cost of one more attention call, as the number of key elements that could be read in the same
time. Set after timings on a CPU with 16 to 64 elements a head: a call takes 40 microseconds."""
SORT_HORIZON_STEPS = 8
"""Number of decode steps within which sorting the rows must pay for the copies that it takes."""
MOVE_COST = 3
"""Cost of copying one cache position, as the number of positions that attention could read in the
same time (measured on a CPU)."""


class Bucket(NamedTuple):
    """A range of rows [start, stop) whose newest tokens attend over `width` cache positions."""

    start: int
    stop: int
    width: int
    is_even: bool = False
    """Whether all rows are known to be exactly as long as the bucket is wide, and need no mask."""


def plan_buckets(lengths: np.ndarray, call_cost: float) -> list[Bucket]:
    """Split rows of these lengths, in this order, into contiguous buckets and return them. A bucket
    is cut in two while that lowers the total cost in row-positions, which is `call_cost` + rows x
    width for each bucket."""
    buckets = [Bucket(0, len(lengths), int(lengths.max()))]
    while len(buckets) < MAX_BUCKETS:
        splits = [_best_split(lengths, bucket) for bucket in buckets]
        best = max(range(len(buckets)), key=lambda i: splits[i][0])
        saving, at = splits[best]
        if saving <= call_cost:
            break
        start, stop = buckets[best][:2]
        buckets[best : best + 1] = [
            Bucket(start, at, int(lengths[start:at].max())),
            Bucket(at, stop, int(lengths[at:stop].max())),
        ]
    return buckets


def least_moves(order: np.ndarray, buckets: list[Bucket]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the rows to move, and for each the row whose place it takes. Afterwards
    each row is in the bucket that it would be in if the rows were sorted by `order` (row indices,
    shortest row first). Rows already in the right bucket stay, which spares most of the copies."""
    held = np.repeat(np.arange(len(buckets)), [stop - start for start, stop, _, _ in buckets])
    wanted = np.empty_like(held)
    wanted[order] = held
    target = np.flatnonzero(wanted != held)
    return target[np.argsort(wanted[target], kind="stable")], target


def bucket_cost(buckets: list[Bucket], call_cost: float) -> float:
    """Cost of a step over these buckets, in row-positions: `call_cost` + rows x width for each."""
    return sum((stop - start) * width + call_cost for start, stop, width, _ in buckets)


def _best_split(lengths: np.ndarray, bucket: Bucket) -> tuple[int, int]:
    """The best cut of a bucket in two: (number of row-positions saved, row to cut before)."""
    start, stop, width, _ = bucket
    part = lengths[start:stop]
    num_rows = stop - start
    if num_rows < 2:
        return 0, start
    left = np.maximum.accumulate(part)[:-1]
    right = np.maximum.accumulate(part[::-1])[::-1][1:]
    num_left = np.arange(1, num_rows)
    costs = num_left * left + (num_rows - num_left) * right
    cut = int(costs.argmin())
    return int(num_rows * width - costs[cut]), start + cut + 1
