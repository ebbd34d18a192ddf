"""An engine in a process of its own, which lives no longer than this one.

    ProcessEngine --Work, Call--> engine_worker.py: EngineHost --> any engine
                  <-Report, Answer-

One event loop for the connections to all processes (`workers/loop.py`) carries requests, aborts and
calls to the process, and its reports to the listener. A report comes every `beat_s` seconds
at the latest, so that silence means that the process is stopped or gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
    COMPARE,
    OFFLOAD,
    RELOAD,
    UPDATE_WEIGHTS,
    WEIGHT_PROBE,
    Answer,
    Call,
    EngineSetup,
    Report,
    Work,
    codec,
)
from rollpacker.weights.buffer import StaleWeightsError, WeightSource
from rollpacker.weights.delivery import Delivery
from rollpacker.workers.host import Host, Process, ThisHost
from rollpacker.workers.kinds import BEAT, CALL
from rollpacker.workers.loop import LoopUse
from rollpacker.workers.served import HEARTBEAT_S, START_S, Loss, ProcessLost, Served

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

PROGRAM = "rollpacker.engines.engine_worker"
MAX_BEAT_S = 1.0
"""Longest time between two reports of an engine, in seconds. Each costs this process time."""
CLOSE_S = 5.0
"""Seconds that `close` waits at most for the shared event loop to end process and connection."""
HERE = ThisHost()


class EngineRefusedError(EngineError, ValueError):
    """The engine cannot be made; the message says why and what the user can do."""


class ProcessEngine:
    """An `Engine` whose work is done by another process.

    The process loads the engine after this object is made: `ready` waits for that, and what is
    submitted before waits in this process. If the process ends, is stopped, or does not answer for
    `heartbeat_s`, `on_error` is called once with an `EngineError` that says how it ended; the
    process is killed and no more outputs are reported.

    An abort takes effect at the process's next decode step after it arrives: two runs of the same
    seed may differ in which samples were aborted at which length, and so in the order in which
    samples end. The tokens of a sample do not differ.
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
        """Starts the process on `host`, with `environment` beside the variables that processes have
        there. The process must make its engine in `start_s` seconds, and is lost if then silent for
        `heartbeat_s`. `name`: for logs. Raises `OSError` if the process cannot be started, and
        `TypeError` for a setup that cannot be sent."""
        self.name = name
        self._inbox = Inbox()
        self._prompts: dict[SampleId, tuple[int, ...]] = {}
        self._status = EngineStatus(
            num_running=0, num_waiting=0, version=0, generated_tokens=0, decode_steps=0
        )
        self._ready: Future[None] = Future()
        self._gone: Future[None] = Future()
        """Future that is done when the process has ended and its connection is closed."""
        self._burying: asyncio.Task[None] | None = None
        self._is_heard = self._is_over = False
        setup = replace(setup, beat_s=min(MAX_BEAT_S, heartbeat_s / 5))
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

    # -- the protocol ----------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until the engine is made. Raises `EngineError` if that fails: `EngineRefusedError`
        if the user can do something about it."""
        await asyncio.shield(asyncio.wrap_future(self._ready))

    def start(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        """Report outputs and errors to these functions from now on; see `Engine.start`. Called
        again while no samples run, it replaces the functions."""
        self._inbox.tell(listener, on_error)
        self._is_heard = True
        self._wake()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; see `Engine.submit`."""
        self._inbox.submit(requests)
        self._wake()

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Stop samples; see `Engine.abort`."""
        self._inbox.abort(samples)
        self._wake()

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Allow the engine to drop the keys and values kept of samples; see `Engine.let_go`."""
        self._inbox.let_go(samples)
        self._wake()

    async def update_weights(
        self, version: int, weights: Mapping[str, Tensor] | WeightSource | Delivery | None = None
    ) -> None:
        """Generate with new weights; see `Engine.update_weights`. Tensors are not sent: `weights`
        must be a `WeightSource`, a `Delivery` or None."""
        delivery = weights if isinstance(weights, Delivery) else None
        if delivery is not None:
            weights = None
        elif weights is not None and not isinstance(weights, WeightSource):
            raise EngineError("an engine in a process reads its weights from a source")
        self._inbox.begin_weights(version)
        if weights is not None:
            try:
                weights = await asyncio.to_thread(self._host.weights, weights)
            except (OSError, ValueError, StaleWeightsError) as error:
                raise EngineError(f"weights did not get to {self._host.name}: {error}") from error
        await asyncio.wrap_future(self._ask(Call(UPDATE_WEIGHTS, version, weights, delivery)))
        self._inbox.end_weights()

    async def offload(self) -> None:
        """Free the device's memory; see `Engine.offload`."""
        self._inbox.leave()
        await asyncio.wrap_future(self._ask(Call(OFFLOAD)))

    async def reload(self) -> None:
        """Take the device's memory again; see `Engine.reload`."""
        await asyncio.wrap_future(self._ask(Call(RELOAD)))
        self._inbox.come_back()

    def weight_probe(self) -> str:
        """Return a hash of the weights; see `Engine.weight_probe`."""
        self._inbox.check_here()
        probe = self._ask(Call(WEIGHT_PROBE)).result()
        assert probe is not None
        return probe

    def compare(self, text: Sequence[int], log_probs: Sequence[float]) -> None:
        """Compare log-probs of a text with the trainer's; see `Engine.compare`."""
        self._inbox.check_here()
        self._ask(Call(COMPARE, text=tuple(text), log_probs=tuple(log_probs))).result()

    def status(self) -> EngineStatus:
        """Return counts of samples, tokens and steps; see `Engine.status`. They are those of the
        process's last report, except for the numbers of samples, which are counted here."""
        self._inbox.check_open()
        num_in_flight = self._inbox.num_in_flight
        num_running = min(self._status.num_running, num_in_flight)
        return replace(
            self._status, num_running=num_running, num_waiting=num_in_flight - num_running
        )

    async def close(self) -> None:
        """End the process, whatever it is doing; see `Engine.close`."""
        self._inbox.close()
        self._use.soon(self._end, EngineError("the engine is closed"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self._gone), CLOSE_S)
        await asyncio.to_thread(self._served.close)
        await asyncio.to_thread(self._use.end)

    def _ask(self, call: Call) -> Future[str | None]:
        """Have the engine's process make this call after those before it. Returns a future of the
        answer's result, from any thread. Raises `EngineError`, as the future does."""
        self._inbox.check_open()  # a closed engine's loop may have ended
        return asyncio.run_coroutine_threadsafe(self._answer_to(call), self._use.loop)

    def _wake(self) -> None:
        self._use.soon(self._send)

    # -- in the loop of all lines ----------------------------------------------------------

    async def _answer_to(self, call: Call) -> str | None:
        try:
            answer: Answer = await self._served.call(codec().encode(call))
        except ProcessLost as lost:
            raise EngineError(str(lost)) from None
        if answer.error is not None:
            raise EngineError(answer.error)
        return answer.result

    def _send(self) -> None:
        """Send the process what was submitted and aborted since the last time, once the process is
        ready and there is a listener."""
        if self._is_over or not self._ready.done() or not self._is_heard:
            return
        try:
            let_go = tuple(self._inbox.take_let_go())
            entries, aborts = self._inbox.take()
            requests = tuple(entry.request for entry in entries)
            self._prompts.update((one.sample, one.prompt_tokens) for one in requests)
            if requests or aborts or let_go:
                self._served.post(CALL, 0, Work(requests, tuple(sorted(aborts)), let_go))
        except Exception as error:  # a request that is none
            logger.exception("%s could not be told what to do", self.name)
            self._served.lose(error=error)

    def on_ready(self, said: Any) -> None:
        """Note that the process has made its engine; see `Owner.on_ready`."""
        self._ready.set_result(None)
        self._send()

    def on_message(self, kind: int, number: int, said: Any) -> None:
        """Take the status from a report of the process, and give its outputs to the listener. Other
        kinds of messages are ignored. See `Owner.on_message`."""
        if kind == BEAT:
            self._report(said)

    def on_hang_up(self) -> None:
        """Do nothing when the process closes its connection; see `Owner.on_hang_up`."""

    def _report(self, report: Report) -> None:
        self._status = report.status
        outputs = self._outputs(report)
        if outputs:
            _, listener = self._inbox.end(output.event.sample for output in outputs)
            listener(outputs)

    def _outputs(self, report: Report) -> list[EngineOutput]:
        """A report's outputs as a listener gets them. Those of samples not in flight are logged."""
        found = []
        for event, response in report.outputs:
            prompt = self._prompts.pop(event.sample, None)
            if prompt is None:
                logger.error("%s reported %s, which it does not have", self.name, event.sample)
                continue
            whole = None if response is None else response.unpacked(event.sample, prompt)
            found.append(EngineOutput(event, whole))
        return found

    # -- how it ends -----------------------------------------------------------------------

    def on_lost(self, loss: Loss) -> None:
        """Report the loss of the process to `on_error`, and clean up; see `Owner.on_lost`."""
        error = loss.error or EngineError(str(loss))
        if loss.is_refused:
            error = EngineRefusedError(loss.said)
        on_error = self._inbox.die(error)
        self._end(error)
        on_error(error)

    def _end(self, error: Exception) -> None:
        """End the process, if it is not ended yet. A caller that waits in `ready` gets `error`."""
        if self._is_over:
            return
        self._is_over = True
        if not self._ready.done():
            self._ready.set_exception(error)
        self._burying = self._use.loop.create_task(self._bury())

    async def _bury(self) -> None:
        await self._served.gone()
        self._gone.set_result(None)
