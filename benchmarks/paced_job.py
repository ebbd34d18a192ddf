"""A job of fake speed: the real controller, with an engine and a trainer that compute nothing and
take known seconds. `cluster_size.py` and `cluster_faults` give many of them to one cluster.

    python benchmarks/paced_job.py FOLDER --rollout-s 2 --train-s 1 --steps 30 [--resume]

It takes the seat that its environment names, as `rollpacker train` does; without one it runs alone.
What it leaves in FOLDER is a run's: `events.jsonl`, which `exactly_once.py` reads, and checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollpacker.cluster.seat import open_seat
from rollpacker.config.schema import CheckpointConfig, EvalConfig
from rollpacker.controller.checkpoint import has_checkpoint, newest_checkpoint
from rollpacker.core.ids import SampleId
from rollpacker.core.tail_batching import TailBatchingConfig
from tests.controller.fakes import FakeEngine, FakeTrainer, drive, make, run_config

TOKENS = 9
"""Of every response; the fake config's limit."""


class Even(FakeEngine):
    """All responses are equally long, so that every rollout takes as long."""

    def draw(self, noise: SampleId) -> tuple[int, ...]:
        return (7,) * TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollout-s", type=float, default=2.0)
    parser.add_argument("--train-s", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true")
    print(run(parser.parse_args()))


if __name__ == "__main__":
    main()
