"""State that the trainer's ranks have written between two checkpoints, for ranks in another layout:
what a lost trainer comes back from until there are newer checkpoints. It ends with the run's
process; a resumed run begins from its checkpoints.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

NAME = "relayout"


class KeptState:
    """`parent`: in which folder it lies. None: where temporary files do."""

    def __init__(self, parent: Path | None = None) -> None:
        self.version: int | None = None
        """Of the trainer that wrote it. None: there is none."""
        self._root = None if parent is None else parent / NAME
        self._is_temporary = parent is None
        self.drop()  # what a run that was killed has left

    def folder(self, version: int) -> Path:
        """Where the state of this version lies."""
        assert self._root is not None
        return self._root / f"version-{version}"

    def new_folder(self, version: int) -> Path:
        """Where it is to be written."""
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix=f"rollpacker-{NAME}-"))
        folder = self.folder(version)
        shutil.rmtree(folder, ignore_errors=True)  # of a rank that was lost while it wrote
        return folder

    def keep(self, version: int) -> None:
        """It is written. What was kept before is removed."""
        if self.version is not None:
            shutil.rmtree(self.folder(self.version), ignore_errors=True)
        self.version = version

    def give_up(self, version: int) -> None:
        """It was written for nothing, unless it is kept."""
        if version != self.version:
            shutil.rmtree(self.folder(version), ignore_errors=True)

    def drop(self) -> None:
        """Nobody needs it any more. Idempotent."""
        self.version = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        if self._is_temporary:
            self._root = None
