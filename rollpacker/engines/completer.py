"""Completions of chat messages on an engine of this process: a judge beside the policy.

The model has an engine, a key-value cache and a worker thread of its own; it shares processor and
memory with the policy's engine, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.chat_template import SpecialTokens
from rollpacker.core.events import SampleAborted, SampleFailed
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import (
    EngineConfig,
    EngineError,
    EngineOutput,
    GenerationRequest,
    SamplingParams,
)

CONCURRENCY = 16
KV_CACHE_GIB = 1.0
"""GiB for keys and values unless the caller says otherwise: the policy's engine needs the rest."""


class EngineCompleter:
    """Greedy completions from `model`. Meets the judge's `Completer` protocol. Messages go through
    the tokenizer's chat template if it has one; else their texts follow each other, a blank line
    between them. Text in a message never becomes a special token."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_reply_tokens: int = 512,
        concurrency: int = CONCURRENCY,
        config: EngineConfig | None = None,
    ) -> None:
        """Starts the engine's thread. `concurrency`: most requests that run at once. `config`: None
        for an engine with that many places and a cache of `KV_CACHE_GIB`.

        Raises:
            UnsupportedModelError: the model cannot run on the engine.
        """
        self._tokenizer = tokenizer
        self._sampling = SamplingParams(max_response_tokens=max_reply_tokens, temperature=0.0)
        self._concurrency = concurrency
        self._engine = TorchEngine(
            model=model,
            tokenizer=tokenizer,
            config=config or EngineConfig(max_slots=concurrency, kv_cache_gib=KV_CACHE_GIB),
        )
        self._special = SpecialTokens(tokenizer)
        self._numbers = itertools.count()
        self._waiting: dict[SampleId, asyncio.Future[EngineOutput]] = {}
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._engine.start(self._listen, self._died)

    async def complete(self, messages: Sequence[Mapping[str, str]], *, timeout_s: float) -> str:
        """Return the reply's text, without special tokens. `timeout_s` limits the generation;
        the wait before it, while `concurrency` other requests run, does not count.

        Raises:
            TimeoutError: the generation took longer; the request leaves the engine.
            ValueError: the engine can never run the request, such as a prompt longer than the
                context.
            EngineError: the engine died or is closed.
        """
        tokens = self._tokens(messages)
        async with self._free():
            output = await self._run(tokens, timeout_s)
        if isinstance(output.event, SampleFailed):
            raise ValueError(output.event.reason)
        if output.response is None or isinstance(output.event, SampleAborted):
            raise EngineError("the request was aborted")
        return str(self._tokenizer.decode(list(output.response.tokens), skip_special_tokens=True))

    async def close(self) -> None:
        """End the engine's thread; requests under way raise `EngineError`. Idempotent."""
        await self._engine.close()
        self._died(EngineError("the engine is closed"))

    async def _run(self, tokens: tuple[int, ...], timeout_s: float) -> EngineOutput:
        loop = asyncio.get_running_loop()
        sample = SampleId(PromptId("judge", 0, next(self._numbers)), 0, 0)
        future: asyncio.Future[EngineOutput] = loop.create_future()
        self._waiting[sample] = future
        try:
            self._engine.submit(
                [GenerationRequest(sample=sample, prompt_tokens=tokens, sampling=self._sampling)]
            )
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            if self._waiting.pop(sample, None) is not None and not future.done():
                self._abort(sample)

    def _abort(self, sample: SampleId) -> None:
        try:
            self._engine.abort([sample])
        except EngineError:  # dead or closed: nothing runs there any more
            return

    def _free(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self._concurrency))
        return self._places[1]

    # -- called by the engine's thread -------------------------------------------------

    def _listen(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            future = self._waiting.get(output.event.sample)
            if future is not None:
                _settle(future, output)

    def _died(self, error: BaseException) -> None:
        for future in list(self._waiting.values()):
            _settle(future, EngineError(f"the judge's engine ended: {error}"))

    # -- messages ----------------------------------------------------------------------

    def _tokens(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        # What a message says must not end its turn.
        spelt_out = self._special.spelt_out
        plain = [{**message, "content": spelt_out(message["content"])} for message in messages]
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
            special = False
        else:
            text = "\n\n".join(message["content"] for message in plain) + "\n\n"
            special = True
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return tuple(ids)


def _settle(future: asyncio.Future[EngineOutput], result: EngineOutput | EngineError) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)

    try:
        future.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # its loop is closed: nobody waits any more
        return
