"""`rollpacker.train(...)`: a run from its config to its end, and what is left of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.callbacks import CallbackError
from rollpacker.cli.errors import naming

if TYPE_CHECKING:
    from rollpacker.callbacks import Callback
    from rollpacker.cli.session import Session
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.records import Observer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What `train` returns."""

    folder: Path
    reason: str
    """Why it ended: "every step is done", "the data ended" or "interrupted"."""
    summary: dict[str, Any]
    """What `summary.json` holds; see docs/metrics.md."""

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder."""
        from rollpacker.controller.checkpoint import newest_checkpoint

        return newest_checkpoint(self.folder / "checkpoints").folder / "model"


def train(
    config: str | Path | RunConfig,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    display: bool = False,
    callbacks: Sequence[Callback] = (),
    observers: Sequence[Observer] = (),
) -> FinishedRun:
    """Run a config to its end.

    `callbacks` are told of steps and evaluations (`rollpacker.Callback`); `observers` are fed every
    entry of the event log; `display` shows progress on the terminal.
    An interrupt (Ctrl-C, a notebook's stop button, SIGTERM) ends the run after the step at hand,
    saved; a second one at once, with `KeyboardInterrupt`.

    Raises `ValueError` (one message, for the user) for what is wrong with config, data, model or
    run folder, `NonFiniteError`, `DeadlineExceeded`, `OSError`; the run can then be resumed.
    """
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig

    if not isinstance(config, RunConfig):
        config = load_config(config, overrides, RunConfig)
    elif overrides:
        raise ValueError("overrides go with a config file, not with a RunConfig")
    return run_to_end(
        config,
        resume=resume,
        overwrite=overwrite,
        display=display,
        callbacks=callbacks,
        observers=observers,
    )


def run_to_end(
    config: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    display: bool,
    callbacks: Sequence[Callback] = (),
    observers: Sequence[Observer] = (),
    is_command: bool = False,
) -> FinishedRun:
    """See `train`. `is_command`: the process is this run's alone, and a second interrupt ends
    it."""
    from rollpacker.cli.session import Session
    from rollpacker.controller.run_folder import RunFolder

    watch = time.perf_counter()
    if config.without_effect is not None:
        logger.warning("%s", config.without_effect)
    path = Path(config.runs_dir).expanduser() / config.name
    session: Session | None = None
    try:
        with naming(path), ExitStack() as stack:
            folder = RunFolder(path, resume=resume, overwrite=overwrite)
            stack.callback(folder.close)
            session = Session(
                config,
                folder,
                stack,
                resume=resume,
                overwrite=overwrite,
                is_command=is_command,
                display=display,
                observers=observers,
                callbacks=callbacks,
            )
            session.prepare(watch)
            reason = session.drive()
            stack.pop_all().close()
        run = FinishedRun(
            folder=folder.path, reason=reason, summary=_finish(folder.path, display=display)
        )
    except BaseException:
        if session is not None:
            _end_in_error(session)
        raise
    session.end(reason)
    return run


def _end_in_error(session: Session) -> None:
    """What a callback says of the end must not hide what the run died of."""
    try:
        session.end(None)
    except CallbackError as error:
        logger.warning("%s", error)


def _finish(folder: Path, *, display: bool) -> dict[str, Any]:
    """Write what is made from the whole log, and print the table."""
    from rollpacker.report.files import write_reports

    with naming(folder):
        summary = write_reports(folder)
    if display:
        from rollpacker.cli.output import console
        from rollpacker.report.summary import render

        console().print(render(summary))
    return summary
