"""An engine that says what it is told to, in tokens that no tokenizer would choose; and a policy
served from it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.engines.engine import EngineOutput, GenerationRequest, Response, SamplingParams
from rollpacker.serving.endpoint import Endpoint
from rollpacker.serving.policy import EnginePolicy
from rollpacker.serving.sessions import Sessions

TOKEN = "a-token"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "town %d"}}\n</tool_call>'


def search_or_say(request: GenerationRequest) -> str:
    """A call at odd turns, words at even ones."""
    number = sum(request.prompt_tokens) % 100
    return CALL % number if request.turn % 2 else f"hello world {number}"


class ScriptedEngine:
    """Answers after `seconds`. Not all of `Engine`: what serving needs."""

    def __init__(
        self,
        template: DialogueTemplate,
        say: Callable[[GenerationRequest], str] = search_or_say,
        seconds: float = 0.0,
    ) -> None:
        self._template, self._say, self._seconds = template, say, seconds
        self.answered: list[tuple[GenerationRequest, Response]] = []
        self.aborted: list[SampleId] = []
        self.most_at_once = 0
        """Requests that waited for their answers."""
        self._num_waiting = 0
        self._gone: set[SampleId] = set()
        self._kept: dict[str, tuple[int, ...]] = {}

    def start(self, listener: Any, on_error: Any) -> None:
        self._listener, self.die = listener, on_error

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._num_waiting += len(requests)
        self.most_at_once = max(self.most_at_once, self._num_waiting)
        asyncio.get_running_loop().call_later(self._seconds, self._answer, requests)

    def abort(self, samples: Sequence[SampleId]) -> None:
        self.aborted += samples
        self._gone.update(samples)

    async def close(self) -> None:
        return

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Of the text in pieces, each by itself, so that nobody gets them by encoding the whole."""
        if text not in self._kept:
            cut = random.Random(text).randrange(1, len(text))
            parts = [self._template.canonical(part) for part in (text[:cut], text[cut:])]
            self._kept[text] = (*parts[0], *parts[1])
        return self._kept[text]

    def _answer(self, requests: Sequence[GenerationRequest]) -> None:
        outputs = []
        self._num_waiting -= len(requests)
        for request in requests:
            if request.sample in self._gone:
                gone = SampleAborted(time_s=0.0, sample=request.sample, num_tokens=0)
                outputs.append(EngineOutput(gone))
                continue
            end = self._template.end_of_turn
            assert end is not None
            drawn = (*self._tokens(self._say(request)), end)
            most = request.sampling.max_response_tokens
            reason = "stop" if len(drawn) <= most else "length"
            drawn = drawn[:most]
            response = Response(
                sample=request.sample,
                prompt_tokens=request.prompt_tokens,
                tokens=drawn,
                log_probs=tuple(-token / 1024 for token in drawn),
                finish_reason=reason,
                version=3,
            )
            self.answered.append((request, response))
            event = SampleGenerated(
                time_s=0.0,
                sample=request.sample,
                num_tokens=len(drawn),
                finish_reason=reason,
                version=3,
            )
            outputs.append(EngineOutput(event, response))
        self._listener(outputs)


@asynccontextmanager
async def served(
    template: DialogueTemplate,
    engine: ScriptedEngine,
    record: Path | None = None,
    max_context_tokens: int = 4096,
) -> AsyncIterator[str]:
    """The base URL of an endpoint in this loop."""
    sessions = Sessions(TemplateDialogue(template), record=record)
    endpoint = Endpoint(
        EnginePolicy(engine, lambda error: None).draw,  # type: ignore[arg-type]
        sessions,
        name="policy",
        token=TOKEN,
        sampling=SamplingParams(max_response_tokens=256),
        max_context_tokens=max_context_tokens,
        text_of=lambda tokens: str(template.tokenizer.decode(list(tokens))),
    )
    server = endpoint.server()
    port = await server.open()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await server.close()
        sessions.close()
