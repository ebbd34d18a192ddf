"""The side of a process that runs a user's code: it answers its controller's requests in JSON.

Requests are pickled, since they may hold anything; they come from this process's own parent over an
inherited socket. Importing this module is quick, since each process of a reward function does so.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from rollpacker.workers.kinds import ANSWER, HELLO
from rollpacker.workers.line import Line, LineEnded

if TYPE_CHECKING:
    from rollpacker.workers.frames import Message


def connected(line: int | Line) -> Controller:
    """Return the process that started this one, after telling it this process's id."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    controller = Controller(line if isinstance(line, Line) else Line.inherited(line))
    controller.say(0, str(os.getpid()).encode(), HELLO)
    return controller


class Controller:
    """The process that started this one, and the line (message socket) to it. When it hangs up,
    this process ends."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.send = line.send
        self._pid = os.getpid()

    def request(self) -> Message:
        self._end_in_fork()
        try:
            return self.line.receive()
        except LineEnded:
            os._exit(0)

    def reply(self, call: int, reply: dict[str, Any], kind: int = ANSWER) -> None:
        self.say(call, json.dumps(reply, allow_nan=False).encode(), kind)

    def say(self, call: int, payload: bytes, kind: int = ANSWER) -> None:
        """Send a reply (JSON) to call number `call`, or another `kind`; flush the output."""
        self._end_in_fork()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        try:
            self.send(kind, call, payload)
        except LineEnded:
            os._exit(0)

    def _end_in_fork(self) -> None:
        """End this process if it is a child that the user's function forked and that came back."""
        if os.getpid() != self._pid:
            os._exit(0)
