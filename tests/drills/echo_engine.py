"""A made-up engine: every response repeats its prompt's tokens, backwards, a token a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import (
    EngineConfig,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Listener,
    Response,
)


class EchoEngine:
    """Meets `Engine`."""

    def __init__(self, *, model: Any, tokenizer: Any, config: EngineConfig) -> None:
        self._version = 0
        self._tokens = 0
        self._requests: dict[SampleId, GenerationRequest] = {}
        self._aborted: list[SampleId] = []
        self._closed = False
        self._lock = threading.Condition()
        self._listener: Listener | None = None

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        first, self._listener = self._listener is None, listener
        if first:
            threading.Thread(target=self._work, args=(on_error,), daemon=True).start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._lock:
            self._requests |= {request.sample: request for request in requests}
            self._lock.notify()

    def abort(self, samples: Sequence[SampleId]) -> None:
        with self._lock:
            self._aborted += [sample for sample in samples if sample in self._requests]
            self._lock.notify()

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """It keeps nothing."""

    async def update_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        self._version = version

    def weight_probe(self) -> str:
        return "of the trainer's own tensors"

    def status(self) -> EngineStatus:
        return EngineStatus(
            num_running=len(self._requests),
            num_waiting=0,
            version=self._version,
            generated_tokens=self._tokens,
            decode_steps=self._tokens,
        )

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()

    def _work(self, on_error: Callable[[BaseException], None]) -> None:
        try:
            while not self._closed:
                with self._lock:
                    self._lock.wait_for(lambda: self._requests or self._closed)
                    outputs = self._step()
                if outputs and self._listener is not None:
                    self._listener(outputs)
        except BaseException as error:
            on_error(error)

    def _step(self) -> list[EngineOutput]:
        aborted, self._aborted = self._aborted, []
        if aborted:
            gone = [sample for sample in aborted if self._requests.pop(sample, None)]
            return [EngineOutput(SampleAborted(time_s=0.0, sample=s, num_tokens=0)) for s in gone]
        if not self._requests:
            return []
        sample = next(iter(self._requests))
        return [self._echo(self._requests.pop(sample))]

    def _echo(self, request: GenerationRequest) -> EngineOutput:
        most = request.sampling.max_response_tokens
        tokens = tuple(reversed(request.prompt_tokens))[:most]
        self._tokens += len(tokens)
        response = Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tokens,
            log_probs=(-1.0,) * len(tokens),
            finish_reason="stop",
            version=self._version,
        )
        event = SampleGenerated(
            time_s=0.0,
            sample=request.sample,
            num_tokens=len(tokens),
            finish_reason="stop",
            version=self._version,
        )
        return EngineOutput(event, response)
