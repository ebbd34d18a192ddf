"""SIGTERM and SIGHUP as a Ctrl-C. Imported before everything else, and so nearly nothing itself."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_process = 0
"""The one that heeds them; a child that it forks does not."""


def heed() -> list[signal.Signals]:
    """Let them interrupt this process, as Ctrl-C does. Returns those that were not ignored, nor
    handled already. In the main thread only."""
    global _process
    _process = os.getpid()
    further = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in further:
        signal.signal(number, _interrupt)
    return further


def leave() -> None:
    """Let them end this process as they ever did."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _process:  # a child that was forked meanwhile: it ends as it ever did
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt
