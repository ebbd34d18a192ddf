"""A record of the calls made to the trainer's ranks (processes). If ranks are lost, new ranks load
a checkpoint and repeat the calls made since.

Every checkpoint begins a `Segment`: a file of the calls made after it, until the next checkpoint.
With checkpoints after steps 10 and 20, one segment has the calls of steps 11 to 20, another those
from step 21 on. These two are kept, as the newest checkpoint may turn out to be damaged. The files
have no names, so nothing is left behind when a process dies, and calls take no memory.

Repeated calls give the same weights to the bit only if the arithmetic is the same, so not in
another layout (split of the model over ranks). For ranks in another layout there is `KeptState`:
the trainer's state, written by its ranks between two checkpoints."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rollpacker.trainer.trainer import TrainerProcessError

NUM_SEGMENTS = 2


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A trainer call that ranks have carried out: the method's name, the encoded call of each rank
    that was called, and these ranks' numbers (empty: all ranks were called)."""

    method: str
    calls: list[bytes]
    numbers: list[int]


class Segment:
    """A file of the calls made since the trainer was at `version`, which is a number of steps."""

    def __init__(self, version: int, folder: Path | None) -> None:
        self.version = version
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # stays open
        self.end = 0
        """Length in bytes of the recorded calls of finished steps. The open step's calls follow."""

    def calls(self) -> Iterator[RecordedCall]:
        """Read the recorded calls of finished steps, in order."""
        self.file.seek(0)
        while self.file.tell() < self.end:
            method, numbers, sizes = json.loads(self.file.readline())
            yield RecordedCall(method, [self.file.read(size) for size in sizes], numbers)


class Journal:
    """The recorded calls, in unnamed temporary files. `folder` decides on which file system the
    files lie; None: that of the system's temporary files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._segments = [Segment(0, folder)]

    def add(self, method: str, calls: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Record that the ranks with these `numbers` (empty: all) have carried out a call of
        `method`; `calls` has each rank's encoded call. Raises `OSError` if writing fails."""
        file = self._segments[-1].file
        head = json.dumps([method, list(numbers), [len(call) for call in calls]])
        file.write(f"{head}\n".encode())
        for call in calls:
            file.write(call)

    def finish_step(self) -> None:
        """Mark all calls recorded so far as belonging to finished steps."""
        last = self._segments[-1]
        last.end = last.file.tell()

    def forget_step(self) -> None:
        """Drop the unfinished step's recorded calls, since its gradients are lost or not finite."""
        last = self._segments[-1]
        last.file.seek(last.end)
        last.file.truncate()

    def loaded(self, version: int) -> None:
        """Drop all recorded calls, since the trainer has loaded a checkpoint of `version`."""
        first = Segment(version, self._folder)
        self._keep(0)
        self._segments = [first]

    def saved(self, version: int) -> None:
        """Begin a new file of calls, because the trainer now saves a checkpoint of `version`. Only
        the newest segments that may still be needed are kept."""
        self._keep(NUM_SEGMENTS - 1)
        self._segments.append(Segment(version, self._folder))

    def reaches(self, version: int) -> bool:
        """Whether ranks that load a checkpoint of `version` can be brought to the newest version by
        repeating recorded calls."""
        return any(segment.version == version for segment in self._segments)

    def since(self, version: int) -> Iterator[RecordedCall]:
        """Read the calls that bring ranks from this version to the newest one, without those of an
        unfinished step. Raises `TrainerProcessError` if no recorded calls begin at this version."""
        self.forget_step()
        start = next((i for i, one in enumerate(self._segments) if one.version == version), None)
        if start is None:
            raise TrainerProcessError(
                f"the updates since version {version} of the weights, that of the newest checkpoint"
                " which is whole, are not known any more. --resume goes on from there"
            )
        for segment in self._segments[start:]:
            yield from segment.calls()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._keep(0)

    def _keep(self, count: int) -> None:
        kept = self._segments[len(self._segments) - count :]
        for segment in self._segments[: len(self._segments) - count]:
            segment.file.close()
        self._segments = kept


RELAYOUT = "relayout"
"""Name of the folder of `KeptState` inside a run's folder."""


class KeptState:
    """The trainer's state, written by its ranks between two checkpoints so that ranks in another
    layout (another split of the model over ranks) can load it. A lost trainer is restored from this
    state until newer checkpoints exist. The state is removed when the run's process ends. `parent`
    is the folder that will hold the state; None: a temporary folder holds it."""

    def __init__(self, parent: Path | None = None) -> None:
        self.version: int | None = None
        """The trainer's version (number of steps) in the kept state. None: no state is kept."""
        self._root = None if parent is None else parent / RELAYOUT
        self._is_temporary = parent is None
        self.drop()  # what a run that was killed has left

    def folder(self, version: int) -> Path:
        """Return the folder in which the state of this trainer version lies, or would lie."""
        assert self._root is not None
        return self._root / f"version-{version}"

    def new_folder(self, version: int) -> Path:
        """Return a path at which nothing exists, for the ranks to write this version's state to."""
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix=f"rollpacker-{RELAYOUT}-"))
        folder = self.folder(version)
        shutil.rmtree(folder, ignore_errors=True)  # of a rank that was lost while it wrote
        return folder

    def keep(self, version: int) -> None:
        """Count the written state of this version as the kept one, since it is complete now, and
        remove the state kept before."""
        if self.version is not None:
            shutil.rmtree(self.folder(self.version), ignore_errors=True)
        self.version = version

    def give_up(self, version: int) -> None:
        """Remove the folder of this version's state, which nobody will load. Nothing happens if
        that state is the kept one."""
        if version != self.version:
            shutil.rmtree(self.folder(version), ignore_errors=True)

    def drop(self) -> None:
        """Remove all kept states. Idempotent."""
        self.version = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        if self._is_temporary:
            self._root = None
