"""The owner's side of a process that runs another program: starts, watches and calls it.

    Served -- SETUP, CALL ... --> the program (program.py)
           <- READY, ANSWER ... -

The owner is told once that the process is ready, and once that it is lost: it ended, refused, was
not ready in time, was silent for too long, or sent what the owner cannot handle. A lost process is
ended at once, and not replaced; the owner may start another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollpacker.workers.child import BY_SIGNAL
from rollpacker.workers.frames import Message
from rollpacker.workers.host import Host
from rollpacker.workers.kinds import ANSWER, CALL, CANCEL, FAILED, HELLO, READY, REFUSED, SETUP
from rollpacker.workers.loop import LoopUse

logger = logging.getLogger(__name__)

START_S = 600.0
"""Seconds within which a started process must report that it is ready."""
HEARTBEAT_S = 5.0
"""Default for the seconds without a message after which a process counts as lost."""
ENDED_S = 0.4
"""Seconds for which the end of a process is awaited once it has closed its line (socket)."""
_HELD_S = 1.0
"""If a check comes this many seconds late, this process itself was held up. It cannot have received
messages meanwhile, so it does not count the other's silence."""


class Codec(Protocol):
    """Encodes the contents of messages between processes as bytes, and decodes them."""

    def encode(self, value: Any) -> bytes: ...

    def decode(self, data: bytes) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The reason why a process was lost: ended, refused, silent or not ready in time."""

    process: str
    """Name and process id of the lost process, as one text."""
    what: str = ""
    """What the process did: "was not ready within 5 s". Empty if `said` gives the reason."""
    said: str = ""
    """The reason in a message of the process itself. Empty if it sent none."""
    is_refused: bool = False
    """Whether a user's mistake kept the process from making what it was told to make."""
    error: Exception | None = None
    """The error that this side raised while it handled a message of the process; None: none."""

    @property
    def reason(self) -> str:
        """The reason for the loss, in a sentence that does not name the process."""
        return self.said or f"it {self.what}"

    def __str__(self) -> str:
        return f"{self.process}: {self.said}" if self.said else f"{self.process} {self.what}"


class ProcessLost(Exception):
    """Raised in place of an answer if the called process is lost; the message tells why."""


class Owner(Protocol):
    """The side that owns a process and is told about it. All methods are called in the loop."""

    def on_ready(self, said: Any) -> None:
        """Called when the process has made what it was told to. `said`: its message or None."""
        ...

    def on_message(self, kind: int, number: int, said: Any) -> None:
        """Called for a message of content `said` that answers no call of `Served.call`."""
        ...

    def on_hang_up(self) -> None:
        """Called when the process has hung up; `on_lost` follows once it is known how it ended."""
        ...

    def on_lost(self, loss: Loss) -> None:
        """Called when the process is lost. It was told to end, and is not heard any more."""
        ...


