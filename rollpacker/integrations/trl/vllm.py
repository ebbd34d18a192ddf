"""TRL's own vLLM (`use_vllm=True`): the server that it is told of, or the engine in each process.

TRL brings the weights into it. A deferred response starts again from its prompt, with its seed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from rollpacker.data.dataset import PromptRow
from rollpacker.scheduler.servers import Servers


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
            returned=_refuse,
        )
        asyncio.run_coroutine_threadsafe(self.check(), loop).result()

    def begin(self) -> None:
        """Do nothing: the server has the step's weights."""

    def sign(self) -> int:
        """Return a number that changes as long as tokens come."""
        return sum(
            len(run.draw.tokens) + len(run.request.id) for run, _ in [*self._running.values()]
        )

    async def close(self) -> None:
        """Stop all that the server generates, and the thread (`Servers.close`)."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(super().close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _refuse(url: str) -> None:
    raise RuntimeError("a server that was lost may have been started anew, with older weights")
