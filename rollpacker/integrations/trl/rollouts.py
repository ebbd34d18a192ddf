"""The rollouts of one training: RollPacker's scheduler between the steps of TRL's trainer. The
caller of `next_step` waits for the step, under a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from rollpacker.core.events import SampleFailed
from rollpacker.core.ids import SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.data.dataset import Cursor, PromptRow
from rollpacker.engines.collect import at_once
from rollpacker.engines.engine import (
    Engine,
    EngineError,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.run.errors import DeadlineExceeded
from rollpacker.scheduler import Request, Scheduler

LIMIT = "generation_s of rollout_function"
LOOKS = 20
"""Number of times per deadline at which it is checked whether the engine has decoded further."""

T = TypeVar("T")
Turn = Callable[[], object] | None


class EngineHost:
    """An engine as the scheduler's host. The engine's outputs arrive in the engine's thread."""

    scheduler: Scheduler

    def __init__(self, engine: Any, prompts: Sequence[PromptRow], sampling: SamplingParams) -> None:
        """`engine` is an `Engine`, or the engines of all ranks (`Ranks`). `prompts` has the prompt
        of each row of the data set."""
        self.engine = engine
        self._prompts, self._sampling = prompts, sampling
        self._responses: dict[SampleId, Response] = {}

    def begin(self) -> None:
        """Prepare for a step, whose responses are generated with new weights."""
        self._responses.clear()
        at_once(self.engine.update_weights(self.scheduler.version))
        self.engine.start(self._on_outputs, self.scheduler.fail)

    def start(self, requests: Sequence[Request]) -> None:
        self.engine.submit(
            [
                GenerationRequest(
                    sample=one.sample,
                    prompt_tokens=self._prompts[one.prompt].tokens,
                    sampling=self._sampling,
                    noise=one.noise,
                    carried=one.carried,
                )
                for one in requests
            ]
        )

    def stop(self, requests: Sequence[Request]) -> None:
        self.engine.abort([one.sample for one in requests])

    def response(self, request: Request) -> Response:
        """Return the response to a request that the step trains on."""
        return self._responses[request.sample]

    def sign(self) -> int:
        """Return a number that changes as long as the engine is at work."""
        return int(self.engine.status().decode_steps)

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Handle the outputs of a decode step. Called in the engine's thread, between two steps."""
        for output in outputs:
            if isinstance(output.event, SampleFailed):
                self.scheduler.fail(failure(output.event))
                return
            if output.response is not None:
                self._responses[output.event.sample] = output.response
            self.scheduler.heard(output)


class Rollouts:
    """The rollouts of one training. Its methods are called in the thread that trains."""

    def __init__(
        self,
        config: JobConfig,
        *,
        host: Any,
        cursor: Cursor,
        seed: int,
        generation_s: float,
        resume: Path | None = None,
    ) -> None:
        """Begin rollouts, or go on from TRL's checkpoint `resume`. `host` generates: an
        `EngineHost`, or `TrlServer`. `generation_s` is the longest time without a sign of life from
        it."""
        self._host, self._generation_s = host, generation_s
        self.scheduler = host.scheduler = Scheduler(config, host, cursor, seed=seed, resume=resume)

    def next_step(self, turn: Turn = None) -> list[Response]:
        """Generate the next step, and return its responses: `samples_per_prompt` for each of
        `prompts_per_step` prompts. `turn` is called again and again as long as it is waited for.
        Raises `DeadlineExceeded`, and `EngineError` for a sample that the engine cannot generate.
        """
        scheduler, host = self.scheduler, self._host
        if scheduler.waits_for_training:  # the trainer trains several times before it steps
            scheduler.trained()
        host.begin()
        found = scheduler.begin_step()
        step = wait_for(found, host.sign, self._generation_s, scheduler.waiting_for, turn)
        if step is None:
            raise RuntimeError("TRL asks for another step, but the data ended")
        return [host.response(one) for group in step.groups for one in group]

    def save(self, checkpoint: Path) -> None:
        """Save the prompts that were put off to a later step beside TRL's checkpoint. Saves nothing
        if TRL has yet to train again on the last generation, since a training cannot resume
        there."""
        if self.scheduler.is_trained:
            self.scheduler.save(checkpoint)


def wait_for(
    found: Future[T],
    sign: Callable[[], int],
    limit_s: float,
    what: Callable[[], str],
    turn: Turn = None,
) -> T:
    """Wait for `found`, which another thread or `turn` completes, and return its result. Raises
    `DeadlineExceeded` after `limit_s` seconds in which the number that `sign` returns stays the
    same, with the text that `what` returns (what is waited for), and any exception given to
    `found`."""
    steps, last_sign = -1, time.monotonic()
    while not found.done():
        if turn is None:
            wait([found], limit_s / LOOKS)
        else:
            turn()
        if found.done():
            break
        if steps != (steps := sign()):
            last_sign = time.monotonic()
        elif time.monotonic() - last_sign > limit_s:
            raise DeadlineExceeded(what(), limit_s, LIMIT)
    return found.result()


def collect(
    engine: Engine, requests: Sequence[GenerationRequest], generation_s: float
) -> list[Response]:
    """Generate responses without tail batching, for an evaluation, and return them in the order of
    the requests. Raises `DeadlineExceeded` after `generation_s` seconds without a decode step, and
    `EngineError` for a sample that the engine cannot generate."""
    responses: dict[SampleId, Response] = {}
    found: Future[list[Response]] = Future()

    def listen(outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output.event, SampleFailed) and not found.done():
                found.set_exception(failure(output.event))
            elif output.response is not None:
                responses[output.event.sample] = output.response
        if len(responses) == len(requests):
            found.set_result([responses[request.sample] for request in requests])

    engine.start(listen, found.set_exception)
    engine.submit(requests)
    what = f"{len(requests)} responses of an evaluation from the engine"
    return wait_for(found, lambda: engine.status().decode_steps, generation_s, lambda: what)


def failure(event: SampleFailed) -> EngineError:
    return EngineError(f"no response {event.sample}: {event.reason}")
