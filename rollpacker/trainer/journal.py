"""The journal of calls to the trainer's ranks since their last checkpoints, from which new ranks
can repeat them.

A checkpoint is the trainer at some version. Calls have brought the trainer to later versions, and
the same calls bring new ranks there, with the same bits where the arithmetic is the same each time.
Calls lie as bytes in files without a name, so that samples of many steps take no memory, and
nothing is left behind when a process dies.

    saved at version 10   calls of steps 11 to 20   saved at version 20   calls of steps 21 ...
    `----------- one segment ----------------'      `------- another ---------------

Two segments are kept, as the newest checkpoint may turn out to be damaged.

`KeptState` is what ranks have written between two checkpoints, for ranks in another layout, which
calls of ranks in the old one cannot bring to the same bits.
"""

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
    """A call of ranks: its method, the call's bytes for each rank, and their numbers (empty:
    all)."""

    method: str
    calls: list[bytes]
    numbers: list[int]


class Segment:
    """A file of the calls that were recorded since `version` of the trainer's weights."""

    def __init__(self, version: int, folder: Path | None) -> None:
        self.version = version
        self.file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # stays open
        self.end = 0
        """Length in bytes of the calls that belong to finished steps."""

    def calls(self) -> Iterator[RecordedCall]:
        """Read the calls of finished steps."""
        self.file.seek(0)
        while self.file.tell() < self.end:
            method, numbers, sizes = json.loads(self.file.readline())
            yield RecordedCall(method, [self.file.read(size) for size in sizes], numbers)


class Journal:
    """Recorded calls, in nameless files on `folder`'s file system; None: that of temporary
    files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._segments = [Segment(0, folder)]

    def add(self, method: str, calls: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Record a call that all of these ranks have done. Raises `OSError` if writing fails."""
        file = self._segments[-1].file
        head = json.dumps([method, list(numbers), [len(call) for call in calls]])
        file.write(f"{head}\n".encode())
        for call in calls:
            file.write(call)

    def finish_step(self) -> None:
        """Count the calls so far as those of finished steps."""
        last = self._segments[-1]
        last.end = last.file.tell()

    def forget_step(self) -> None:
        """Drop the calls of the unfinished step, which have come to nothing."""
        last = self._segments[-1]
        last.file.seek(last.end)
        last.file.truncate()

    def loaded(self, version: int) -> None:
        """Drop all calls and begin at `version`, of which the trainer has loaded a checkpoint."""
        first = Segment(version, self._folder)
        self._keep(0)
        self._segments = [first]

    def saved(self, version: int) -> None:
        """Begin a segment of calls at `version`, whose checkpoint is written now or in a moment."""
        self._keep(NUM_SEGMENTS - 1)
        self._segments.append(Segment(version, self._folder))

    def reaches(self, version: int) -> bool:
        """Whether recorded calls can bring ranks of this version to the newest one."""
        return any(segment.version == version for segment in self._segments)

    def since(self, version: int) -> Iterator[RecordedCall]:
        """Read the calls that bring ranks of this version to the newest one. Calls of an unfinished
        step are dropped. Raises `TrainerProcessError` if the journal does not reach back so far."""
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
"""Name of the folder of kept states in a run's folder."""


class KeptState:
    """State that the ranks have written between two checkpoints, for ranks in another layout. A
    lost trainer is restored from this state until there are newer checkpoints. The state ends with
    the run's process; a resumed run begins from its checkpoints. `parent` is the folder that holds
    the state; None: it lies where temporary files do."""

    def __init__(self, parent: Path | None = None) -> None:
        self.version: int | None = None
        """The version of the trainer that wrote the state. None: there is no state."""
        self._root = None if parent is None else parent / RELAYOUT
        self._is_temporary = parent is None
        self.drop()  # what a run that was killed has left

    def folder(self, version: int) -> Path:
        """The folder in which the state of this version lies."""
        assert self._root is not None
        return self._root / f"version-{version}"

    def new_folder(self, version: int) -> Path:
        """Return an empty place for the state of this version, for ranks to write the state to."""
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix=f"rollpacker-{RELAYOUT}-"))
        folder = self.folder(version)
        shutil.rmtree(folder, ignore_errors=True)  # of a rank that was lost while it wrote
        return folder

    def keep(self, version: int) -> None:
        """Mark the state of this version as written. The state that was kept before is removed."""
        if self.version is not None:
            shutil.rmtree(self.folder(self.version), ignore_errors=True)
        self.version = version

    def give_up(self, version: int) -> None:
        """Remove the state of this version, which was written for nothing, unless it is the kept
        one."""
        if version != self.version:
            shutil.rmtree(self.folder(version), ignore_errors=True)

    def drop(self) -> None:
        """Remove all state. Idempotent."""
        self.version = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        if self._is_temporary:
            self._root = None
