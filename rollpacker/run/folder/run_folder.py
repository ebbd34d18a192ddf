"""A run's folder: its files, its lock for one run at a time, and what a resume must not change.

runs/NAME/
    config.yaml       the resolved config         metrics.jsonl   one row per step
    events.jsonl      the event log               tensorboard/
    checkpoints/      see checkpoint.py           samples/        trained samples, parquet
    model             link to the last model      evaluations/    evaluated samples, parquet
    identity.json     fingerprints for a resume   summary.json, trace.json, timeline.png
    trackers/         files of trackers           report.html
    salvage.bin       see salvage.py
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.run.errors import FolderInUse, RunError
from rollpacker.run.folder.checkpoint import (
    CARRIED,
    FORMAT,
    MODEL_LINK,
    Checkpoint,
    has_checkpoint,
    link_model,
    newest_checkpoint,
    tidy,
)
from rollpacker.writing import replacing

_OWN_FILES = (
    *(
        "config.yaml",
        "config.yaml.tmp",
        ".config.yaml.*",
        "identity.json",
        "identity.json.tmp",
        "identity.tmp-*",
    ),
    *("events.jsonl", "events.lost.jsonl", "metrics.jsonl", "metrics.jsonl.tmp"),
    "salvage.bin",
    *("summary.json", "report.html", "trace.json", "timeline.png"),
    *("summary.json.tmp", "report.html.tmp", "trace.json.tmp", "timeline.png.tmp"),
)
"""Names of files that a run writes into its folder, half-written ones of a kill included."""
_OWN_FOLDERS = {
    "checkpoints": ("step_*", "latest", "latest.tmp*"),
    "tensorboard": ("events.out.tfevents.*",),
    "samples": ("steps_*",),
    "trackers": ("*.json", "wandb", "mlflow", "swanlab"),
    "evaluations": ("step_*",),
}
"""Subfolders of a run's folder, each with the name patterns of files that a run writes there."""

RESUME_MUST_KEEP = (
    *("seed", "model.path", "data", "rollout", "tail_batching.race", "tail_batching.tiers"),
    *("rewards", "environment", "train.threads", "model.quantization", "rollout.engine.noise"),
)
"""Config keys (with all keys below them) that a resume must not change, since results would differ.
With another number of threads, floating-point sums come out different."""

RESUME_MAY_GROW = ("rollout.max_response_tokens",)
"""Keys of `RESUME_MUST_KEEP` whose value may only grow. A response that was cut off at a smaller
cap can go on; one that is longer than a smaller cap cannot be taken back."""

RESUME_MAY_DIFFER = (
    *("rollout.engine", "rollout.engines", "rollout.routing"),
    *("environment.workers", "environment.memory_mb", "environment.timeout_s"),
    *("data.train.chat", "data.eval.chat"),
)
"""Keys below those of `RESUME_MUST_KEEP` that may change, but for those named there: they affect
speed, not results. Of `chat` (are prompts put through the chat template?) `check_resume` compares
the effect."""


def holds_run(path: Path) -> bool:
    """Whether the folder holds a run, or the files with which a run begins."""
    return any((path / name).exists() for name in ("events.jsonl", "checkpoints", "config.yaml"))


