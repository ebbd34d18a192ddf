"""TRL's own vLLM (`use_vllm=True`): the server that it is told of, or the engine in each process.

TRL brings the weights into it. A deferred response starts again from its prompt, with its seed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollpacker.data.dataset import PromptRow
from rollpacker.scheduler.servers import (
    CHECK_PROMPT,
    CHECK_SEEDS,
    CHECK_TOKENS,
    NoServer,
    Servers,
)
from rollpacker.scheduler.wire import Lost


def sampling(args: Any) -> dict[str, Any]:
    """vLLM's sampling parameters, as TRL sets them, but for seeds and the longest response."""
    names = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")
    own = {name: getattr(args, name) or 0 for name in names}
    return own | (args.generation_kwargs or {})


def evaluate(trainer: Any, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Have TRL itself generate the responses of an evaluation, with its own random numbers."""
    _, tokens, log_probs, _ = trainer.vllm_generation.generate(
        prompts=[*map(list, prompts)],
        images=None,
        num_generations=trainer.num_generations_eval,
        profiler=None,
    )
    drawn = [[place[0] for place in one] for one in log_probs]
    return {"prompt_ids": [*map(list, prompts)], "completion_ids": tokens, "logprobs": drawn}


def sync(trainer: Any) -> None:
    """Bring the present weights into vLLM, in all processes, unless it has them."""
    if trainer._last_loaded_step != trainer.state.global_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


class TrlServer(Servers):
    """TRL's vLLM server as the scheduler's host. Its event loop runs in a thread."""

    def __init__(self, trainer: Any, prompts: Sequence[PromptRow]) -> None:
        """Raises `ValueError` for a server that cannot be used (`Servers.check`)."""
        client, args = trainer.vllm_generation.vllm_client, trainer.args
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="rollpacker-server", daemon=True).start()
        super().__init__(
            "vllm",
            [client.base_url],
            lambda number: prompts[number].tokens,
            vocab_size=trainer.model.config.get_text_config().vocab_size,
            max_response_tokens=args.max_completion_length,
            sampling={"model": client.model, **sampling(args)},
            loop=loop,
            returned=self._returned,
        )
        asyncio.run_coroutine_threadsafe(self.check(), loop).result()

    def begin(self) -> None:
        """Begin to note what the server draws with the step's weights."""
        self._known = asyncio.run_coroutine_threadsafe(self._drawn(), self._loop)

    async def _drawn(self) -> list[float]:
        draw = self._draw(CHECK_PROMPT, CHECK_SEEDS[0], max_tokens=CHECK_TOKENS)
        (server,) = self._servers
        while not draw.is_whole:
            try:
                await self._wire.ask(server.url, draw, ignore_eos=True)
            except Lost:
                if not server.is_up:
                    raise
                await asyncio.sleep(self._pause_s)
        return draw.log_probs

    async def _returned(self, url: str) -> None:
        """Fail the step if a server that was lost does not have the step's weights any more, since
        it was started anew. TRL cannot bring them in the middle of a step."""
        was_noted = self._known.done() and self._known.exception() is None
        found, known = await self._drawn(), self._known.result() if was_noted else []
        if not np.allclose(found, known or np.inf, atol=0.05):
            error = NoServer(f"{url} was lost, and is back without the step's weights")
            self.scheduler.fail(error)
            raise error

    def sign(self) -> int:
        """Return a number that changes as long as tokens come."""
        return sum(len(run.draw.tokens) for run, _ in [*self._running.values()])

    async def close(self) -> None:
        """Stop all that the server generates, and the thread (`Servers.close`)."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(super().close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
