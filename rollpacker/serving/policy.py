"""An engine as an async function: many callers at once, each of which awaits its own responses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from rollpacker.core.events import SampleFailed
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import (
    Engine,
    EngineError,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)


class RequestFailed(Exception):
    """The engine could not generate the responses to a request; the message says why."""


class EnginePolicy:
    """Has one engine generate responses to the prompts of many callers, on one event loop. The
    engine must have no other user, since it reports every response to this object alone."""

    def __init__(self, engine: Engine, on_error: Callable[[BaseException], None]) -> None:
        """`on_error` is called in the event loop, with the error, if the engine dies."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[SampleId, asyncio.Future[Response]] = {}
        self._on_error = on_error
        engine.start(self._listen, self._die)

    async def draw(
        self, prompt: Sequence[int], sampling: SamplingParams, *, n: int = 1, turn: int = 1
    ) -> list[Response]:
        """Returns `n` responses to a prompt (tokens), as message number `turn` of a dialogue.
        Cancelling the call stops these. Raises `RequestFailed` if the engine cannot generate."""
        asked = PromptId("served", 0, next(self._numbers))
        samples = [SampleId(asked, index=index, attempt=0) for index in range(n)]
        tokens = tuple(prompt)
        requests = [
            GenerationRequest(
                sample=sample,
                prompt_tokens=tokens,
                sampling=sampling,
                # With the same seed, the same words.
                noise=SampleId(PromptId("served", 0, 0), index=sample.index, attempt=0),
                turn=turn,
            )
            for sample in samples
        ]
        futures = [self._loop.create_future() for _ in samples]
        self._waiting.update(zip(samples, futures, strict=True))
        try:
            self._engine.submit(requests)
            return list(await asyncio.gather(*futures))
        except EngineError as error:
            raise RequestFailed(str(error)) from None
        finally:
            left = [sample for sample in samples if self._waiting.pop(sample, None) is not None]
            if left:
                self._abort(left)

    def _abort(self, samples: Sequence[SampleId]) -> None:
        try:
            self._engine.abort(samples)
        except EngineError:  # dead or closed: nothing runs there any more
            return

    # -- called by the engine's thread -------------------------------------------------------------

    def _listen(self, outputs: Sequence[EngineOutput]) -> None:
        self._in_loop(lambda: self._settle(outputs))

    def _die(self, error: BaseException) -> None:
        self._in_loop(lambda: self._give_up(error))

    def _give_up(self, error: BaseException) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestFailed(f"the engine died: {error}"))
        self._on_error(error)

    def _in_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _settle(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            future = self._waiting.pop(output.event.sample, None)
            if future is None or future.done():
                continue
            if isinstance(output.event, SampleFailed) or output.response is None:
                reason = getattr(output.event, "reason", "it was aborted")
                future.set_exception(RequestFailed(reason))
            else:
                future.set_result(output.response)
