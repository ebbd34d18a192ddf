"""Standard output for a run's display. If it fails, the run goes on without a display."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

LINE_EVERY_S = 3.0
"""Seconds between two lines of progress, where output is no terminal and there is no bar."""


class _Output(io.TextIOBase):
    """Writes text to standard output; once that fails (reader gone, or disk full), to /dev/null."""

    def __init__(self) -> None:
        # A live display puts something in the place of `sys.stdout` that leads back here.
        self._stream = sys.stdout

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            _write_to_nowhere(self._stream, error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            _write_to_nowhere(self._stream, error)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the stubs
        return self._stream.encoding


def _write_to_nowhere(stream: IO[str], error: OSError) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    logger.warning("standard output: %s; the run goes on without its display", error.strerror)


def console(*, goes_on: bool = False, stderr: bool = False, highlight: bool = True) -> Console:
    """Returns a rich console for a command's output. `goes_on`: once nobody reads the output any
    more, drop it and continue; False: raise the `OSError`. Output that is no terminal is never
    taken for one, even if a notebook's kernel has set FORCE_COLOR."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    if goes_on and not stderr:
        file = cast("IO[str]", _Output())
    is_terminal = None if file.isatty() else False  # None: as the environment says
    # A kernel would make an output of its own of every line.
    return Console(file=file, force_terminal=is_terminal, force_jupyter=False, highlight=highlight)


def print_line(line: str) -> None:
    """Print a line without markup. Nothing is raised if nobody reads the output any more."""
    console(goes_on=True).print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of long work (`what`): a bar on a terminal, removed at the end; else a line
    every few seconds. Yields a function that takes the number done, out of `total`."""
    shown = console(goes_on=True)
    if shown.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        name = TextColumn("{task.description}", markup=False)
        with Progress(
            name, BarColumn(), MofNCompleteColumn(), console=shown, transient=True
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if time.monotonic() - told >= LINE_EVERY_S:
            told = time.monotonic()
            line = f"{what}: {done:,} of {total:,}"
            shown.print(line, highlight=False, markup=False, soft_wrap=True)

    yield tell


def in_notebook() -> bool:
    """Whether this program runs in a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
