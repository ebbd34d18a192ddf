"""Checkpoints: a folder for each, written atomically, and used only if it matches its manifest.

checkpoints/step_000040/          written as step_000040.tmp-PID, renamed when complete
    model/                        a Hugging Face folder
    trainer/                      optimizer and schedule, safetensors and JSON
    carried/                      tokens of prompts put off to a later step, if any (carried.py)
    state.json                    state of the core, place in the data, size of the event log
    manifest.json                 size and SHA-256 of every other file; written last
checkpoints/latest                the newest folder's name, for people; nothing here reads it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.writing import fsync, replacing

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CARRIED = "carried"
"""Name of a checkpoint's subfolder with tokens generated so far for prompts put off to later steps.
Runs with `tail_batching.carry` off ignore it."""
MODEL_LINK = "model"
FORMAT = 3
"""Version of the checkpoint format. Format 1 had no hash of the event log, format 2 no tokens of
prompts put off to later steps."""
_PREFIX = "step_"
_ASIDE = "replaced-"
"""Part of a checkpoint's name while it is removed: even half removed it counts as none."""
_LOADED = {".safetensors", ".json", ".bin"}
"""Endings of files that a model loader takes because they are in the folder. Such a file that the
manifest does not list is an error, since it would be loaded with, or instead of, listed files."""


