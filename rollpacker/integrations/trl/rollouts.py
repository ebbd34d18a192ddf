"""The rollouts of one training: RollPacker's scheduler between the steps of TRL's trainer, with
RollPacker's engine, which reads the trainer's own weights.

The caller of `next_step` waits for the step, under a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rollpacker.core.events import SampleFailed
from rollpacker.core.ids import SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.data.dataset import Cursor, PromptRow
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
Groups = list[list[Response]]
"""The responses of each prompt, in the order in which they were submitted."""


class Rollouts:
    """The rollouts of one training. Its methods are called in the thread that trains; the engine's
    outputs arrive in the engine's thread."""

    def __init__(
        self,
        config: JobConfig,
        *,
        engine: Engine,
        cursor: Cursor,
        prompts: Sequence[PromptRow],
        sampling: SamplingParams,
        generation_s: float,
        resume: Path | None = None,
    ) -> None:
        """Begin rollouts, or go on from TRL's checkpoint `resume`. `prompts` has the prompt of each
        row of the data set. `generation_s` is the longest time without a sign of life from the
        engine."""
        self.engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self._generation_s = generation_s
        self._responses: dict[SampleId, Response] = {}
        self.scheduler = Scheduler(config, self, cursor, seed=sampling.seed, resume=resume)
        at_once(engine.update_weights(self.scheduler.version))

    def next_step(self) -> Groups:
        """Generate the next step, and return its responses: `samples_per_prompt` for each of
        `prompts_per_step` prompts. Raises `DeadlineExceeded`, and `EngineError` for a sample that
        the engine cannot generate."""
        scheduler = self.scheduler
        if scheduler.waits_for_training:  # the trainer trains several times before it steps
            self.trained()
        self.engine.start(self._on_outputs, scheduler.fail)
        found = scheduler.begin_step()
        step = wait_for(found, self.engine, self._generation_s, scheduler.waiting_for)
        if step is None:
            raise RuntimeError("TRL asks for another step, but the data ended")
        groups = [[self._responses[one.sample] for one in group] for group in step.groups]
        self._responses.clear()
        return groups

    def trained(self) -> dict[str, float]:
        """Report that the step was trained on and that the weights are new. Returns the step's
        metrics."""
        metrics = self.scheduler.trained()
        at_once(self.engine.update_weights(self.scheduler.version))
        return metrics

    def save(self, checkpoint: Path) -> None:
        """Save the prompts that were put off to a later step beside TRL's checkpoint. Saves nothing
        if TRL has yet to train again on the last generation, since a training cannot resume
        there."""
        if self.scheduler.is_trained:
            self.scheduler.save(checkpoint)

    # -- what the scheduler calls --------------------------------------------------------------

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

    # -- what is heard -------------------------------------------------------------------------

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Handle the outputs of a decode step. Called in the engine's thread, between two steps."""
        for output in outputs:
            if isinstance(output.event, SampleFailed):
                self.scheduler.fail(failure(output.event))
                return
            if output.response is not None:
                self._responses[output.event.sample] = output.response
            self.scheduler.heard(output)


def wait_for(found: Future[T], engine: Engine, limit_s: float, what: Callable[[], str]) -> T:
    """Wait for the result that the engine's thread gives `found`, and return it. Raises
    `DeadlineExceeded` after `limit_s` seconds without a decode step of the engine, with the text
    that `what` returns (what is waited for), and any exception given to `found`."""
    steps, last_sign = -1, time.monotonic()
    while True:
        try:
            return found.result(limit_s / LOOKS)
        except TimeoutError:
            if found.done():  # the error is the result
                raise
            now = engine.status().decode_steps
            if now != steps:
                steps, last_sign = now, time.monotonic()
            elif time.monotonic() - last_sign > limit_s:
                raise DeadlineExceeded(what(), limit_s, LIMIT) from None


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
    return wait_for(found, engine, generation_s, lambda: what)


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never has to wait, up to its end. No event loop is used, since in a
    notebook one runs already. Raises `AssertionError` if it would wait."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("there was something to wait for")


def failure(event: SampleFailed) -> EngineError:
    return EngineError(f"no response {event.sample}: {event.reason}")
