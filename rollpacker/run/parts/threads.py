"""How many of torch's threads the run's own process computes with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.trainer.model import LoadedModel

logger = logging.getLogger(__name__)


def set_threads(config: RunConfig, loaded: LoadedModel, threads: int | None) -> int:
    """Torch's threads for this process: as told, as a run had them before, or by measurement."""
    import torch

    wanted = threads if threads is not None else config.train.threads
    if wanted == "auto":
        wanted = _measured_threads(config, loaded)
    torch.set_num_threads(wanted)
    return wanted


def _measured_threads(config: RunConfig, loaded: LoadedModel) -> int:
    import torch

    from rollpacker.engines.embedded.threads import measure_threads

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
