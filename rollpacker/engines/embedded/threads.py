"""How many torch threads a step runs fastest with, by a short measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

ROUNDS = 5
MARGIN = 0.9
"""More threads must be faster by so much: they suffer more when the machine is shared."""


def measure_threads(step: Callable[[], None], candidates: Sequence[int] | None = None) -> int:
    """Which of `candidates` runs `step` fastest; the smallest among near equals.

    Candidates are 1, 2, 4 ... and the number of cores unless given. Runs `step` six times per
    candidate, interleaved, and leaves the thread count as it was. Compares the fastest runs, so a
    disturbance of the machine that lasts does not decide.
    """
    if candidates is None:
        num_cores = os.cpu_count() or 1
        candidates = [*(1 << power for power in range((num_cores - 1).bit_length())), num_cores]
    if not candidates or min(candidates) < 1:
        raise ValueError("candidates must be thread counts of at least 1")
    before = torch.get_num_threads()
    best_s = dict.fromkeys(sorted(candidates), float("inf"))
    try:
        for round_number in range(ROUNDS + 1):
            for count in best_s:
                torch.set_num_threads(count)
                start = time.perf_counter()
                step()
                if round_number:
                    best_s[count] = min(best_s[count], time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    chosen = min(best_s)
    for count, seconds in best_s.items():
        if seconds < MARGIN * best_s[chosen]:
            chosen = count
    return chosen
