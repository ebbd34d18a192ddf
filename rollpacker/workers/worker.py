"""A process that runs a user's code, as the controller sees it: started, told, listened to, ended.

Its program is a module with a `main` that is given the line, and answers as `answering.py` does:
one for reward functions, one for environments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

from rollpacker.workers.child import END_S, Child
from rollpacker.workers.frames import Message
from rollpacker.workers.host import Host, Process
from rollpacker.workers.kinds import HELLO, SETUP
from rollpacker.workers.line import HasFileno, Line, LineEnded, ready
from rollpacker.workers.output import Output, OutputQuota
from rollpacker.workers.served import START_S

MAX_REPLY_BYTES = 64 << 20
"""A worker that sends more in one message is ended: functions return a number a sample."""

HOSTED = "rollpacker.workers.hosted"
"""The program that becomes one of these on another host."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " from importlib import import_module; import_module(sys.argv[3]).main(int(sys.argv[1]))"
)
"""The worker finds modules where this process finds them, and nowhere else."""

Heard = Callable[[int, int, dict[str, Any]], None]
"""Called with the kind of a message, the number of its call, and the content."""


class WorkerEnded(RuntimeError):
    """The worker ended by itself; the message says how."""


class WorkerProcess:
    """Started by the constructor. `greet` waits for it outside of an event loop, `attach` lets a
    loop listen to it. Ends with this object at the latest."""

    def __init__(
        self,
        name: str,
        load: bytes,
        cwd: str,
        quota: OutputQuota,
        *,
        program: str,
        host: Host | None = None,
    ) -> None:
        """`quota` is shared by all that may print as much together. `host`: where it is started; on
        another one than this, what it prints stays there. Raises `OSError`."""
        self.child: Child | Process
        self._said: Callable[[str], None] | None = None
        self._said_before: list[str] = []
        """Lines that it printed before `attach`."""
        self._output = Output(quota, self._heard_line)
        self._load: bytes | None = load
        """The bytes that it is to load, or None once they are sent. They are sent when somebody
        listens to it: a long message waits for the worker, and an event loop must not."""
        self._first: bytes | None = None
        """The message to a worker on another host before the load: where it finds modules. None for
        one on this host."""
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
        """Return what the worker says of its function. Raises `WorkerEnded` and `TimeoutError`."""
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
        """Change its name in messages, once it has said who it is."""
        assert isinstance(self.child, Child), "nobody renames one on another host"
        self.child.name = name

    def _taken(self) -> bytes:
        load, self._load = self._load, None
        assert load is not None, "greeted twice"
        return load

    def _understood(self, message: Message) -> dict[str, Any]:
        """Raises `ValueError` for what a worker program of ours does not say; a function may have
        found its socket."""
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
        """Let this loop, and none before it, hear what the worker says and prints; `ended` is
        called once when it has hung up."""
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
        """End it, its children too, and hear no more of it."""
        self._line.detach()
        self.child.kill()

    async def gone(self) -> str | None:
        """Wait for its end in an event loop, up to `END_S`, and say how it ended."""
        until = time.monotonic() + END_S
        while (how := self.child.how_ended()) is None and time.monotonic() < until:
            await asyncio.sleep(0.002)
        if isinstance(self.child, Child):
            self.child.kill_by_force()
        return how

    def close(self) -> None:
        """End it, wait for that, and close what this process holds of it. Idempotent."""
        self._line.close()
        self.child.close()
        self._output.close()
