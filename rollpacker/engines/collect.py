"""Ask an engine for responses and wait for all of them: for evaluation, benchmarks and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import (
    Engine,
    EngineError,
    EngineOutput,
    GenerationRequest,
    Response,
)


async def collect(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Response]:
    """Return one response per request, in the order of the requests.

    This replaces the engine's listener: an earlier listener must be set again with `start`.

    Raises:
        EngineError: a request failed or was aborted, or the engine died.
    """
    if not requests:
        return []
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    outputs: dict[SampleId, EngineOutput] = {}

    def settle(error: BaseException | None = None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(EngineError(f"the engine died: {error}"))

    def listen(new: Sequence[EngineOutput]) -> None:
        outputs.update((output.event.sample, output) for output in new)
        if len(outputs) == len(requests):
            loop.call_soon_threadsafe(settle)

    def die(error: BaseException) -> None:
        loop.call_soon_threadsafe(settle, error)

    engine.start(listen, die)
    engine.submit(requests)
    await done
    return [_response(outputs[request.sample]) for request in requests]


def _response(output: EngineOutput) -> Response:
    if not isinstance(output.event, SampleGenerated) or output.response is None:
        reason = getattr(output.event, "reason", "it was aborted")
        raise EngineError(f"no response for {output.event.sample}: {reason}")
    return output.response


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never has to wait, up to its end. No event loop is used, since in a
    notebook one runs already. Raises `AssertionError` if it would wait."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("there was something to wait for")
