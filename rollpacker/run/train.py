"""`rollpacker.train(...)`: trains as a config says, until the run ends, and returns the run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never

from rollpacker.callbacks import Callback, CallbackError
from rollpacker.imports import silence_noise
from rollpacker.run import interrupts
from rollpacker.run.error_messages import classify, naming
from rollpacker.run.output import in_notebook
from rollpacker.run.view import Run

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.records import Observer
    from rollpacker.run.parts.given import GivenReward, Overrides
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.parts.seats import RunSeat
    from rollpacker.run.session import RunSession

logger = logging.getLogger(__name__)


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Overrides = (),
    *,
    rewards: GivenReward | Sequence[GivenReward] | None = None,
    data: Iterable[Mapping[str, Any]] | None = None,
    eval_data: Iterable[Mapping[str, Any]] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    display: bool | Literal["auto"] = "auto",
    observers: Sequence[Observer] = (),
    **unknown: Never,
) -> Run:
    """Train as a config says, to the end. Returns the run, with its folder, metrics and model.

    `config` is a file, a dict with the same keys (`{"train": {"steps": 20}}` or
    `{"train.steps": 20}`), or a `RunConfig`; `overrides` change it, `["train.steps=20"]` or
    `{"train.steps": 20}`.

    `rewards` replace the config's: functions, `(function, weight)`, names as in a config
    (`"math"`), or dicts with the keys of `rewards[]`. Functions, lambdas and those of a notebook
    included, are copied into worker processes: they see variables as these were when the run began,
    and what they change stays in the worker. `data` and `eval_data` replace the sources that
    `data.train` and `data.eval` name: a list of dicts, a Dataset or a DataFrame. A resume needs the
    same objects again, which the run's folder does not hold.

    `callbacks` are told of steps and evaluations (`rollpacker.Callback`); `observers` are given
    every entry of the event log. `display`: whether progress is shown; "auto": in a notebook.

    `resume`: whether to go on with the run in the folder; "auto": if there is one, else a new run
    begins. `overwrite`: whether a new run may replace one that is there.

    An interrupt (Ctrl-C, a notebook's stop button, SIGTERM, SIGHUP) ends the run after the step at
    hand, with a checkpoint; a second one ends it at once, with `KeyboardInterrupt`.

    Raises `ValueError` (one message, for the user) if config, data, model or run folder are not
    right, `RewardError` for rewards, and `CallbackError`, `NonFiniteError`, `DeadlineExceeded` or
    `OSError`, after which the run can be resumed. Raises `TypeError` for an unknown argument; the
    message names the one that was probably meant.
    """
    with _without_traceback_in_notebooks():
        from rollpacker.imports import giving
        from rollpacker.run.parts.given import as_given

        _refuse_unknown(unknown)
        given = as_given(config, overrides, rewards=rewards, data=data, eval_data=eval_data)
        with giving(given.objects), _arguments_for_flags():
            return run_to_end(
                given.config,
                resume=resume,
                overwrite=overwrite,
                display=in_notebook() if display == "auto" else display,
                callbacks=_checked(callbacks),
                observers=observers,
            )


@contextmanager
def _without_traceback_in_notebooks() -> Iterator[None]:
    """A context in which a notebook's cell shows a user's mistake or an interrupt as one message,
    as the command does. Bugs and errors of callbacks keep their tracebacks."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, CallbackError) and classify(error)[0] != 1:
            _tell_in_one_message(error)
        raise


def _tell_in_one_message(error: BaseException) -> None:
    """Have a notebook's cell show this error as one message without its traceback."""
    if in_notebook():
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        error._render_traceback_ = lambda: [told]  # type: ignore[attr-defined]


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    from rollpacker.run.parts.given import refuse_unknown

    try:
        refuse_unknown(arguments)
    except TypeError as error:  # the user's, which other TypeErrors are not
        _tell_in_one_message(error)
        raise


@contextmanager
def _arguments_for_flags() -> Iterator[None]:
    """A context in which a `RunError` names arguments (`resume=True`), not a command's flags."""
    from rollpacker.run.errors import RunError

    try:
        yield
    except RunError as error:
        said = str(error).replace("`--overwrite`", "overwrite=True")
        said = said.replace("--overwrite", "overwrite=True").replace("--resume", "resume=True")
        error.args = (said,)
        raise


def _checked(callbacks: Sequence[Callback]) -> Sequence[Callback]:
    if isinstance(callbacks, Callback):
        return [callbacks]
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            made = " (make one of it: add ())" if isinstance(callback, type) else ""
            raise ValueError(f"callbacks.{number} is no rollpacker.Callback: {callback!r}{made}")
    return callbacks


def run_to_end(
    config: RunConfig,
    *,
    resume: bool | Literal["auto"],
    overwrite: bool,
    display: bool,
    callbacks: Sequence[Callback] = (),
    observers: Sequence[Observer] = (),
    is_command: bool = False,
) -> Run:
    """Train to the end, as `train` does, with arguments already checked. `is_command`: whether the
    process serves this run alone, so that a second interrupt ends the process."""
    from rollpacker.run.folder.run_folder import RunFolder, holds_run
    from rollpacker.run.parts.resuming import as_before, let_others_end, reason_to_end
    from rollpacker.run.session import RunSession

    began = time.perf_counter()
    silence_noise()
    path = Path(config.runs_dir).expanduser() / config.name
    session: RunSession | None = None
    try:
        with naming(path), ExitStack() as stack:
            resume = holds_run(path) if resume == "auto" else resume
            folder = RunFolder(path, resume=resume, overwrite=overwrite)
            stack.callback(folder.close)
            config = as_before(config, folder) if resume else config
            if resume and (done := reason_to_end(config, folder)) is not None:
                logger.warning("nothing was left to do: %s", done)
                let_others_end(config)
                summary = _finish(folder.path, display=display, is_done=True)
                return Run(folder.path, reason=done, summary=summary)
            _find_model(config)
            config, hosts, seat = _on_hosts(config, stack)
            session = RunSession(
                config,
                hosts,
                folder,
                stack,
                seat=seat,
                resume=resume,
                overwrite=overwrite,
                is_command=is_command,
                display=display,
                observers=observers,
                callbacks=callbacks,
            )
            stack.push(session.forget_if_not_begun)
            session.prepare(began)
            interrupts.check()
            reason = session.drive()
            stack.pop_all().close()
        run = Run(folder.path, reason=reason, summary=_finish(folder.path, display=display))
    except BaseException as error:
        if session is not None:
            _end_in_error(session)
            if session.has_begun and isinstance(error, KeyboardInterrupt) and not error.args:
                error.args = ("interrupted",)
        raise
    session.end(reason)
    return run


def _find_model(config: RunConfig) -> None:
    """Train a missing model by the config's warm-up, and check names of models and data sets."""
    from rollpacker.run.parts.hub import look_for_hub
    from rollpacker.run.parts.warm_up import make_missing

    make_missing(config)
    look_for_hub(config)


def _on_hosts(config: RunConfig, stack: ExitStack) -> tuple[RunConfig, Hosts, RunSeat]:
    """Returns the config with the keys that its placement and its devices imply, the hosts, and the
    seat (connection to the scheduler of shared devices). Warns of settings without effect."""
    from rollpacker.run.parts.hosts import open_hosts
    from rollpacker.run.parts.placement import device_kind
    from rollpacker.run.parts.resuming import with_noise
    from rollpacker.run.parts.seats import take_seat

    config, hosts = open_hosts(config)
    stack.callback(hosts.close)
    kind = hosts.plan.kind if hosts.plan is not None else device_kind(config)
    is_vllms = config.rollout.engine.name == "vllm" and kind == "cuda"
    config = with_noise(config, "vllm" if is_vllms else "rollpacker")
    seat = take_seat(config, os.environ, stack)
    if config.without_effect is not None:
        logger.warning("%s", config.without_effect)
    return config, hosts, seat


def _end_in_error(session: RunSession) -> None:
    """Call `on_end` of callbacks after an error of the run. An error of a callback is only logged,
    as it must not hide the run's."""
    try:
        session.end(None)
    except CallbackError as error:
        logger.warning("%s", error)


def _finish(folder: Path, *, display: bool, is_done: bool = False) -> dict[str, Any]:
    """Write the reports on the whole run, and return the summary. `display`: whether to print it as
    a table. `is_done`: whether the run had ended before; a summary that exists is then used."""
    from rollpacker.report.files import write_reports
    from rollpacker.report.summary import read_summary

    with naming(folder):
        summary = read_summary(folder) if is_done else None
        if summary is None:
            summary = write_reports(folder)
    if display and not in_notebook():  # where a run shows itself
        from rollpacker.report.summary_table import render
        from rollpacker.run.output import console

        console(goes_on=True).print(render(summary))
    return summary