class CheckpointError(ValueError):
    """Raised when no checkpoint can be used; the message says what is wrong with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    folder: Path
    step: int
    format: int
    state: Mapping[str, Any]


def write_checkpoint(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    save: Callable[[Path], None],
    keep_last: int,
    *,
    run: Path | None = None,
) -> Path:
    """Write the checkpoint of `step`, atomically and durably, and return its folder; the newest
    `keep_last` are kept. `state`: for `state.json`. `save(folder)` writes the tensors. `run`: the
    run's folder, whose link `model` is updated; None: no link is made. Raises `OSError`, with the
    unfinished folder removed; the next call removes what a killed process left."""
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    final = root / f"{_PREFIX}{step:06d}"
    folder = root / f"{final.name}.tmp-{os.getpid()}"
    try:
        _fill(folder, step, state, save)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room
        raise
    for newer in _complete(root):  # damaged, or the run would have gone on from there
        if _step_of(newer) >= step:
            newer.rename(root / f"{newer.name}.{_ASIDE}{os.getpid()}")
    folder.rename(final)
    _point_latest(root, final.name)
    if run is not None:
        link_model(run, final)
    for old in _complete(root)[keep_last:]:
        # Aside first: what is left of one that cannot be removed whole is no checkpoint any more.
        with _only_warned(old):
            old.rename(root / f"{old.name}.{_ASIDE}{os.getpid()}")
    for unneeded in root.glob(f"{_PREFIX}*.{_ASIDE}*"):
        with _only_warned(unneeded):
            shutil.rmtree(unneeded)
    return final


@contextmanager
def _only_warned(path: Path) -> Iterator[None]:
    """A context in which an error of removing this path is a warning only, since every save tries
    again. Removing fails where another process reads a file of it on a network disk."""
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be removed (%s); the next save tries again", path, error)


def _fill(folder: Path, step: int, state: Mapping[str, Any], save: Callable[[Path], None]) -> None:
    """Write all files of a checkpoint durably, the manifest last."""
    folder.mkdir()
    save(folder)
    (folder / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    for path in folder.rglob("*"):
        fsync(path)
    manifest = {"format": FORMAT, "step": step, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    fsync(folder / MANIFEST)
    fsync(folder)


def has_checkpoint(root: Path) -> bool:
    """Whether the folder holds a complete checkpoint, valid or not."""
    return bool(_complete(root))


def newest_checkpoint(root: Path, *, without: str | None = None) -> Checkpoint:
    """Returns the newest checkpoint whose files match its manifest; a damaged one is passed over
    with a warning. `without`: name of a subfolder that the caller will not read, and whose files
    are not verified; None: all are verified. Raises `CheckpointError` if no checkpoint is valid."""
    problems: list[str] = []
    for folder in _complete(root):
        problem = verify(folder, without=without)
        if problem is None:
            try:
                state = json.loads((folder / "state.json").read_text())
                written = json.loads((folder / MANIFEST).read_text()).get("format", 1)
            except (OSError, ValueError, RecursionError) as error:
                problems.append(f"{folder.name}: {_unreadable('state.json', error)}")
                continue
            if problems:
                logger.warning("damaged: %s; using %s instead", "; ".join(problems), folder)
            return Checkpoint(folder=folder, step=_step_of(folder), format=written, state=state)
        problems.append(f"{folder.name}: {problem}")
    found = "; ".join(problems) if problems else "there is none"
    cure = "`rollpacker train` with --overwrite begins anew"
    if any(f": {CARRIED}/" in problem for problem in problems):
        cure = f"tail_batching.carry=none resumes without {CARRIED}/, {cure}"
    raise CheckpointError(f"no usable checkpoint in {root} ({found}). {cure}")


def newest_state(root: Path) -> Mapping[str, Any] | None:
    """Returns the state of the newest checkpoint without verifying its files. None if there is no
    checkpoint, or its state cannot be read or has another format."""
    for folder in _complete(root)[:1]:
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            state: dict[str, Any] = json.loads((folder / "state.json").read_text())
            if json.loads((folder / MANIFEST).read_text()).get("format") == FORMAT:
                return state
    return None


def verify(folder: Path, *, without: str | None = None) -> str | None:
    """Returns what is wrong with the checkpoint, in words; None if it is valid. A file that cannot
    be read (bad sector, lost permission, circular link) counts as wrong. `without`: name of a
    subfolder whose files are not verified; None: all are verified."""
    name = MANIFEST
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["step"] != _step_of(folder):
            return "its manifest is of another step"
        if "state.json" not in files:
            return "its manifest does not list state.json"
        for name, facts in files.items():
            path = folder / name
            if without is not None and path.parent == folder / without:
                continue
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {facts['size']}"
            if _sha256(path) != facts["sha256"]:
                return f"{name} has another SHA-256 than the manifest says"
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.suffix in _LOADED and name not in files and name != MANIFEST:
                return f"{name} is not in its manifest"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return _unreadable(name, error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return _unreadable(MANIFEST, error)
    return None


def _unreadable(name: str, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{name} cannot be read ({reason or type(error).__name__})"


def _complete(root: Path) -> list[Path]:
    """Returns the folders of all complete checkpoints, newest first."""
    if not root.is_dir():
        return []
    found = (f for f in root.glob(f"{_PREFIX}*") if f.name.removeprefix(_PREFIX).isdigit())
    return sorted(found, key=_step_of, reverse=True)  # as text, 999999 would be after 1000000


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def tidy(root: Path, newest: Checkpoint) -> None:
    """Remove what a killed run left in the folder: temporary files, and a `latest` that names
    another checkpoint than `newest`."""
    _remove_leftovers(root)
    pointer = root / "latest"
    if not pointer.is_file() or pointer.read_text().strip() != newest.folder.name:
        _point_latest(root, newest.folder.name)


def _point_latest(root: Path, name: str) -> None:
    with replacing(root / "latest", durable=True) as temporary:
        temporary.write_text(name + "\n")


def link_model(run: Path, checkpoint: Path) -> None:
    """Make `run/model` a link to the checkpoint's model. No link is made where the file system has
    no links, or where something else has that name."""
    link = run / MODEL_LINK
    if link.exists() and not link.is_symlink():
        return
    temporary = run / f"{MODEL_LINK}.tmp-{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.symlink_to(checkpoint.relative_to(run) / "model")
        temporary.rename(link)


def _remove_leftovers(root: Path) -> None:
    for leftover in root.glob("*.tmp*"):
        with _only_warned(leftover):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
