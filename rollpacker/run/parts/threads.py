"""How many of torch's threads the run's own process computes with."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.trainer.model import LoadedModel

logger = logging.getLogger(__name__)

ROUNDS = 5
MARGIN = 0.9
"""More threads must be faster by so much: they suffer more when the machine is shared."""


def set_threads(config: RunConfig, loaded: LoadedModel, threads: int | None) -> int:
    """Set the number of torch's threads of this process and return it: `threads` if that is given,
    else `train.threads`, which may ask for a measurement."""
    import torch

    wanted = threads if threads is not None else config.train.threads
    if wanted == "auto":
        wanted = _measured_threads(config, loaded)
    torch.set_num_threads(wanted)
    return wanted


def _measured_threads(config: RunConfig, loaded: LoadedModel) -> int:
    import torch

    if loaded.device.type != "cpu":
        return torch.get_num_threads()
    rows = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    tokens = torch.zeros((min(rows, 64), 16), dtype=torch.long)

    def step() -> None:
        with torch.inference_mode():
            loaded.model(tokens, use_cache=False)

    threads = measure_threads(step)
    logger.info("%d torch threads (measured; set train.threads to choose)", threads)
    return threads


def measure_threads(step: Callable[[], None], candidates: Sequence[int] | None = None) -> int:
    """The number of torch threads that runs `step` fastest; of several near equals the smallest.

    Candidates are 1, 2, 4 ... and the number of cores unless given. Runs `step` six times per
    candidate, interleaved, and leaves the thread count as it was. Compares the fastest runs, so a
    disturbance of the machine that lasts does not decide.
    """
    import torch

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
