"""Standard output as a run's display sees it: when it breaks, the display ends and the run goes
on."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


class _Output(io.TextIOBase):
    """Passes on to `sys.stdout` until that fails: a reader that left, a disk that is full."""

    def write(self, text: str) -> int:
        try:
            sys.stdout.write(text)
        except OSError as error:
            _write_to_nowhere(error)
        return len(text)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError as error:
            _write_to_nowhere(error)

    def isatty(self) -> bool:
        return sys.stdout.isatty()

    def fileno(self) -> int:
        return sys.stdout.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the stubs
        return sys.stdout.encoding


def _write_to_nowhere(error: OSError) -> None:
    """Let the process's standard output lead nowhere, so that later writes do not fail either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    logger.warning("standard output: %s; the run goes on without its display", error.strerror)


def console() -> Console:
    """A console that outlives its reader."""
    from rich.console import Console

    return Console(file=cast("IO[str]", _Output()))


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this program: what it shows can be changed in place."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
