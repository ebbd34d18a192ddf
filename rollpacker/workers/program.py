"""The common part of all programs that run in a process with an owner (`served.py`).

    program = Program(codec(), own=EngineError)   # opens the line to the owner, sends HELLO
    setup = program.setup()                       # receives what the owner wants made
    with program.telling(ValueError):             # sends REFUSED or FAILED on an error
        engine = make(setup)
        program.line.send(READY)

The process ends when its line does. It starts quickly: what it has to make is imported only after
`setup`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from rollpacker.imports import silence_noise
from rollpacker.workers.kinds import FAILED, HELLO, REFUSED
from rollpacker.workers.line import Line, LineEnded, inherited_line

if TYPE_CHECKING:
    from rollpacker.workers.served import Codec


def begin_quietly() -> None:
    """Ignore Ctrl-C, which is for the process's owner, print tracebacks of crashes in libraries,
    and have libraries print no more than errors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    silence_noise()


def answer_calls(line: Line, answer: Callable[[bytes], tuple[int, bytes]]) -> NoReturn:
    """Answer the owner's calls in this thread: `answer` returns a reply's kind and content. Another
    thread reads the line: when it ends, so does the process, even while computing."""
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                calls.put(line.receive().payload)
        except LineEnded:
            os._exit(0)  # nobody is there any more; a joint call may never return

    threading.Thread(target=listen, name="calls", daemon=True).start()
    while True:
        kind, said = answer(calls.get())
        try:
            line.send(kind, payload=said)
        except LineEnded:
            os._exit(0)


class Program:
    """This process as a program that reports to its owner, the process that had it started."""

    def __init__(self, codec: Codec, *, own: type[Exception] | tuple[()] = ()) -> None:
        """Say hello to the owner. `own`: types of errors of which only the message is sent."""
        begin_quietly()
        line = inherited_line()
        assert line is not None, "a host starts it"
        self.line: Line = line
        self._codec, self._own = codec, own
        self.say(HELLO, payload=str(os.getpid()).encode())

    def say(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Send the owner a message (`Line.send`). If the line has ended, this process ends."""
        try:
            self.line.send(kind, number, payload)
        except LineEnded:
            os._exit(0)

    def setup(self) -> Any:
        """Return the owner's first message: the description of what this process is to make."""
        try:
            return self._codec.decode(self.line.receive().payload)
        except LineEnded:
            sys.exit(0)

    @contextlib.contextmanager
    def telling(self, *refusals: type[Exception]) -> Iterator[None]:
        """Report to the owner why something in the block could not be made, and end this process.
        `refusals`: types of errors that the user has to correct."""
        try:
            yield
        except LineEnded:
            sys.exit(0)
        except refusals as error:
            self.end_with(REFUSED, str(error))
        except Exception as error:
            self.end_with(FAILED, f"it could not be made: {self.text_of(error)}")

    def text_of(self, error: BaseException) -> str:
        """Return the text of an error for the owner (function `text_of`)."""
        return text_of(error, self._own)

    def end_with(self, kind: int, text: str) -> NoReturn:
        """Send the owner this text as a message of this kind, and end this process."""
        with contextlib.suppress(LineEnded):
            self.line.send(kind, payload=self._codec.encode(text))
        sys.stderr.flush()
        os._exit(1)


def text_of(error: BaseException, own: type[Exception] | tuple[()]) -> str:
    """Return the text of an error for the owner: the message if its type is in `own`. Any other
    error is a bug: its traceback is printed here, and its `repr` returned."""
    if isinstance(error, own):
        return str(error)
    traceback.print_exception(error)
    return repr(error)