class RunFolder:
    """A run's folder, opened for one process, which holds a lock on it until `close`. The files of
    an earlier run stay until `clear`."""

    def __init__(self, path: Path, *, resume: bool, overwrite: bool) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.evaluations = path / "evaluations"
        self.config = path / "config.yaml"
        self._lock_file = path / "run.lock"
        self._made = [p for p in (path, *path.parents) if not p.exists()]
        """The folder and its parents, as far as they did not exist before, innermost first."""
        while not self._take_lock():
            pass
        try:
            self._check_state(resume=resume, overwrite=overwrite)
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> bool:
        """Lock the folder. Returns False, to try again, if another process removed the lock's file
        meanwhile. Raises `FolderInUse` if another run holds the lock."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock_file.open("a")
        except (FileExistsError, NotADirectoryError) as error:
            raise RunError(f"{self.path} cannot be a run's folder: a file is in the way") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._lock_file.stat().st_ino == os.fstat(self._lock.fileno()).st_ino:
                return True
        except BlockingIOError as error:
            self._lock.close()
            raise FolderInUse(
                f"another run is at work in {self.path}; wait for it, or choose another name=..."
            ) from error
        except FileNotFoundError:
            pass
        self._lock.close()
        return False

    def _check_state(self, *, resume: bool, overwrite: bool) -> None:
        used = holds_run(self.path)
        if used and not (resume or overwrite):
            raise RunError(
                f"{self.path} already holds a run: continue it with --resume, replace it with "
                "--overwrite, or choose another name=..."
            )
        elif resume and not used:
            raise RunError(f"there is no run to resume in {self.path}; start it without --resume")

    def clear(self) -> None:
        """Remove the files that a run wrote here, and nothing else. A subfolder that links to
        another disk stays a link, and the run's files in it go. Raises `RunError`, with nothing
        removed, if that disk is missing."""
        folders = {name: self.path / name for name in _OWN_FOLDERS}
        for path in folders.values():
            if path.is_symlink() and not path.is_dir():
                raise RunError(
                    f"{path} is a link to {os.readlink(path)}, which is not there: mount it, or "
                    "remove the link"
                )
        for pattern in _OWN_FILES:
            for path in self.path.glob(pattern):
                path.unlink()
        for link in [self.path / MODEL_LINK, *self.path.glob(f"{MODEL_LINK}.tmp-*")]:
            if link.is_symlink():
                link.unlink()
        for name, path in folders.items():
            if path.is_symlink():
                for written in [one for own in _OWN_FOLDERS[name] for one in path.glob(own)]:
                    shutil.rmtree(written) if written.is_dir() else written.unlink()
            elif path.is_dir():
                shutil.rmtree(path)

    def find_checkpoint(self, *, carries: bool = True) -> Checkpoint | None:
        """Returns the checkpoint that a resume goes on from; None if the run ended before its first
        one. `carries`: whether kept tokens of prompts put off to later steps will be read, and so
        are verified. Raises `RunError` or `CheckpointError` if no checkpoint is usable, or the log
        cannot be read."""
        if has_checkpoint(self.checkpoints):
            newest = newest_checkpoint(self.checkpoints, without=None if carries else CARRIED)
            if newest.format != FORMAT:
                raise RunError(
                    f"{newest.folder} was written by another version of RollPacker (format "
                    f"{newest.format}, not {FORMAT}): resume the run with the version "
                    "that began it, or begin anew with --overwrite. report, replay and simulate "
                    "--from read the run as it is"
                )
            tidy(self.checkpoints, newest)
            link_model(self.path, newest.folder)
            return newest
        for log in (self.events, self.events.with_suffix(".lost.jsonl")):
            if log.exists() and _tells_of_a_checkpoint(log):
                raise RunError(
                    f"{log} tells of a checkpoint, but there is none in {self.checkpoints}: was "
                    "the folder moved or emptied, is its disk not mounted? Bring it back, or begin "
                    "anew with --overwrite"
                )
        return None

    def write_identity(self, identity: Mapping[str, Any]) -> None:
        """Write `identity.json`: what the run depends on beyond its config (fingerprints, threads).
        The file is on disk before it replaces an older one, as a resume needs one of them."""
        with replacing(self.path / "identity.json", durable=True) as temporary:
            temporary.write_text(json.dumps(identity, indent=1, sort_keys=True) + "\n")

    def read_identity(self) -> dict[str, Any]:
        """Returns what `write_identity` wrote. Raises `RunError` if the file is missing or
        invalid."""
        try:
            identity: dict[str, Any] = json.loads((self.path / "identity.json").read_text())
            texts = all(isinstance(identity[key], str) for key in ("model", "dtype", "train_data"))
            threads = identity["threads"]
            if not texts or type(threads) is not int or threads < 1:
                raise ValueError("not what a run writes there")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.path / 'identity.json'} cannot be read ({type(error).__name__}: {error}), "
                "so it cannot be told whether this is the run that was started. --overwrite begins "
                "anew"
            ) from error
        return identity

    def close(self) -> None:
        """Release the lock, and remove a new folder in which nothing was written. Further calls do
        nothing."""
        if not self._lock.closed and self._made:
            self._remove_if_empty()
        self._lock.close()

    def _remove_if_empty(self) -> None:
        """Remove the folders that this object made, if only the lock's file is in them."""
        if {entry.name for entry in self.path.iterdir()} != {self._lock_file.name}:
            return
        with contextlib.suppress(OSError):  # somebody else put something there meanwhile
            self._lock_file.unlink()
            for folder in self._made:
                folder.rmdir()


