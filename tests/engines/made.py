"""Engines that processes of the tests make (`EngineSetup.make`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import (
    EngineConfig,
    EngineError,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Listener,
    Response,
)


class CountingEngine:
    """Meets `Engine`. The tokens of a response are 0, 1, 2 ..., one for each sample a step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._lock = threading.Condition()
        self._requests: dict[SampleId, GenerationRequest] = {}
        self._counts: dict[SampleId, int] = {}
        self._aborted: list[SampleId] = []
        self._version = 0
        self._num_steps = self._num_tokens = self._num_away = 0

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        threading.Thread(target=self._work, args=(listener, on_error), daemon=True).start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._lock:
            for request in requests:
                if request.sample in self._requests:
                    raise EngineError(f"{request.sample} is here already")
                self._requests[request.sample] = request
                self._counts[request.sample] = 0
            self._lock.notify()

    def abort(self, samples: Sequence[SampleId]) -> None:
        with self._lock:
            self._aborted += [sample for sample in samples if sample in self._requests]

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """It keeps nothing."""

    async def update_weights(self, version: int, weights: Any = None) -> None:
        if version < 0:
            raise EngineError("no version is below 0")
        time.sleep(version / 1000)
        self._version = version

    async def offload(self) -> None:
        self._num_away += 1

    async def reload(self) -> None:
        if self._num_away > 1:
            raise EngineError("no memory is left")

    def weight_probe(self) -> str:
        return f"of version {self._version}"

    def status(self) -> EngineStatus:
        return EngineStatus(
            num_running=len(self._requests),
            num_waiting=0,
            version=self._version,
            generated_tokens=self._num_tokens,
            decode_steps=self._num_steps,
        )

    async def close(self) -> None:
        raise AssertionError("its process is ended instead")

    def _work(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._requests)
                    outputs = self._step()
                if outputs:
                    listener(outputs)
                time.sleep(self._step_s)
        except BaseException as error:
            on_error(error)

    def _step(self) -> list[EngineOutput]:
        outputs = []
        for sample in self._aborted:
            if self._requests.pop(sample, None):
                count = self._counts.pop(sample)
                event = SampleAborted(time_s=0.0, sample=sample, num_tokens=count)
                outputs.append(EngineOutput(event))
        self._aborted.clear()
        self._num_steps += 1
        for sample, request in list(self._requests.items()):
            if request.prompt_tokens == (13,):
                raise RuntimeError("13 is no good")
            if request.prompt_tokens == (14,):
                os._exit(7)
            self._counts[sample] += 1
            self._num_tokens += 1
            if self._counts[sample] >= request.sampling.max_response_tokens:
                outputs.append(self._finish(self._requests.pop(sample)))
        return outputs

    def _finish(self, request: GenerationRequest) -> EngineOutput:
        count = self._counts.pop(request.sample)
        response = Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(range(count)),
            log_probs=tuple(-0.1 * token for token in range(count)),
            finish_reason="length",
            version=self._version,
        )
        event = SampleGenerated(
            time_s=0.0,
            sample=request.sample,
            num_tokens=count,
            finish_reason="length",
            version=self._version,
        )
        return EngineOutput(event, response)


def counting(*, config: EngineConfig, step_s: float = 0.001) -> CountingEngine:
    return CountingEngine(step_s)


def refused(*, config: EngineConfig) -> CountingEngine:
    raise ValueError("there is no such model: name another")


def broken(*, config: EngineConfig) -> CountingEngine:
    raise ZeroDivisionError("a bug")


def slow(*, config: EngineConfig) -> CountingEngine:
    time.sleep(60)
    return CountingEngine(0.0)
