"""Shows what a command that reads logs is busy with, on standard error if that is a terminal, until
the command ends. A log of 10,000 steps takes minutes to read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rollpacker.run.output import console

if TYPE_CHECKING:
    from rollpacker.report.log import EventLog

_EVERY_S = 0.2


@contextlib.contextmanager
def log_progress(log: EventLog) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with the name of each stage of the work. In the first stage, in
    which `log` is read, a bar shows how much was read; later stages only show their seconds."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    errors = console(stderr=True)
    if not errors.is_terminal:
        yield lambda stage: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Progress(*columns, TimeElapsedColumn(), console=errors, transient=True) as bar:
        task, ended, reading = bar.add_task("", total=1.0), threading.Event(), False

        def tell(stage: str) -> None:
            nonlocal reading
            # A stage without a measure pulses.
            reading = not bar.tasks[task].description
            bar.update(task, description=stage, total=1.0 if reading else None)

        def watch() -> None:
            while not ended.wait(_EVERY_S):
                if reading:
                    bar.update(task, completed=log.share_read)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield tell
        finally:
            ended.set()
            watcher.join()