def check_resume(
    changes: Sequence[tuple[str, Any, Any]], before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[str]:
    """Compare a resume with the run as it began, and return harmless changes, in words. `changes`:
    of the config, as (key, old, new). `before`, `now`: fingerprints of model, data and code then
    and now. Raises `RunError` if a change would alter the run's results."""
    refused: list[str] = []
    harmless: list[str] = []
    for key, old, new in changes:
        text = f"{key}: {old!r} -> {new!r}"
        may_differ = _below(key, RESUME_MAY_DIFFER) and key not in RESUME_MUST_KEEP
        must_keep = _below(key, RESUME_MUST_KEEP) and not may_differ
        if key in RESUME_MAY_GROW and type(old) is type(new) is int:
            must_keep = new < old
            text += (
                ": it may only grow, since responses that wait may be longer already"
                if must_keep
                else ": responses that wait go on from where they were cut off, and the law of"
                " lengths is learned anew"
            )
        elif _below(key, ("rewards",)) and key.endswith(".function"):
            text += ": a function that was mended goes on under the same name"
        (refused if must_keep else harmless).append(text)
    chat = _chat_changes(before, now)
    for key, meaning in (
        ("model", "the model's or tokenizer's files"),
        ("dtype", "the weights' dtype"),
        ("train_data", "the training data"),
    ):
        if before[key] != now[key] and not (key == "train_data" and chat):
            refused.append(f"{meaning} changed since the run began")
    refused += chat
    files = now.get("files", {})
    for key, digest in before.get("files", {}).items():
        if key in files and files[key] != digest:
            harmless.append(
                f"the code of {key} changed since the run began: what comes from now on is not"
                " comparable with what was before"
            )
    if refused:
        raise RunError(
            "this is not the run that was started; resuming it is refused:\n  "
            + "\n  ".join(refused)
            + "\nundo the change, or start a new run with another name=..."
        )
    return harmless


def _chat_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a message for each data set whose text prompts go through the chat template now and
    did not before, or the reverse. Earlier versions applied it only with a system prompt."""
    began = before.get("chat", {})
    words = {True: "rendered by the chat template", False: "plain texts"}
    return [
        f"data.{name}: prompts were {words[not renders]} when the run began, and are"
        f" {words[renders]} now: set data.{name}.chat={str(not renders).lower()} to go on as it was"
        for name, renders in now.get("chat", {}).items()
        if renders != began.get(name, False)
    ]


def _tells_of_a_checkpoint(log: Path) -> bool:
    """Whether this event log says that a step ended with a checkpoint."""
    with log.open("rb") as file:
        for line in file:
            if b'"Committed"' in line and b'"checkpointed"' in line:
                try:
                    entry = json.loads(line)
                except ValueError:  # cut off, or not ours
                    continue
                if isinstance(entry, dict) and entry.get("checkpointed") is True:
                    return True
    return False


def _below(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith((prefix + ".", prefix + "[")) for prefix in prefixes)
