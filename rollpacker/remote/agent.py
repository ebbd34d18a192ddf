"""What a run has on each other host: it starts processes there and carries their messages.

    say(sequence, items)   begin, tell, hang up on, end processes; an item is taken once
    hear(acknowledged)     what they said, and how they ended; waits a little for news

Both may be asked again with the same numbers, whatever became of the answer. A process starts,
talks and ends exactly as it does beside the run (`processes/host.py`). All of them end with the
agent, and the agent ends when nobody has called it for `lease_s`: a run that is dead or cut off
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker.processes.child import Child
from rollpacker.processes.frames import Message
from rollpacker.processes.host import ThisHost
from rollpacker.processes.line import Line, LineEnded
from rollpacker.remote.copies import Copies

HEAR_S = 0.5
"""How long `hear` waits for news."""
ENDED_S = 2.0
"""How long it may take to learn how a process ended that has hung up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Begin a process; see `Host.start`."""

    process: int
    """Chosen by the run, never twice of one agent."""
    module: str
    name: str
    guarded: bool
    environment: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Said:
    """A message to a process, or of one."""

    process: int
    message: Message


@dataclass(frozen=True, slots=True)
class HangUp:
    process: int


@dataclass(frozen=True, slots=True)
class Kill:
    process: int


@dataclass(frozen=True, slots=True)
class Started:
    process: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A process is gone, and all that it said has been reported before."""

    process: int
    how: str


Item = Start | Said | HangUp | Kill
News = Started | Said | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer of `hear`."""

    first: int
    """The number of the first of the news."""
    news: tuple[News, ...]
    stopped: tuple[int, ...]
    """The processes that a signal holds."""


@dataclass(slots=True)
class _Own:
    """A process of this host."""

    child: Child
    line: Line
    outgoing: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)


class Agent:
    """See above. `copies` are the weights on this host."""

    def __init__(
        self, *, lease_s: float, predecessor: int = 0, end: Callable[[], None] | None = None
    ) -> None:
        """`predecessor`: process id of this host's last agent, which is ended by force if it is
        still there, stopped perhaps. `end`: called when the lease is over; without it the process
        ends."""
        if predecessor:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(predecessor, signal.SIGKILL)
        self.copies = Copies()
        self._lease_s = lease_s
        self._end = end or (lambda: os._exit(0))
        self._host = ThisHost()
        self._own: dict[int, _Own] = {}
        self._sequence = 0
        """Of the newest items that were taken."""
        self._first = 1
        """Number of the first of the news that the run has not acknowledged."""
        self._news: deque[News] = deque()
        self._changed = threading.Condition()
        self._called_s = time.monotonic()
        self._is_over = False
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    # -- what the run calls ------------------------------------------------------------------------

    def say(self, sequence: int, items: Sequence[Item]) -> None:
        """Take these items, unless they have been taken."""
        self._called_s = time.monotonic()
        if sequence <= self._sequence:
            return
        assert sequence == self._sequence + 1, "one at a time"
        self._sequence = sequence
        for item in items:
            self._take(item)

    def hear(self, acknowledged: int) -> Report:
        """Wait for news that follow those acknowledged, for `HEAR_S` at most."""
        self._called_s = time.monotonic()
        with self._changed:
            while self._news and self._first <= acknowledged:
                self._news.popleft()
                self._first += 1
            self._changed.wait_for(lambda: bool(self._news), HEAR_S)
            first, news = self._first, tuple(self._news)
        self._called_s = time.monotonic()
        stopped = [n for n, own in list(self._own.items()) if own.child.is_stopped()]
        return Report(first=first, news=news, stopped=tuple(stopped))

    def pid(self) -> int:
        """Of this agent."""
        return os.getpid()

    def close(self) -> None:
        """End all processes of this host."""
        self._is_over = True
        for own in list(self._own.values()):
            own.child.kill()
        for own in list(self._own.values()):
            own.child.close()

    # -- what follows ------------------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        if isinstance(item, Start):
            self._start(item)
            return
        own = self._own.get(item.process)
        if own is None:  # it has ended, which was said
            return
        if isinstance(item, Said):
            own.outgoing.put(item.message)
        elif isinstance(item, HangUp):
            own.line.hang_up()
        else:
            own.child.kill()

    def _start(self, item: Start) -> None:
        # Ray's own variables, a token's among them, are for this process alone.
        hidden = {name: None for name in os.environ if name.startswith("RAY_")}
        try:
            child, line = self._host.start(
                item.module,
                item.name,
                guarded=item.guarded,
                environment={**hidden, **item.environment},
            )
        except OSError as error:
            self._tell(Ended(item.process, f"it could not be started: {error}"))
            return
        own = self._own[item.process] = _Own(child, line)
        self._tell(Started(item.process, child.pid))
        for work in (self._listen, self._speak):
            threading.Thread(target=work, args=(item.process, own), daemon=True).start()

    def _listen(self, process: int, own: _Own) -> None:
        with contextlib.suppress(LineEnded):
            while True:
                self._tell(Said(process, own.line.receive()))
        own.outgoing.put(None)
        how = own.child.how_ended(ENDED_S)
        own.child.close()
        del self._own[process]
        own.line.close()
        self._tell(Ended(process, how or "it hung up"))

    def _speak(self, process: int, own: _Own) -> None:
        """In a thread of its own: one that is stopped must not hold the others up."""
        with contextlib.suppress(LineEnded):
            while (message := own.outgoing.get()) is not None:
                own.line.send(*message)

    def _tell(self, news: News) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._is_over:
            time.sleep(min(self._lease_s / 10, 1.0))
            if time.monotonic() - self._called_s > self._lease_s:
                self.close()
                self._end()
