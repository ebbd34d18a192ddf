"""The bounds that docs/tail-batching.md states about the long queue."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.commands import Defer, Launch, RoundKind
from rollpacker.core.job.config import JobConfig
from tests.core.world import World, published


@settings(max_examples=60, deadline=None)
@given(
    p0=st.integers(1, 12),
    factor=st.floats(1.05, 3.0),
    seed=st.integers(0, 10_000),
    epochs=st.integers(1, 2),
    flush=st.booleans(),
)
def test_the_queue_is_bounded_and_nobody_waits_for_long(
    p0: int, factor: float, seed: int, epochs: int, flush: bool
) -> None:
    tail = published(prompt_factor=factor, flush_each_epoch=flush)
    config = JobConfig(prompts_per_step=p0, samples_per_prompt=2, max_steps=40, tail_batching=tail)
    world = World(config, num_rows=150, epochs=epochs, seed=seed).run()
    surplus = tail.factors.num_prompts(p0) - p0
    queue: dict[object, int] = {}
    longest_wait = 0
    for record in world.log:
        for command in record.commands:
            if isinstance(command, Launch):
                if command.kind in (RoundKind.LONG, RoundKind.FLUSH):
                    for prompt in {sample.prompt for sample in command.samples}:
                        queue.pop(prompt, None)
                else:
                    queue = {prompt: waited + 1 for prompt, waited in queue.items()}
                    longest_wait = max([longest_wait, *queue.values()])
            elif isinstance(command, Defer):
                assert len(command.prompts) <= surplus  # fewer at the data's end
                queue.update(dict.fromkeys(command.prompts, 0))
    leftover = p0 - 1  # the end of the data, or of an epoch that is flushed
    assert world.longest_queue <= p0 - 1 + surplus + leftover
    assert longest_wait <= math.ceil(p0 / surplus)
