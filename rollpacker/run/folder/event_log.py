"""The event log on disk: entries are appended in order, and a resume cuts the file back."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from rollpacker.core.records import Entry, encode
from rollpacker.run.errors import RunError


class LogWriter:
    """Writes the event log. `append` is cheap and thread-safe; a background thread encodes and
    writes a few times a second. A kill loses at most the entries since the last write, which
    belong to a step after the last checkpoint; `flush` makes all entries so far durable."""

    def __init__(self, path: Path, *, write_every_s: float = 0.25) -> None:
        self.path = path
        self._pending: deque[Entry] = deque()
        self._sha256 = hashlib.sha256(path.read_bytes() if path.exists() else b"")
        self._file: BinaryIO = path.open("ab")
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._work, args=(write_every_s,), name="event-log", daemon=True
        )
        self._thread.start()

    def append(self, entry: Entry) -> None:
        self._pending.append(entry)

    def raise_error(self) -> None:
        """Raise the error of an earlier write in the background, if one has failed."""
        if self._error is not None:
            raise self._error

    def flush(self) -> int:
        """Write all entries appended so far durably. Returns the file's size in bytes. Raises
        `OSError` if this write, or an earlier one in the background, failed."""
        self.raise_error()  # another write after a failed one would garble the log
        self._write()
        with self._writing:
            os.fsync(self._file.fileno())
            return self._file.tell()

    def mark(self) -> dict[str, Any]:
        """Flush the log. Returns its size in bytes and its SHA-256, for a checkpoint to record.
        Nothing may be appended meanwhile."""
        return {"log_bytes": self.flush(), "log_sha256": self._sha256.hexdigest()}

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        try:
            self.flush()
        finally:
            self._file.close()

    def _work(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            try:
                self._write()
            except Exception as error:  # raised by the next `raise_error` or `flush`
                self._error = error
                return

    def _write(self) -> None:
        with self._writing:
            lines = [encode(self._pending[i]) for i in range(len(self._pending))]
            if lines:
                encoded = ("\n".join(lines) + "\n").encode()
                self._file.write(encoded)
                self._file.flush()
                self._sha256.update(encoded)
            for _ in lines:
                self._pending.popleft()


def cut_back(path: Path, size: int, sha256: str) -> None:
    """Shorten the log to the `size` in bytes that a checkpoint recorded; the rest is kept in
    another file. Raises `RunError` if the log is shorter, or its first `size` bytes have another
    SHA-256."""
    length = path.stat().st_size if path.exists() else 0
    if length < size:
        raise RunError(
            f"{path} has {length} bytes, but its checkpoint vouches for {size}: the log was cut or "
            "replaced, and the run cannot be resumed exactly. Restore it, or begin anew with "
            "--overwrite"
        )
    with path.open("r+b") as file:
        if hashlib.sha256(file.read(size)).hexdigest() != sha256:
            raise RunError(
                f"{path} was changed since it was written: its first {size} bytes are not those "
                "that its checkpoint vouches for, and the run cannot be resumed exactly. Restore "
                "it, or begin anew with --overwrite"
            )
        tail = file.read()
        if tail:
            path.with_suffix(".lost.jsonl").write_bytes(tail)
        file.truncate(size)
        os.fsync(file.fileno())
