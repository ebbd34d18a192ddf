"""The controller's side of a process that runs a user's code: starts, calls, hears and ends it.

The process's program is a module with a `main` that is given the line, and answers as
`answering.py` does: there is one for reward functions and one for environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollpacker.workers.child import END_S, Child
from rollpacker.workers.frames import Message
from rollpacker.workers.host import Host, Process
from rollpacker.workers.kinds import HELLO, SETUP
from rollpacker.workers.line import HasFileno, Line, LineEnded, ready
from rollpacker.workers.output import Output, OutputQuota
from rollpacker.workers.served import START_S

MAX_REPLY_BYTES = 64 << 20
"""The most bytes of one message from a worker; a worker that sends more is ended."""

HOSTED = "rollpacker.workers.hosted"
"""The module that a worker on another host runs first."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " from importlib import import_module; import_module(sys.argv[3]).main(int(sys.argv[1]))"
)
"""Code that a worker runs first. It finds modules where this process does, and only there."""

Heard = Callable[[int, int, dict[str, Any]], None]
"""Function that is called with a message's kind, the number of its call, and its content."""


class WorkerEnded(RuntimeError):
    """Raised if a worker process ended by itself; the message tells how."""


class WorkerProcess:
    """A process that runs a user's code, started by the constructor. `greet` waits for its hello
    without an event loop, `attach` lets a loop listen to it. It ends with this object at the
    latest."""

    def __init__(
        self,
        name: str,
        load: bytes,
        cwd: str,
        quota: OutputQuota,
        *,
        program: str,
        host: Host | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`load`: message with the user's code. `quota`: limit on printed output, which processes
        share. `host`: another host, where output then stays; None: this one. `environment`: all
        environment variables on this host; None: those of this process. Raises `OSError`."""
        self.child: Child | Process
        self._said: Callable[[str], None] | None = None
        self._said_before: list[str] = []
        """Lines that the worker printed before `attach`."""
        self._output = Output(quota, self._heard_line)
        self._load: bytes | None = load
        """The bytes that the worker is to load, or None once they are sent. They are sent by
        `greet` or `attach`, since a long message waits for the worker to read."""
        self._first: bytes | None = None
        """For a worker on another host, the message before the load: where it finds modules. None
        for a worker on this host."""
        paths = [path for path in sys.path if isinstance(path, str)]
        if host is not None:
            os.close(self._output.writer)
            self._first = pickle.dumps((paths, cwd, program))
            self.child, self._line = host.start(HOSTED, name, guarded=True, environment={})
            return
        self._line, theirs = Line.pair(max_bytes=MAX_REPLY_BYTES)
        command = [
            *(sys.executable, "-P", "-c", _START),
            *(str(theirs.fileno()), json.dumps(paths), program),
        ]
        try:
            self.child = Child.start(
                command,
                name,
                guarded=True,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=cwd,
                output=self._output.writer,
            )
        except BaseException:
            self._line.close()
            self._output.close()
            raise
        finally:
            theirs.close()
            os.close(self._output.writer)

    def _heard_line(self, line: str) -> None:
        (self._said_before.append if self._said is None else self._said)(line)

    def greet(self) -> dict[str, Any]:
        """Wait until the worker has loaded its function, and return what it reports of that. Raises
        `WorkerEnded`, and `TimeoutError` after `START_S` seconds."""
        until = time.monotonic() + START_S
        with contextlib.suppress(LineEnded):  # reading tells
            if self._first is not None:
                self._line.send(SETUP, payload=self._first)
            self._line.send(SETUP, payload=self._taken())
        both: list[HasFileno] = [self._line, self._output]
        while found := ready(both, until - time.monotonic()):
            if self._output in found:  # or printing would block it
                self._output.read()
            try:
                messages = self._line.read() if self._line in found else []
            except LineEnded:
                raise WorkerEnded(self.child.how_ended(2.0) or "it hung up") from None
            for message in messages:
                if message.kind != HELLO:
                    return self._understood(message)
                self._understood(message)
        raise TimeoutError

    def rename(self, name: str) -> None:
        """Change the name by which logs and errors call the worker. It must have said hello."""
        assert isinstance(self.child, Child), "nobody renames one on another host"
        self.child.name = name

    def _taken(self) -> bytes:
        load, self._load = self._load, None
        assert load is not None, "greeted twice"
        return load

    def _understood(self, message: Message) -> dict[str, Any]:
        """Return the content of a worker's message; a hello has none. Raises `ValueError` for a
        message that no worker sends: user's code may have found the socket and written to it."""
        if message.kind == HELLO:
            self.child.pid = int(message.payload)
            return {}
        content = json.loads(message.payload)
        if not isinstance(content, dict):
            raise ValueError("a reply that is no object")
        return content

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        heard: Heard,
        said: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        """Let this event loop, in place of an earlier one, call `heard` with messages of the
        worker, `said` with lines that it prints, and `ended` once when it has hung up."""
        self._said = said
        while self._said_before:
            said(self._said_before.pop(0))
        self._output.attach(loop)

        def take(message: Message) -> None:
            content = self._understood(message)
            if message.kind != HELLO:
                heard(message.kind, message.number, content)

        self._line.attach(loop, take, ended)
        if self._load is not None:
            if self._first is not None:
                self._line.post(SETUP, 0, self._first)
            self._line.post(SETUP, 0, self._taken())

    def send(self, kind: int, call: int, payload: bytes = b"") -> None:
        self._line.post_together(kind, call, payload)

    def kill(self) -> None:
        """Kill the worker process and its children, and listen to it no more."""
        self._line.detach()
        self.child.kill()

    async def gone(self) -> str | None:
        """Wait up to `END_S` in an event loop. Returns how the worker ended; None: not yet."""
        until = time.monotonic() + END_S
        while (how := self.child.how_ended()) is None and time.monotonic() < until:
            await asyncio.sleep(0.002)
        if isinstance(self.child, Child):
            self.child.kill_by_force()
        return how

    def close(self) -> None:
        """End the worker process, wait for its end, and close this side of its line and output."""
        self._line.close()
        self.child.close()
        self._output.close()
