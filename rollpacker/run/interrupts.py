"""Handles SIGTERM and SIGHUP as a Ctrl-C, and lets no Ctrl-C be lost. Imported before everything
else, so that it imports nearly nothing itself."""

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
"""Signals, and the handler that each signal has as long as nobody has handled or ignored it."""
_process = 0
"""Id of the process that handles these signals; a child that it forks does not."""
_has_come = False
"""Whether one of these signals has come, a Ctrl-C included."""


def heed() -> list[signal.Signals]:
    """Let these signals interrupt this process, as Ctrl-C does. Returns those that were not
    ignored, nor handled already. Used in the main thread only."""
    global _process, _has_come
    _process = os.getpid()
    further = [number for number, before in _BEFORE.items() if signal.getsignal(number) == before]
    if further:
        _has_come = False
    for number in further:
        signal.signal(number, _interrupt)
    return further


def leave() -> None:
    """Give these signals back the handlers that they had before `heed`."""
    for number, before in _BEFORE.items():
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, before)


def check() -> None:
    """Raise `KeyboardInterrupt` if a signal has come: code that was being imported or finalized
    just then may have caught the interrupt and gone on."""
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
