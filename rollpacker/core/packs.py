"""Deals a step's rows (samples) to its training ranks, so that all have about the same work rather
than the same number, and joins a rank's rows into packs.

Ranks of a step wait for the slowest. What a sample costs grows faster than its length, since
attention looks back over all of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Cost of training on a sample by its length, in costs of one token without attention."""

    crossover_tokens: float = 48_000.0
    """Length in tokens at which attention costs as much as everything else. Matrices cost 6 FLOPs
    per parameter and token, causal attention 6 x layers x heads x head size per token and token of
    its row, so it is parameters / (layers x heads x head size): about 12 times the hidden size. The
    default is that of a model with 4,096. Flash attention and matrices differ in how close they
    come to the device's peak; the balance depends little on it."""

    def __call__(self, length: int) -> float:
        return length + length * length / self.crossover_tokens


work = WorkModel()
"""Cost of training on a sample of a given length, for a model with a hidden size of 4,096."""


def assign(
    lengths: Sequence[int], num_ranks: int, *, work: Callable[[int], float] = work
) -> list[list[int]]:
    """Deals rows of these lengths to ranks. Returns the ascending indices of each rank's rows,
    every index once; with fewer rows than ranks the last ranks have none. Longest processing time
    first (Graham 1969): each row, longest first, to the rank that has least so far. The largest
    rank has at most 4/3 - 1 / (3 x ranks) of what the best assignment has. The same lengths in the
    same order give the same result."""
    assert num_ranks >= 1, num_ranks
    costs = [work(length) for length in lengths]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    return [sorted(share) for share in shares]


def plan_packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Joins rows of these lengths into packs by best-fit decreasing, and returns the ascending
    indices of each pack's rows. A pack has at most `max_tokens` tokens, except that a longer row
    has a pack of its own. There are at most 11/9 of the fewest packs, plus 1."""
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """A pair for every pack: the tokens that it has room for, and its number; ascending."""
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[index]
        tightest = bisect_left(room, (size, 0))
        if tightest < len(room):
            left, number = room.pop(tightest)
            packs[number].append(index)
        else:
            left, number = max_tokens, len(packs)
            packs.append([index])
        if left > size:
            insort(room, (left - size, number))
    return [sorted(members) for members in packs]
