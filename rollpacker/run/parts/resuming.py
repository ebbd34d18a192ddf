"""Decides, from the run's folder alone, whether a resume goes on with the same run, and whether
anything is left to do. No data, model or reward is loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.folder.run_folder import RunFolder

logger = logging.getLogger(__name__)

SAME: Mapping[str, Any] = {"model": "", "dtype": "", "train_data": ""}
"""Made-up fingerprints, given to `check_resume` as old and new ones, to compare only configs."""

READ_S = 5.0
"""Seconds that may be spent on reading the log's entries after the last checkpoint."""


def config_before(folder: RunFolder) -> dict[str, Any]:
    """Returns the config of the run's last start. One from before there was a choice of noise says
    what it was drawn with. Raises `RunError` if the config cannot be read."""
    from rollpacker.config.document import ConfigError, parse_document, read_text
    from rollpacker.run.errors import RunError

    try:
        before = parse_document(read_text(folder.config), str(folder.config))[0]
    except ConfigError as error:
        raise RunError(
            f"{error} This is what the run was started with, so it cannot be told whether "
            "it is the same run. Restore the file, or begin anew with --overwrite"
        ) from error
    before.setdefault("rollout", {}).setdefault("engine", {}).setdefault("noise", "rollpacker")
    return before


def as_before(config: RunConfig, folder: RunFolder) -> RunConfig:
    """Returns the config with the choices that were made when the folder's run began. Raises
    `RunError` if that run's config cannot be read."""
    if not folder.config.exists():
        return config
    return with_noise(config, config_before(folder)["rollout"]["engine"]["noise"])


def with_noise(config: RunConfig, noise: str) -> RunConfig:
    """Returns the config, with `noise` in place of `rollout.engine.noise=auto`. It is decided when
    a run begins and saved with the config, so that a resume on other devices draws as before."""
    if config.rollout.engine.noise != "auto":
        return config
    engine = dataclasses.replace(config.rollout.engine, noise=noise)  # type: ignore[arg-type]
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine=engine))


def check_config(config: RunConfig, folder: RunFolder, step: int) -> None:
    """Raise `RunError` if a changed config key would alter the run's results. Warn if `train.steps`
    was lowered so far that the resume, from the checkpoint of `step`, has one step left at most."""
    from rollpacker.config.load import changes_since
    from rollpacker.run.folder.run_folder import check_resume

    before = config_before(folder)
    check_resume(changes_since(before, config), SAME, SAME)
    old, new = (before.get("train") or {}).get("steps"), config.train.steps
    if new is not None and (old is None or old > new) and new <= step + 1:
        logger.warning(
            "train.steps was %s when the run stopped after step %d and is %d now, so it ends here."
            " Was it given on the command line? It counts for that command alone: give"
            " train.steps=%s again to go on",
            old,
            step,
            new,
            old,
        )


def reason_to_end(config: RunConfig, folder: RunFolder) -> str | None:
    """Returns why the run has ended, if a resume has no step and no evaluation left to do; else
    None. Raises `RunError` if a changed config key would alter the run's results."""
    from rollpacker.config.load import changes_since
    from rollpacker.core.job.job import Job
    from rollpacker.run.folder.checkpoint import newest_state
    from rollpacker.run.folder.run_folder import check_resume

    state = newest_state(folder.checkpoints)
    if state is None or (reason := _said_at_the_end(folder, state["log_bytes"])) is None:
        return None
    changes = changes_since(config_before(folder), config)
    check_resume(changes, SAME, SAME)
    if any(key == "train.epochs" for key, _, _ in changes):
        return None  # more rows may follow: the cursor knows
    known = {"max_response_tokens": config.rollout.max_response_tokens, **state["job"]}
    job = Job.restore(config.job(), known)
    return reason if job.nothing_left() and not job.evaluation_is_due else None


def _said_at_the_end(folder: RunFolder, log_bytes: int) -> str | None:
    """Returns the reason with which the run finished after its last checkpoint, as its log says.
    None if the log does not say. `log_bytes`: size of the log at the checkpoint."""
    from rollpacker.core.commands import Finish
    from rollpacker.core.records import LogError, Record
    from rollpacker.report.log import LogTail

    tail = LogTail(folder.events)
    tail.num_bytes = log_bytes
    try:
        for entry in tail.read(READ_S):
            if isinstance(entry, Record):
                for command in entry.commands:
                    if isinstance(command, Finish) and not command.failed:
                        return command.reason
    except (LogError, OSError):  # the resume itself says what is wrong
        pass
    return None


def let_others_end(config: RunConfig) -> None:
    """End the other processes that torchrun started, by connecting to them and closing them."""
    from rollpacker.run.parts.trainer import start_trainer_processes
    from rollpacker.trainer.launch import Torchrun

    if Torchrun.from_environment() is not None:
        ranks = start_trainer_processes(config)
        if ranks is not None:
            try:
                ranks.connect()
            finally:
                ranks.close()
