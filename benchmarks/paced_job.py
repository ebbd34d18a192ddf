"""A job of fake speed: the real controller, with an engine and a trainer that compute nothing and
take known seconds. `cluster_size.py` gives many of them to one cluster.

    python benchmarks/paced_job.py FOLDER --rollout-s 2 --train-s 1 --steps 30

It takes the seat that its environment names, as `rollpacker train` does; without one it runs alone.
What it leaves in FOLDER is a run's: `events.jsonl`, which `exactly_once.py` reads.
It cannot be resumed: no model, no checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollpacker.cluster.seats.mailbox_seat import open_seat
from rollpacker.config.running import CheckpointConfig, EvalConfig
from rollpacker.core.ids import SampleId
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.pooled_job import make_job
from rollpacker.core.records import Entry
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.run.parts.seats import RunSeat
from tests.run.fakes import FakeEngine, FakeTrainer, drive, make, run_config

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
    print(run(parser.parse_args()), flush=True)
    os._exit(0)  # ray ends a process with 1 that a thread of its seat still asks it something in


def run(options: argparse.Namespace) -> str:
    """Returns why it ended."""
    found = open_seat(os.environ)
    seat = RunSeat(found)
    config = replace(
        run_config(steps=options.steps),
        tail_batching=TailBatchingConfig(enabled=False),
        checkpoint=CheckpointConfig(every_steps=1000),
        eval=EvalConfig(every_steps=None),
    )
    job_config = JobConfig(
        prompts_per_step=config.rollout.prompts_per_step,
        samples_per_prompt=config.rollout.samples_per_prompt,
        max_steps=options.steps,
        max_response_tokens=TOKENS,
        tail_batching=config.tail_batching,
        cadence=Cadence(checkpoint_every_steps=1000, evaluates=False, eval_every_steps=None),
        shares_pools=seat.shares_pools,
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    engine = Even(step_s=options.rollout_s / TOKENS)
    controller, recorder = make(
        options.folder,
        config,
        engine=engine,
        trainer=FakeTrainer(accumulate_s=options.train_s),
        job=make_job(job_config),
        evaluates=False,
        seat=found,
    )
    telling = seat.observers()

    def feed(entry: Entry) -> None:
        for observer in telling:
            observer.feed(entry)

    recorder.feed = feed  # type: ignore[method-assign]
    seat.watch_over(controller)
    try:
        return drive(controller)
    finally:
        if found is not None:
            found.close()


if __name__ == "__main__":
    main()
