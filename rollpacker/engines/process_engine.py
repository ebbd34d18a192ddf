"""An engine in a process of its own, which lives no longer than this one.

    ProcessEngine --Exchange--> engine_worker.py: EngineHost --> any engine
                  <--Report---

The loop of all lines (`workers/loop.py`) carries what is submitted, aborted and called to the
process, and what that reports to the listener. There is always an exchange to be answered, so that
silence means that the process is stopped or gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import (
    EngineError,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    Listener,
)
from rollpacker.engines.inbox import Inbox
from rollpacker.engines.messages import (
    OFFLOAD,
    RELOAD,
    UPDATE_WEIGHTS,
    WEIGHT_PROBE,
    Call,
    EngineSetup,
    Exchange,
    PackedOutput,
    Report,
    codec,
)
from rollpacker.weights.buffer import StaleWeightsError, WeightSource
from rollpacker.workers.host import Host, Process, ThisHost
from rollpacker.workers.kinds import ANSWER, CALL
from rollpacker.workers.loop import LoopUse
from rollpacker.workers.served import HEARTBEAT_S, START_S, Loss, Served

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

PROGRAM = "rollpacker.engines.engine_worker"
MAX_WAIT_S = 1.0
"""Without news an engine reports so often: the shorter, the more all of them cost this process."""
CLOSE_S = 5.0
"""How long closing waits for the loop of all lines, which somebody may hold up."""
HERE = ThisHost()


class EngineRefusedError(EngineError, ValueError):
    """The engine cannot be made; the message says why and what to do."""


class ProcessEngine:
    """An `Engine` whose work is done by another process.

    It is loaded meanwhile: `ready` waits for it, and what is submitted before waits there. If the
    process ends, is stopped, or does not answer for `heartbeat_s`, `on_error` is called once with
    an `EngineError` that says how it ended; the process is killed, and nothing more is heard of it.

    An abort takes effect at the process's next decode step, whenever it gets there: two runs of
    the same seed may differ in which samples were aborted at which length, and so in the order in
    which samples end. The tokens of a sample do not.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        name: str = "engine",
        heartbeat_s: float = HEARTBEAT_S,
        start_s: float = START_S,
        environment: Mapping[str, str] | None = None,
        host: Host = HERE,
    ) -> None:
        """Starts the process, on `host`. `environment` is added to what processes there have.
        Raises `OSError`, and `TypeError` for a setup that cannot be sent."""
        self.name = name
        self._inbox = Inbox()
        self._prompts: dict[SampleId, tuple[int, ...]] = {}
        self._exchanges = _Exchanges(min(MAX_WAIT_S, heartbeat_s / 5))
        self._status = EngineStatus(
            num_running=0, num_waiting=0, version=0, generated_tokens=0, decode_steps=0
        )
        self._ready: Future[None] = Future()
        self._gone: Future[None] = Future()
        """Done when the process has ended and nothing is held of it."""
        self._burying: asyncio.Task[None] | None = None
        self._is_heard = self._is_over = False
        told = codec().encode(setup)  # here: in the loop, nobody would hear that it cannot be
        self._host = host
        self._use = LoopUse()
        try:
            self._served = Served(
                self._use,
                host,
                PROGRAM,
                name,
                codec=codec(),
                owner=self,
                heartbeat_s=heartbeat_s,
                start_s=start_s,
                environment=environment,
            )
        except BaseException:
            self._use.end()
            raise
        self._served.begin(told)

    @property
    def child(self) -> Process:
        return self._served.child

    @property
    def last_answer_s(self) -> float:
        """When the process was last heard of, on the monotonic clock."""
        return self._served.heard_s

    # -- the protocol ----------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until the engine is made. Raises `EngineError` if that fails, `EngineRefusedError`
        if it is for the user to mend."""
        await asyncio.shield(asyncio.wrap_future(self._ready))

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        """See `Engine`. Called again while nothing runs, it replaces the listener."""
        self._inbox.tell(listener, on_error)
        self._is_heard = True
        self._wake()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `Engine`."""
        self._inbox.submit(requests)
        self._wake()

    def abort(self, samples: Sequence[SampleId]) -> None:
        """See `Engine`."""
        self._inbox.abort(samples)
        self._wake()

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """See `Engine`."""
        self._inbox.let_go(samples)
        self._wake()

    async def update_weights(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | None = None
    ) -> None:
        """See `Engine`. Tensors do not travel: it takes a source, or nothing."""
        if weights is not None and not isinstance(weights, WeightSource):
            raise EngineError("an engine in a process reads its weights from a source")
        self._inbox.begin_weights(version)
        if weights is not None:
            try:
                weights = await asyncio.to_thread(self._host.weights, weights)
            except (OSError, ValueError, StaleWeightsError) as error:
                raise EngineError(f"weights did not get to {self._host.name}: {error}") from error
        call = self._exchanges.call(UPDATE_WEIGHTS, version, weights)
        self._wake()
        await asyncio.wrap_future(call)
        self._inbox.end_weights()

    async def offload(self) -> None:
        """See `Engine`."""
        self._inbox.leave()
        await self._do(OFFLOAD)

    async def reload(self) -> None:
        """See `Engine`."""
        await self._do(RELOAD)
        self._inbox.come_back()

    async def _do(self, name: str) -> None:
        call = self._exchanges.call(name)
        self._wake()
        await asyncio.wrap_future(call)

    def weight_probe(self) -> str:
        """See `Engine`."""
        self._inbox.check_here()
        call = self._exchanges.call(WEIGHT_PROBE)
        self._wake()
        probe = call.result()
        assert probe is not None
        return probe

    def status(self) -> EngineStatus:
        """See `Engine`. As the process last said, but for the number of samples."""
        self._inbox.check_open()
        num_in_flight = self._inbox.num_in_flight
        num_running = min(self._status.num_running, num_in_flight)
        return replace(
            self._status, num_running=num_running, num_waiting=num_in_flight - num_running
        )

    async def close(self) -> None:
        """See `Engine`. Ends the process, whatever it is doing."""
        self._inbox.close()
        self._use.soon(self._end, EngineError("the engine is closed"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._gone), CLOSE_S)
        await asyncio.to_thread(self._served.close)
        await asyncio.to_thread(self._use.end)

    def _wake(self) -> None:
        self._use.soon(self._send)

    # -- in the loop of all lines ----------------------------------------------------------

    def _send(self) -> None:
        """Give the process what is new; if nothing is, something to answer."""
        if self._is_over or not self._ready.done():
            return
        try:
            self._say()
        except Exception as error:  # a request that is none
            logger.exception("%s could not be told what to do", self.name)
            self._served.lose(error=error)

    def _say(self) -> None:
        let_go = tuple(self._inbox.take_let_go()) if self._is_heard else ()
        entries, aborts = self._inbox.take() if self._is_heard else ([], set())
        requests = tuple(entry.request for entry in entries)
        self._prompts.update((request.sample, request.prompt_tokens) for request in requests)
        exchange = self._exchanges.next(requests, tuple(sorted(aborts)), let_go)
        if exchange is not None:
            self._served.post(CALL, exchange.sequence, exchange)

    def on_ready(self, said: Any) -> None:
        """See `Owner`."""
        self._ready.set_result(None)
        self._send()

    def on_message(self, kind: int, number: int, said: Any) -> None:
        """See `Owner`."""
        assert kind == ANSWER, kind
        self._report(said)

    def on_hang_up(self) -> None:
        """See `Owner`."""

    def _report(self, report: Report) -> None:
        self._status = report.status
        outputs = self._outputs(report)
        if outputs:
            _, listener = self._inbox.end(output.event.sample for output in outputs)
            listener(outputs)
        self._send()

    def _outputs(self, report: Report) -> list[EngineOutput]:
        """What is new in it, of samples that are there."""
        found = []
        for event, response in self._exchanges.take(report):
            prompt = self._prompts.pop(event.sample, None)
            if prompt is None:
                logger.error("%s reported %s, which it does not have", self.name, event.sample)
                continue
            whole = None if response is None else response.unpacked(event.sample, prompt)
            found.append(EngineOutput(event, whole))
        return found

    # -- how it ends -----------------------------------------------------------------------

    def on_lost(self, loss: Loss) -> None:
        """See `Owner`."""
        error = loss.error or EngineError(str(loss))
        if loss.is_refused:
            error = EngineRefusedError(loss.said)
        on_error = self._inbox.die(error)
        self._end(error)
        on_error(error)

    def _end(self, error: Exception) -> None:
        """Have the process ended, once; who waits for an answer gets `error`."""
        if self._is_over:
            return
        self._is_over = True
        self._exchanges.give_up(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        self._burying = self._use.loop.create_task(self._bury())

    async def _bury(self) -> None:
        await self._served.gone()
        self._gone.set_result(None)
        self._use.end()


class _Exchanges:
    """What was said to an engine's process, what it has answered, and what it owes."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._sequence = 0
        self._answered = 0
        self._acknowledged = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[str | None], dict[str, Any]]] = deque()
        """Calls to make."""
        self._calling: Future[str | None] | None = None
        self._num_calls = 0
        self._error: Exception | None = None

    def call(
        self, name: str, version: int = 0, source: WeightSource | None = None
    ) -> Future[str | None]:
        """From any thread. The answer; it raises `EngineError`."""
        future: Future[str | None] = Future()
        with self._lock:
            self._waiting.append((future, {"name": name, "version": version, "source": source}))
        if self._error is not None:
            self.give_up(self._error)
        return future

    def give_up(self, error: Exception) -> None:
        """From any thread. There will be no answers any more."""
        self._error = error
        with self._lock:
            owed = [future for future, _ in self._waiting]
            self._waiting.clear()
            if self._calling is not None:
                owed.append(self._calling)
            self._calling = None
        for future in owed:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def next(
        self,
        requests: tuple[GenerationRequest, ...],
        aborts: tuple[SampleId, ...],
        let_go: tuple[SampleId, ...] = (),
    ) -> Exchange | None:
        """What to say now; None if nothing is new and an answer is owed."""
        call = self._next_call()
        is_news = bool(requests or aborts or let_go or call)
        if not is_news and self._sequence > self._answered:
            return None
        self._sequence += 1
        return Exchange(
            sequence=self._sequence,
            acknowledged=self._acknowledged,
            requests=requests,
            aborts=aborts,
            let_go=let_go,
            call=call,
            wait_s=self._until_all_answer(),
        )

    def _until_all_answer(self) -> float:
        """Idle engines answer at the same moments: from another host, in one call."""
        return self._wait_s - time.monotonic() % self._wait_s

    def _next_call(self) -> Call | None:
        with self._lock:
            if self._calling is not None or not self._waiting:
                return None
            self._calling, arguments = self._waiting.popleft()
            self._num_calls += 1
            return Call(number=self._num_calls, **arguments)

    def take(self, report: Report) -> Sequence[PackedOutput]:
        """Settle what the report answers, and return the outputs that were not in an earlier one,
        as they are in a report."""
        self._answered = max(self._answered, report.sequence)
        answer = report.answer
        if answer is not None and answer.number == self._num_calls:
            with self._lock:
                future, self._calling = self._calling, None
            if future is not None and future.set_running_or_notify_cancel():
                if answer.error is None:
                    future.set_result(answer.result)
                else:
                    future.set_exception(EngineError(answer.error))
        num_known = self._acknowledged + 1 - report.first
        assert num_known >= 0, f"output {self._acknowledged + 1} is missing"
        fresh = report.outputs[num_known:]
        self._acknowledged += len(fresh)
        return fresh
