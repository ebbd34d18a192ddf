"""A host with a made-up engine: each decode step brings a token to every response."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.scheduler import Counted, Request, Scheduler, Step

PROMPTS, SAMPLES = 8, 4

_number = itertools.count()
"""Numbers that put requests with the same end in order."""


class MadeUp:
    """A host whose responses depend on a request's seed alone: a frozen policy with keyed noise."""

    def __init__(
        self,
        *,
        num_prompts: int,
        per_step: tuple[int, int] = (PROMPTS, SAMPLES),
        resume: Path | None = None,
        faults: random.Random | None = None,
        **tail_batching: object,
    ) -> None:
        """`per_step`: prompts of a step, and samples of each. `faults`: decides which responses the
        engine fails on. None: none. `tail_batching`: settings of the scheduler."""
        self.num_prompts, self.position = num_prompts, 0
        self.faults = faults
        self.running: dict[str, tuple[Request, int]] = {}
        """Requests that the engine generates, and the decode step at which each began."""
        self.ends: list[tuple[int, int, Request]] = []
        """Heap of the decode steps at which requests end, if they are not stopped before."""
        self.stopping: list[Request] = []
        self.decode_steps = 0
        self.trained: Counter[tuple[int, int, int]] = Counter()
        """How often each response was trained on: its prompt, place and number of tokens."""
        config = JobConfig(
            prompts_per_step=per_step[0],
            samples_per_prompt=per_step[1],
            max_steps=None,
            max_response_tokens=2000,
            tail_batching=TailBatchingConfig(**{"carry": "none", **tail_batching}),  # type: ignore[arg-type]
        )
        self.cursor = Counted(self.fetch)
        self.scheduler = Scheduler(config, self, self.cursor, resume=resume)
        self.position = self.cursor.num_fetched

    def fetch(self, count: int) -> int:
        found = min(count, self.num_prompts - self.position)
        self.position += found
        return found

    def start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.id not in self.running
            self.running[request.id] = request, self.decode_steps
            end = self.decode_steps + length_of(request)
            heapq.heappush(self.ends, (end, next(_number), request))

    def stop(self, requests: Sequence[Request]) -> None:
        self.stopping += requests

    def decode(self) -> None:
        """Run decode steps until a response ends, and report it and what was stopped then."""
        self.decode_steps, _, request = heapq.heappop(self.ends)
        if request.id in self.running:
            self.end(request)
        while self.stopping:
            request = self.stopping.pop()
            if request.id in self.running:
                self.end(request)

    def end(self, request: Request) -> None:
        _, since = self.running.pop(request.id)
        tokens = self.decode_steps - since
        if self.faults is not None and self.faults.random() < 0.05:
            self.scheduler.ended(request, 0, "failed", why="made up")
        else:
            is_whole = tokens == length_of(request)
            self.scheduler.ended(request.id, tokens, "stop" if is_whole else "stopped")

    def step(self) -> Step | None:
        """Generate one step and train on it."""
        found = self.scheduler.begin_step()
        while not found.done():
            self.decode()
        step = found.result()
        assert not self.running and not self.stopping
        if step is not None:
            for group in step.groups:
                self.trained.update((r.prompt, r.place, length_of(r)) for r in group)
            self.scheduler.trained()
        return step

    def run(self) -> None:
        while self.step() is not None:
            pass


def length_of(request: Request) -> int:
    """Number of tokens of a response: a long tail, P99 some 20 times the median."""
    return min(int(random.Random(request.seed).lognormvariate(4, 1.3)) + 1, 2000)