class Served:
    """One process that runs a program for its owner, from its start to its end. After `begin`, all
    methods but `close` have to be called in the event loop of `use`."""

    def __init__(
        self,
        use: LoopUse,
        place: Host,
        program: str,
        name: str,
        *,
        codec: Codec,
        owner: Owner,
        heartbeat_s: float = HEARTBEAT_S,
        start_s: float = START_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the module `program` as a process on the host `place`. `start_s`: seconds within
        which it must be ready. No method of `owner` is called before `begin`. Raises `OSError`."""
        self.name = name
        self.is_ready = False
        self.heard_s = time.monotonic()
        """The `time.monotonic` when the process was last heard; its silence counts from there."""
        self._use, self._codec, self._owner = use, codec, owner
        self._heartbeat_s, self._start_s = heartbeat_s, start_s
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        """Timer that ends the wait for the process to be ready. None before `begin`."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self.child, self._line = place.start(
            program, name, guarded=True, environment=environment or {}
        )

    def begin(self, setup: bytes) -> None:
        """Send the process its setup (what it is to make), and listen to it. May be called in any
        thread."""
        self._use.soon(self._begin, setup)

    def _begin(self, setup: bytes) -> None:
        if self._is_over:
            return
        self._line.attach(self._use.loop, self._heard, self._hung_up)
        self._line.post(SETUP, payload=setup)
        self._timer = self._use.loop.call_later(self._start_s, self._must_be_ready)
        self._look(time.monotonic())

    # -- what is said ----------------------------------------------------------------------

    def post(self, kind: int, number: int, value: Any) -> None:
        """Send a message (`Line.send`). Raises `TypeError` if `value` cannot be encoded."""
        self._line.post(kind, number, self._codec.encode(value))

    async def call(self, payload: bytes) -> Any:
        """Call the process with encoded content, and return its answer. Raises `ProcessLost`. If
        this is cancelled, the process is told so."""
        if self._is_over:
            raise ProcessLost(f"{self.child} is gone")
        self._num_calls += 1
        number = self._num_calls
        future: asyncio.Future[Any] = self._use.loop.create_future()
        self._calls[number] = future
        self._line.post(CALL, number, payload)
        try:
            return await future
        except asyncio.CancelledError:
            self._line.post(CANCEL, number)
            raise
        finally:
            self._calls.pop(number, None)

    def _heard(self, message: Message) -> None:
        if self._is_over:
            return
        self.heard_s = time.monotonic()
        try:
            self._obey(message)
        except Exception as error:  # of the owner, or in the bytes
            logger.exception("what %s said could not be taken in", self.name)
            self.lose(error=error)
        self.heard_s = time.monotonic()  # it could not be heard meanwhile

    def _obey(self, message: Message) -> None:
        kind, number, payload = message
        if kind == HELLO:
            self.child.pid = int(payload)
            return
        said = self._codec.decode(payload) if payload else None
        if kind == ANSWER and number in self._calls:
            if not self._calls[number].done():
                self._calls[number].set_result(said)
        elif kind == READY:
            self.is_ready = True
            self._stop_timer()
            self._owner.on_ready(said)
        elif kind in (REFUSED, FAILED):
            self.lose(said=str(said), is_refused=kind == REFUSED)
        else:
            self._owner.on_message(kind, number, said)

    # -- how it is lost --------------------------------------------------------------------

    def _look(self, looked_s: float) -> None:
        """Check again and again if the process is silent. `looked_s`: time of the last check."""
        if self._is_over:
            return
        now, every_s = time.monotonic(), self._heartbeat_s / 10
        was_held = now - looked_s > 2 * every_s + _HELD_S
        loads = not self.is_ready and not self.child.is_stopped()
        if loads or was_held or self.child.is_cut_off():
            self.heard_s = now
        silent_s = now - self.heard_s
        if silent_s <= self._heartbeat_s:
            self._use.loop.call_later(every_s, self._look, now)
            return
        why = f"it {BY_SIGNAL}" if self.child.is_stopped() else "it may hang"
        self.lose(f"has not answered for {silent_s:.1f} s: {why}")

    def _must_be_ready(self) -> None:
        self.lose(f"was not ready within {self._start_s:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _hung_up(self) -> None:
        self._owner.on_hang_up()
        finding = self._use.loop.run_in_executor(None, self.child.how_ended, ENDED_S)
        finding.add_done_callback(
            lambda found: self.lose(f"ended by itself ({found.result() or 'it hung up'})")
        )

    def lose(
        self,
        what: str = "",
        *,
        said: str = "",
        is_refused: bool = False,
        error: Exception | None = None,
    ) -> None:
        """End the process as lost, and tell the owner why (`Loss`). Further calls do nothing."""
        if self._is_over:
            return
        process = str(self.child)
        what = what or (f"broke its owner: {error!r}" if error is not None else "")
        loss = Loss(process=process, what=what, said=said, is_refused=is_refused, error=error)
        self.end(f"{process} was lost: {loss.reason}")
        self._owner.on_lost(loss)

    def end(self, why: str) -> None:
        """Kill the process, and listen to it no more. Waiting calls raise `ProcessLost(why)`."""
        self._is_over = True
        self._stop_timer()
        self._line.detach()
        self.child.kill()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ProcessLost(why))

    async def gone(self) -> None:
        """Have the process ended, wait for its end, and close this side of its line."""
        self.end(f"{self.child} was ended")
        await self._use.loop.run_in_executor(None, self.close)

    def close(self) -> None:
        """Wait for the process's end and close this side of its line, in any thread that may wait.
        `end` has to be called before."""
        self.child.close()
        self._line.close()
