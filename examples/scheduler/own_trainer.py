"""Tail batching in a trainer and an engine that RollPacker does not know, both made up.

    python examples/scheduler/own_trainer.py

The engine takes a millisecond for a token of each response that it generates; lengths have a long
tail. What the trainer would train on is counted, and the seconds are told by cause.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.scheduler import Counted, Request, Scheduler

TOKEN_S = 0.0002


class Engine:
    """Generates each response in a task of its own: a server would be asked here."""

    def __init__(self) -> None:
        self.scheduler: Scheduler
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.tasks[request.id] = asyncio.create_task(self.generate(request))

    def stop(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.tasks[request.id].cancel()

    async def generate(self, request: Request) -> None:
        length = int(random.Random(request.seed).lognormvariate(4, 1)) + 1
        tokens = 0
        try:
            while tokens < length:
                await asyncio.sleep(TOKEN_S)
                tokens += 1
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_soon(self.scheduler.ended, request, tokens, "stopped")
            return
        self.scheduler.ended(request, tokens)


async def train(steps: int) -> None:
    engine = Engine()
    batching = TailBatchingConfig(prompt_factor=1.5, carry="none")
    config = JobConfig(
        prompts_per_step=8, samples_per_prompt=4, max_steps=steps, tail_batching=batching
    )
    scheduler = engine.scheduler = Scheduler(config, engine, Counted(lambda count: count))
    while (step := await scheduler.next_step_async()) is not None:
        num_responses = sum(len(group) for group in step.groups)
        metrics = scheduler.trained()  # after the optimizer's step, and new weights in the engine
        print(f"step {step.number}: {num_responses} responses, {metrics['tail_idle_s']:.2f} s idle")
    print(scheduler.report())


if __name__ == "__main__":
    asyncio.run(train(steps=6))
