"""The agent of a run on another host, which starts processes there and carries their messages.

    say(sequence, items): start or end processes, send them messages or close the line to them.
    hear(acknowledged): get the processes' messages, and how they ended; waits a little for news.

Both calls may be repeated with the same numbers if an answer was lost: nothing is done twice. A
process starts, talks and ends exactly as on the run's own host (`workers/host.py`). All processes
end with the agent, and the agent ends when it was not called for `lease_s`: a run that is dead or
cut off leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollpacker.weights.between_hosts.host_weights import HostWeights
from rollpacker.workers.child import Child
from rollpacker.workers.frames import Message
from rollpacker.workers.host import ThisHost
from rollpacker.workers.hosts.facts import HostFacts, facts
from rollpacker.workers.hosts.pump import Pump

HEAR_S = 0.5
"""The most seconds for which `hear` waits for news of the processes."""
ENDED_S = 2.0
"""Seconds for which the end of a process is awaited once it has closed its line (socket)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Asks the agent of a run on this host to start `python -m module` (`Host.start`)."""

    process: int
    """Number that the run gives to the process, and to no other of this agent."""
    module: str
    name: str
    guarded: bool
    environment: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Said:
    """A message from the run to one of the agent's processes, or from the process to the run."""

    process: int
    message: Message


@dataclass(frozen=True, slots=True)
class HangUp:
    process: int


@dataclass(frozen=True, slots=True)
class Kill:
    process: int


@dataclass(frozen=True, slots=True)
class WorksAs:
    """Tells the agent that process `pid`, a descendant of the started one, does its work."""

    process: int
    pid: int


@dataclass(frozen=True, slots=True)
class Started:
    """Reports to the run the id of a process that was started without a guardian."""

    process: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Reports to the run how a process ended, after all of the process's messages."""

    process: int
    how: str


Item = Start | Said | HangUp | Kill | WorksAs
News = Started | Said | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An agent's report to the run: all news not acknowledged yet, and the stopped processes."""

    first: int
    """Number of the first item of `news`. The others are numbered on from there."""
    news: tuple[News, ...]
    stopped: tuple[int, ...]
    """Numbers of the processes that a signal has stopped."""


def pause_s(num_processes: int) -> float:
    """Return the least seconds between two calls of `say`, or of `hear`. A call costs the run about
    a millisecond of processor time, so the pause is longer with more processes on the host. A
    message after a longer silence is sent at once."""
    return min(0.002 * num_processes, 0.05)


class Agent(HostWeights):
    """The agent of a run on this host: starts processes and carries their messages. `HostWeights`
    has its methods about weights."""

    def __init__(
        self,
        *,
        lease_s: float,
        predecessor: int = 0,
        end: Callable[[], None] | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """`lease_s`: seconds without a call from the run after which the agent ends. `predecessor`:
        id of this host's last agent process, to be killed; 0: none. `end`: called when the lease is
        over; None: the process exits. `gpus`: as in `ThisHost`."""
        if predecessor:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(predecessor, signal.SIGKILL)
        super().__init__()
        self._lease_s = lease_s
        self._end = end or (lambda: os._exit(0))
        self._host = ThisHost()
        self._host.gpus = gpus
        self._own: dict[int, tuple[Child, Pump]] = {}
        self._sequence = 0
        """Number of the newest list of items (tasks from the run) that was carried out."""
        self._first = 1
        """Number of the first item of news that the run has not acknowledged."""
        self._news: deque[News] = deque()
        self._changed = threading.Condition()
        self._called_s = self._heard_s = time.monotonic()
        self._is_over = False
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    # -- what the run calls ------------------------------------------------------------------------

    def say(self, sequence: int, items: Sequence[Item]) -> None:
        """Carry out these tasks in order, unless list number `sequence` was carried out before."""
        self._called_s = time.monotonic()
        if sequence <= self._sequence:
            return
        assert sequence == self._sequence + 1, "one at a time"
        self._sequence = sequence
        for item in items:
            self._take(item)

    def hear(self, acknowledged: int) -> Report:
        """Return the news after number `acknowledged`, after waiting up to `HEAR_S` for some."""
        self._called_s = time.monotonic()
        with self._changed:
            while self._news and self._first <= acknowledged:
                self._news.popleft()
                self._first += 1
            self._changed.wait_for(lambda: bool(self._news), HEAR_S)
        pause_over_s = self._heard_s + pause_s(len(self._own))
        time.sleep(max(0.0, pause_over_s - time.monotonic()))
        with self._changed:
            first, news = self._first, tuple(self._news)
        self._called_s = self._heard_s = time.monotonic()
        stopped = [n for n, (child, _) in list(self._own.items()) if child.is_stopped()]
        return Report(first=first, news=news, stopped=tuple(stopped))

    def facts(self) -> HostFacts:
        """Return this host's cores, memory, GPUs and versions of packages."""
        return facts()

    def close(self) -> None:
        """End all processes that the run has on this host, and receive no more weights."""
        self._is_over = True
        super().close()
        children = [child for child, _ in list(self._own.values())]
        for child in children:
            child.kill()
        for child in children:
            child.close()

    # -- what follows ------------------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        if isinstance(item, Start):
            self._start(item)
            return
        child, pump = self._own.get(item.process, (None, None))
        if child is None or pump is None:  # it has ended, which was said
            return
        if isinstance(item, Said):
            pump.post(item.message)
        elif isinstance(item, HangUp):
            pump.hang_up()
        elif isinstance(item, WorksAs):
            child.pid = item.pid
        else:
            child.kill()

    def _start(self, item: Start) -> None:
        try:
            child, line = self._host.start(
                item.module, item.name, guarded=item.guarded, environment=item.environment
            )
        except OSError as error:
            self._tell(Ended(item.process, f"it could not be started: {error}"))
            return
        if not item.guarded:
            self._tell(Started(item.process, child.pid))
        process = item.process
        self._own[process] = (
            child,
            Pump(
                line,
                lambda message: self._tell(Said(process, message)),
                lambda: self._ended(process, child),
            ),
        )

    def _ended(self, process: int, child: Child) -> None:
        how = child.how_ended(ENDED_S)
        child.close()
        self._own.pop(process, None)
        self._tell(Ended(process, how or "it hung up"))

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
