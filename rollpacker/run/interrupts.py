"""Makes SIGTERM and SIGHUP act like Ctrl-C, and keeps any Ctrl-C from being lost. This module is
imported before all others, and so imports nearly nothing."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_BEFORE: dict[signal.Signals, Callable[[int, FrameType | None], object] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""The signals that `heed` handles, each with Python's default handler, to put back afterwards."""
_process = 0
"""Id of the process in which `heed` was called. In a child that it forks, which has another id, the
signals have their default effect."""
_has_come = False
"""Whether SIGINT, SIGTERM or SIGHUP has come since `heed` was called."""


def heed() -> list[signal.Signals]:
    """Let SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does. Signals that are
    ignored or handled already stay so. Returns the signals that were changed. Main thread only."""
    global _process, _has_come
    _process = os.getpid()
    further = [number for number, before in _BEFORE.items() if signal.getsignal(number) == before]
    if further:
        _has_come = False
    for number in further:
        signal.signal(number, _interrupt)
    return further


def leave() -> None:
    """Give the signals that `heed` handles their default handlers again."""
    for number, before in _BEFORE.items():
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, before)


def check() -> None:
    """Raise `KeyboardInterrupt` if a signal has come. An import or a finalizer that ran just then
    may have swallowed the error that the signal raised."""
    if _has_come:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _has_come
    if os.getpid() != _process:  # a child that was forked meanwhile: it ends as it ever did
        signal.signal(number, _BEFORE[signal.Signals(number)])
        os.kill(os.getpid(), number)
        return
    _has_come = True
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and handler is not _interrupt:
        handler(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt
