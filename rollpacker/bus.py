"""The bus: brings events to the core, and the core's commands to the ports that carry them out.

      engine    rewards    trainer    cursor ...            one lock, one total order
         \\         |          |         /                            |
          +--------+-- take(event) -----+--> stamp -> job.handle -> route -> log
                                                                |
                         Launch -> one port, Score -> one port, Commit -> one port, ...

A run, a simulation and the core's tests use this bus, each with ports and a clock of its own.
Nothing is decided here, and nothing here knows what a command means. A new command needs its class
(`core/messages`), the machine in the core that gives it, and the port that carries it out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import force_setattr as stamp

from rollpacker.core.commands import Command, Enter, Leave, Remind
from rollpacker.core.events import Entered, Event
from rollpacker.core.job.job import Job
from rollpacker.core.messages import COMMANDS
from rollpacker.core.records import Entry, Note, Record

Routes = Mapping[type[Command], Callable[[Any], None]]
"""Functions that carry out commands, by kind of command. Each is called under the bus's lock and
must be quick; it may begin longer work, whose end it reports by an event."""

Sink = Callable[[Entry], None]
"""Function given every entry of the event log, in order, under the bus's lock; must be quick."""


class Clock(Protocol):
    """The clock of a run: real, or virtual in a simulation."""

    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def stamp(self) -> float:
        """Returns `now()` in seconds, rounded as the event log stores it. The core sees these
        values only, so that a replay of the log sees the same ones."""
        ...


class Port(Protocol):
    """An object that carries out some kinds of the core's commands, which `routes` names."""

    def routes(self) -> Routes: ...


class Bus:
    """Brings events to the core, which decides, and its commands to the ports. Thread-safe."""

    def __init__(
        self, job: Job, clock: Clock, ports: Sequence[Port] = (), *, sinks: Sequence[Sink] = ()
    ) -> None:
        """`ports` are connected at once, if there are any. `sinks` are given all log entries."""
        self.job = job
        self.clock = clock
        self.lock = threading.RLock()
        """The only lock between core and ports. Reentrant, as ports call the bus while it calls
        them."""
        self._routes: Routes = {}
        self._sinks = list(sinks)
        self._is_busy = False
        self._answers: deque[Event] = deque()
        """Events that ports brought while a command was carried out; `take` handles them next."""
        if ports:
            self.connect(*ports)

    def connect(self, *ports: Port) -> None:
        """Connect all ports in one call. Ports that bring events are made with the bus, so before
        this call. Raises `AssertionError` unless every kind of command has exactly one port."""
        routes: dict[type[Command], Callable[[Any], None]] = {}
        for port in ports:
            for kind, obey in port.routes().items():
                assert kind not in routes, f"two ports obey {kind.__name__}"
                routes[kind] = obey
        missing = [name for name, kind in COMMANDS.items() if kind not in routes]
        assert not missing, f"no port obeys {', '.join(missing)}"
        self._routes = routes

    def add_sink(self, sink: Sink) -> None:
        """Add a function that is given every log entry from now on."""
        self._sinks.append(sink)

    def take(self, event: Event) -> None:
        """Bring this event to the core, have the ports carry out the commands that the core
        answers, and log both. The event must be new: it gets its time here. Events that ports bring
        meanwhile are handled after this one is logged, so that the log has the order in which the
        core saw them."""
        with self.lock:
            self.take_alone(event)

    def take_alone(self, event: Event) -> None:
        """Do as `take` does, but without the lock, for a bus that only one thread uses. In a
        simulation the lock would take some 4 % of the time."""
        answers = self._answers
        if self._is_busy:
            answers.append(event)
            return
        self._is_busy = True
        sinks, routes, clock = self._sinks, self._routes, self.clock
        try:
            while True:
                began = clock.now() if sinks else 0.0  # what nobody logs need not be timed
                time_s = clock.stamp()
                stamp(event, "time_s", time_s)  # nobody else has seen it yet
                try:
                    commands = self.job.handle(event)
                except AssertionError:  # a bug: leave the event that shows it in the log
                    self.write(Record(time_s=time_s, event=event, commands=(), cost_s=0.0))
                    raise
                for command in commands:
                    routes[type(command)](command)
                if sinks:
                    cost_s = clock.now() - began
                    answer = tuple(commands)
                    self.write(Record(time_s=time_s, event=event, commands=answer, cost_s=cost_s))
                if not answers:
                    return
                event = answers.popleft()
        except BaseException:
            answers.clear()
            raise
        finally:
            self._is_busy = False

    def write(self, entry: Entry) -> None:
        """Give this entry to all sinks (functions that take the event log's entries)."""
        with self.lock:
            for sink in self._sinks:
                sink(entry)

    def note(self, name: str, seconds: float, step: int, metrics: Mapping[str, float]) -> None:
        """Add a note to the event log: of something that is no event for the core, such as an
        evaluation, and that took `seconds`, until now."""
        with self.lock:
            now = self.clock.now()
            self.write(Note(time_s=now, name=name, seconds=seconds, step=step, metrics=metrics))


class Recorded:
    """A port (carries out the core's commands) that does nothing: its commands are only logged."""

    def __init__(self, *kinds: type[Command]) -> None:
        self._kinds = kinds

    def routes(self) -> Routes:
        return dict.fromkeys(self._kinds, lambda command: None)


class Unsaid:
    """A port for commands that the core never gives in this configuration: each raises an error."""

    def __init__(self, *kinds: type[Command]) -> None:
        self._kinds = kinds

    def routes(self) -> Routes:
        return dict.fromkeys(self._kinds, self._refuse)

    def _refuse(self, command: Command) -> None:
        raise AssertionError(f"nobody here obeys {command}")


class OwnPools:
    """A port for a run whose device pools (groups of devices) no other job uses: whenever the core
    asks for a pool, it gets it at once."""

    def __init__(self, take: Callable[[Event], None]) -> None:
        """`take`: the bus's `take`, which brings an event to the core."""
        self._take = take

    def routes(self) -> Routes:
        return {
            Enter: self._enter,
            **dict.fromkeys((Leave, Remind), lambda command: None),
        }

    def _enter(self, command: Enter) -> None:
        self._take(Entered(time_s=0.0, pool=command.pool))
