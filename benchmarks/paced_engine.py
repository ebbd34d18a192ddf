"""An engine of fake speed, for `remote_engines.py`: it computes nothing, and ends each response
when so many steps of a fixed length would have generated it."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
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


class PacedEngine:
    """Meets what of `Engine` a process of it needs. All its samples advance together."""

    def __init__(self, step_s: float, returned: int | None = None) -> None:
        """Of each response at most `returned` tokens are returned; None: all of them."""
        self._step_s, self._returned = step_s, returned
        self._changed = threading.Condition()
        self._heap: list[tuple[float, SampleId]] = []
        self._requests: dict[SampleId, GenerationRequest] = {}
        self._num_tokens = 0

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        threading.Thread(target=self._work, args=(listener,), daemon=True).start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        now = time.monotonic()
        with self._changed:
            for request in requests:
                self._requests[request.sample] = request
                end = now + request.sampling.max_response_tokens * self._step_s
                heapq.heappush(self._heap, (end, request.sample))
            self._changed.notify()

    def abort(self, samples: Sequence[SampleId]) -> None:
        with self._changed:
            for sample in samples:
                if sample in self._requests:
                    heapq.heappush(self._heap, (0.0, sample))
            self._changed.notify()

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """It keeps nothing."""

    async def update_weights(self, version: int, weights: Any = None) -> None:
        pass

    async def close(self) -> None:
        raise AssertionError("its process is ended instead")

    def weight_probe(self) -> str:
        return ""

    def status(self) -> EngineStatus:
        return EngineStatus(
            num_running=len(self._requests),
            num_waiting=0,
            version=0,
            generated_tokens=self._num_tokens,
            decode_steps=0,
        )

    def _work(self, listener: Listener) -> None:
        while True:
            with self._changed:
                while not self._heap or self._heap[0][0] > time.monotonic():
                    due_s = self._heap[0][0] - time.monotonic() if self._heap else None
                    self._changed.wait(due_s)
                outputs = []
                while self._heap and self._heap[0][0] <= time.monotonic():
                    end, sample = heapq.heappop(self._heap)
                    request = self._requests.pop(sample, None)
                    if request is not None:
                        outputs.append(self._ended(request, is_aborted=end == 0.0))
            if outputs:
                listener(outputs)

    def _ended(self, request: GenerationRequest, *, is_aborted: bool) -> EngineOutput:
        count = request.sampling.max_response_tokens
        self._num_tokens += count
        if is_aborted:
            return EngineOutput(SampleAborted(time_s=0.0, sample=request.sample, num_tokens=0))
        event = SampleGenerated(
            time_s=0.0, sample=request.sample, num_tokens=count, finish_reason="length", version=0
        )
        response = Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(range(count))[: self._returned],
            log_probs=((-0.5,) * count)[: self._returned],
            finish_reason="length",
            version=0,
        )
        return EngineOutput(event, response)


def make(*, config: EngineConfig, step_s: float, returned: int | None = None) -> PacedEngine:
    """For `EngineSetup.make`."""
    return PacedEngine(step_s, returned)
