"""A process that another program runs in, as its owner has it: greeted, set up, watched, called.

    Served -- SETUP, CALL ... --> the program (program.py)
           <- READY, ANSWER ... -

The owner is told once that the process is ready, and once that it is lost: it ended, refused, was
not ready in time, was silent for too long, or said what the owner cannot take in. A lost process is
ended at once, and nothing follows from it; the owner starts another one if it wants one.
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
"""Seconds that a process may take until it is ready."""
HEARTBEAT_S = 5.0
"""Seconds of silence after which a process is lost, unless its owner says otherwise."""
ENDED_S = 0.4
"""Seconds that it may take to learn how a process ended that has hung up."""
_HELD_S = 1.0
"""If this process looks so much later than it meant to, it was held itself: it cannot have received
what the others said meanwhile, and counts no silence."""


class Codec(Protocol):
    """How the content of messages is written as bytes."""

    def encode(self, value: Any) -> bytes: ...

    def decode(self, data: bytes) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a process is lost."""

    process: str
    """Name and process id of the process."""
    what: str = ""
    """The deed of the process, as the predicate of a sentence about it. Empty if `said` says it."""
    said: str = ""
    """The process's own words."""
    is_refused: bool = False
    """The process could not make what it was to make, for a reason that the user must mend."""
    error: Exception | None = None
    """The error that the owner raised when it was told something; None if it did not raise."""

    @property
    def reason(self) -> str:
        """The reason as a sentence that does not name the process."""
        return self.said or f"it {self.what}"

    def __str__(self) -> str:
        return f"{self.process}: {self.said}" if self.said else f"{self.process} {self.what}"


class ProcessLost(Exception):
    """A call has no answer, since the process that had it is lost; the message says why."""


class Owner(Protocol):
    """The owner of a process, who hears from it. All methods are called in the loop."""

    def on_ready(self, said: Any) -> None:
        """The process has made what it was to make; `said` comes with that, or is None."""
        ...

    def on_message(self, kind: int, number: int, said: Any) -> None:
        """The process said something that is no answer to `Served.call`."""
        ...

    def on_hang_up(self) -> None:
        """The line has ended; `on_lost` follows when it is known how the process ended."""
        ...

    def on_lost(self, loss: Loss) -> None:
        """The process is lost. It has been told to end; nothing is heard of it any more."""
        ...


class Served:
    """One process, from its start to its end. After `begin`, all methods but `close` are called in
    the loop of `use`."""

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
        """Starts the process at `place`; `program` is its module. `owner` is told nothing before
        `begin`. Raises `OSError`."""
        self.name = name
        self.is_ready = False
        self.heard_s = time.monotonic()
        """Time on the monotonic clock when it was last heard; its silence counts from there."""
        self._use, self._codec, self._owner = use, codec, owner
        self._heartbeat_s, self._start_s = heartbeat_s, start_s
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        """The timer for the end of `start_s`. None before `begin`."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self.child, self._line = place.start(
            program, name, guarded=True, environment=environment or {}
        )

    def begin(self, setup: bytes) -> None:
        """Have the process told first of all what it is to make, and listen to it. In any
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
        """Say something. Raises `TypeError` for what cannot be written."""
        self._line.post(kind, number, self._codec.encode(value))

    async def call(self, payload: bytes) -> Any:
        """The answer to a call that is written already. Raises `ProcessLost`. If this is cancelled,
        the process is told."""
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
        """Look now and then whether it is silent. `looked_s` is the time of the last look."""
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
        """Give it up, for a reason as in `Loss`. After the first time it does nothing."""
        if self._is_over:
            return
        process = str(self.child)
        what = what or (f"broke its owner: {error!r}" if error is not None else "")
        loss = Loss(process=process, what=what, said=said, is_refused=is_refused, error=error)
        self.end(f"{process} was lost: {loss.reason}")
        self._owner.on_lost(loss)

    def end(self, why: str) -> None:
        """Have it ended and hear no more of it. Calls under way raise `ProcessLost(why)`.
        Idempotent."""
        self._is_over = True
        self._stop_timer()
        self._line.detach()
        self.child.kill()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ProcessLost(why))

    async def gone(self) -> None:
        """Wait for its end, and close what this process holds of it. It is told to end if it was
        not."""
        self.end(f"{self.child} was ended")
        await self._use.loop.run_in_executor(None, self.close)

    def close(self) -> None:
        """Wait for its end, and close what this process holds of it, in any thread that may wait.
        `end` comes before. Idempotent."""
        self.child.close()
        self._line.close()
