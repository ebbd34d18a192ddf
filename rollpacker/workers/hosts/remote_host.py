"""The run's side of another host, by which processes there look like those on the run's own host.

The owner of a process talks over a line (socket), as with one of this host. A `Pump` here turns its
messages into items, which one thread sends to the agent by `say`; another fetches the processes'
messages by `hear`. The processes of a host that is lost count as ended; a process that is begun
later waits for a new agent there. How calls travel is left to `Calls`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rollpacker.weights.between_hosts.spread import Call, Spread
from rollpacker.weights.buffer import BufferLayout, WeightSource
from rollpacker.workers.child import END_S
from rollpacker.workers.hosts.agent import (
    HEAR_S,
    Ended,
    HangUp,
    Item,
    Kill,
    News,
    Report,
    Said,
    Start,
    Started,
    WorksAs,
    pause_s,
)
from rollpacker.workers.hosts.facts import HostFacts
from rollpacker.workers.hosts.pump import Pump
from rollpacker.workers.line import Line

SLICE_S = 0.25
"""Seconds of one of the waits into which waiting for an agent's answer is divided. A wait during
which this process was stopped, and so took longer, counts as two at most."""
REACH = (2, 24)
"""Number of heartbeat intervals for which a new agent's first answer is awaited, at the first try
and at most: each try is twice as patient as the one before. The request may have been lost with a
link, or the host may be busy."""
SILENT_S = 2 * HEAR_S
"""Seconds without an answer after which an agent is silent: `hear` answers within `HEAR_S`."""
RETRY_S = 1.0
"""Seconds between two attempts to start a new agent (the run's process on another host)."""


class Unavailable(Exception):
    """Raised if it is unknown whether an agent has carried out a call, which may be repeated."""


class Gone(Exception):
    """Raised if a host's agent is dead, or was never there; the message tells why."""


class Answer(Protocol):
    """The answer of an agent to a call, which may not have come yet."""

    def result(self, timeout_s: float) -> Any:
        """Return the answer, or raise `TimeoutError`, `Unavailable`, `Gone` or the call's error."""
        ...


class Calls(Protocol):
    """An agent (the run's process on a host) whose methods can be called from here."""

    def begin(self, method: str, *arguments: Any) -> Answer: ...

    def end(self) -> None:
        """End the agent process, if it can be reached. Otherwise its lease ends it."""
        ...


Connect = Callable[[int], Calls]
"""A function that makes a new agent on a host and returns it, ready for calls. The argument is the
process id of the host's last agent, or 0. Raises `Gone` at once if the host cannot be reached."""


class RemoteProcess:
    """A process of the run on another host, with the methods of `Process` (workers/host.py)."""

    def __init__(self, name: str, number: int, session: _Session) -> None:
        self.how = ""
        self.with_host = False
        self.ended = threading.Event()
        self._pid = 0
        self._name, self._number, self._session = name, number, session

    @property
    def pid(self) -> int:
        return self._pid

    @pid.setter
    def pid(self, pid: int) -> None:
        self._pid = pid
        self._session.add(WorksAs(self._number, pid))

    def is_stopped(self) -> bool:
        return self._number in self._session.stopped

    def is_cut_off(self) -> bool:
        return self._session.is_silent()

    def how_ended(self, wait_s: float = 0.0) -> str | None:
        return self.how if self.ended.wait(wait_s) else None

    def went_with_host(self) -> bool:
        return self.ended.is_set() and self.with_host

    def kill(self) -> None:
        self._session.add(Kill(self._number))

    def close(self) -> None:
        self.kill()
        self.ended.wait(END_S)

    def __str__(self) -> str:
        return f"{self._name} (pid {self.pid} on {self._session.host})"


class RemoteHost:
    """Another host, on which this run starts processes (it meets `Host`) and to which weights are
    brought (it meets `Member` of `Spread`)."""

    def __init__(
        self,
        name: str,
        connect: Connect,
        spread: Spread,
        *,
        heartbeat_s: float,
        address: str | None = None,
    ) -> None:
        """Begin to connect to a host. `spread` brings it weights. `heartbeat_s`: seconds of silence
        after which its agent is lost. `address`: for other hosts; None: `name`."""
        self.name, self.address = name, address or name
        spread.add(name, self)
        self._connect, self._spread, self._heartbeat_s = connect, spread, heartbeat_s
        self._lock = threading.Lock()
        self._session = _Session(name, connect, 0, heartbeat_s)

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[RemoteProcess, Line]:
        """Return a process and its line (socket); it is started once the host is reached."""
        return self._living().start(module, name, guarded=guarded, environment=environment)

    def hold(self, layout: BufferLayout) -> BufferLayout:
        """Reserve memory for weights on that host, the same each time, and return its layout."""
        wanted = replace(layout, host="", path="", inode=0)  # whatever was held before
        there: BufferLayout = self._call(self._living(), "copy", wanted)
        return replace(there, host=self.name)

    def _call(self, session: _Session, method: str, *arguments: Any) -> Any:
        try:
            return session.call(method, *arguments)
        except Gone as error:
            raise OSError(f"{self.name} is lost: {error}") from error

    def weights(self, source: WeightSource) -> WeightSource:
        """Bring these weights to that host, and return where the host's processes read them."""
        if source.layout.host == self.name:
            return source
        session = self._session
        return self._spread.bring(source, session, partial(self._call, session), self.address)

    def agent(self) -> tuple[object, Call]:
        """Return the host's present agent, and a function that calls it. Raises `OSError`."""
        session = self._session
        if not session.is_there():
            raise OSError(f"{self.name} cannot be reached now")
        return session, partial(self._call, session)

    def facts(self) -> HostFacts:
        """Return the host's cores, memory and so on, once it is reached. Raises `OSError`."""
        found: HostFacts = self._call(self._living(), "facts")
        return found

    def close(self) -> None:
        """End all processes that this run has on the host."""
        self._session.close()

    def _living(self) -> _Session:
        with self._lock:
            if self._session.is_over:
                before = self._session.agent_pid
                self._session = _Session(self.name, self._connect, before, self._heartbeat_s)
            return self._session


class _Session:
    """The run's connection to one agent of a host and its processes, until the agent is lost."""

    def __init__(self, host: str, connect: Connect, predecessor: int, heartbeat_s: float) -> None:
        self.host = host
        self.stopped: frozenset[int] = frozenset()
        self.agent_pid = predecessor
        self.is_over = False
        self._heartbeat_s = heartbeat_s
        self._connected = threading.Event()
        self._calls: Calls | None = None
        self._processes: dict[int, tuple[RemoteProcess, Pump]] = {}
        self._num_started = 0
        self._items: list[Item] = []
        self._changed = threading.Condition()
        self._why = ""
        self._heard_s = time.monotonic()
        """The `time.monotonic` at which the agent last answered."""
        threading.Thread(target=self._run, args=(connect,), daemon=True).start()

    # -- what owners do ----------------------------------------------------------------------------

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[RemoteProcess, Line]:
        line, theirs = Line.pair()
        with self._changed:
            self._num_started += 1
            number = self._num_started
            process = RemoteProcess(name, number, self)
            pump = Pump(
                Line(theirs),
                lambda message: self.add(Said(number, message)),
                lambda: self.add(HangUp(number)),
            )
            self._processes[number] = process, pump
        self.add(
            Start(
                process=number,
                module=module,
                name=name,
                guarded=guarded,
                environment=dict(environment),
            )
        )
        if self.is_over:
            self._ended(number, self._why, with_host=True)
        return process, line

    def add(self, item: Item) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call this method of the agent, again if the call may be lost. Raises `Gone`."""
        while not self._connected.wait(SLICE_S):
            if self.is_over:
                raise Gone(self._why)
        return self._patiently(method, *arguments, patience_s=float("inf"))

    def is_there(self) -> bool:
        return self._connected.is_set() and not self.is_over

    def is_silent(self) -> bool:
        return self._connected.is_set() and time.monotonic() - self._heard_s > SILENT_S

    def close(self) -> None:
        self._lose("the run has let go of it")

    # -- the threads -------------------------------------------------------------------------------

    def _run(self, connect: Connect) -> None:
        patience_s, longest_s = (number * self._heartbeat_s for number in REACH)
        while not self.is_over and not self._reach(connect, patience_s):
            if self._calls is not None:  # one was made, and did not answer
                patience_s = min(2 * patience_s, longest_s)
            time.sleep(RETRY_S)
        if not self.is_over:
            self._heard_s = time.monotonic()
            self._connected.set()
            threading.Thread(target=self._guarded, args=(self._say,), daemon=True).start()
            self._guarded(self._hear)

    def _reach(self, connect: Connect, patience_s: float) -> bool:
        self._calls = None
        try:
            self._calls = connect(self.agent_pid)
            found: HostFacts = self._patiently("facts", patience_s=patience_s)
        except Gone:  # its machine may come back
            if self._calls is not None:
                self._calls.end()
            return False
        self.agent_pid = found.pid
        return True

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Gone as error:
            self._lose(str(error))

    def _say(self) -> None:
        sequence, said_s = 0, 0.0
        while not self.is_over:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self.is_over)
            pause_over_s = said_s + pause_s(len(self._processes))
            time.sleep(max(0.0, pause_over_s - time.monotonic()))
            with self._changed:
                items, self._items = self._items, []
            sequence, said_s = sequence + 1, time.monotonic()
            self._patiently("say", sequence, items, patience_s=float("inf"))

    def _hear(self) -> None:
        acknowledged = 0
        while not self.is_over:
            report: Report = self._patiently("hear", acknowledged, patience_s=self._heartbeat_s)
            self._heard_s = time.monotonic()
            for news in report.news[acknowledged + 1 - report.first :]:
                self._take(news)
            acknowledged = max(acknowledged, report.first + len(report.news) - 1)
            self.stopped = frozenset(report.stopped)

    def _take(self, news: News) -> None:
        process, pump = self._processes.get(news.process, (None, None))
        if process is None or pump is None:
            return
        if isinstance(news, Started):
            process.pid = news.pid
        elif isinstance(news, Said):
            pump.post(news.message)
        else:
            assert isinstance(news, Ended)
            self._ended(news.process, news.how)

    def _patiently(self, method: str, *arguments: Any, patience_s: float) -> Any:
        """Call a method of the agent and return its answer. A call that may have been lost is
        repeated. Raises `Gone` after `patience_s` seconds without an answer; seconds in which this
        process was stopped are left out."""
        assert self._calls is not None
        silent_s = 0.0
        answer = self._calls.begin(method, *arguments)
        while True:
            began_s = time.monotonic()
            try:
                return answer.result(SLICE_S)
            except TimeoutError:
                pass
            except Unavailable:
                time.sleep(SLICE_S)
                answer = self._calls.begin(method, *arguments)
            silent_s += min(time.monotonic() - began_s, 2 * SLICE_S)
            if self.is_over:
                raise Gone(self._why)
            if silent_s > patience_s:
                raise Gone(f"{self.host} has not answered for {silent_s:.1f} s")

    # -- the end -----------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        with self._changed:
            if self.is_over:
                return
            self.is_over, self._why = True, why
            numbers = list(self._processes)
            self._changed.notify_all()
        for number in numbers:
            self._ended(number, why, with_host=True)
        if self._calls is not None:
            self._calls.end()

    def _ended(self, number: int, how: str, *, with_host: bool = False) -> None:
        process, pump = self._processes.pop(number, (None, None))
        if process is not None and pump is not None:
            process.how, process.with_host = how, with_host
            process.ended.set()
            pump.finish()
