"""Writes requests to a zygote (a process that forks the runs), and checks their contents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePosixPath

from rollpacker.sandbox import zygote
from rollpacker.sandbox.sandbox import Limits

_LONGEST_NAME = 1024
_PAGE = 4096
"""Number of bytes in a page. The size of a file is rounded up to pages."""


def header(kind: bytes, run_id: int, limits: Limits, size: int) -> bytes:
    """Return the fixed part of a request to a zygote (a process that forks the runs), before a
    payload of `size` bytes. `kind`: b"r" for the run `run_id`, b"c" to cancel it."""
    return zygote.REQUEST.pack(
        zygote.MAGIC,
        kind,
        run_id,
        limits.wall_s,
        cpu_limit_s(limits),
        limits.memory_bytes,
        limits.output_bytes,
        limits.disk_bytes,
        limits.max_files,
        size,
    )


def cpu_limit_s(limits: Limits) -> float:
    return math.ceil(limits.wall_s) + 1 if limits.cpu_s is None else limits.cpu_s


def payload(
    program: str, stdin: str | bytes, files: Mapping[str, str | bytes], limits: Limits
) -> bytes:
    """Return the payload of a request to the process that forks the runs: program, input and files.
    Raises `ValueError` for files outside of the run's folder or beyond its limits."""
    parts = [_field(as_bytes(program)), _field(as_bytes(stdin)), zygote.LENGTH.pack(len(files))]
    for name, data in checked_files(files, limits).items():
        parts += (_field(as_bytes(name)), _field(data))
    return b"".join(parts)


def _field(data: bytes) -> bytes:
    return zygote.LENGTH.pack(len(data)) + data


def as_bytes(value: str | bytes) -> bytes:
    """The text in UTF-8, with lone surrogates kept, which the interpreter will then complain of."""
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


def checked_files(files: Mapping[str, str | bytes], limits: Limits) -> dict[str, bytes]:
    """The files with their contents as bytes. Raises ValueError for a name that leads out of the
    folder, and for files that exceed the limits."""
    for name in files:
        parts = name.split("/")
        if "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(
                f"a file of a run needs a relative name inside its folder, not {name!r}"
            )
        if any(len(as_bytes(part)) > 255 for part in parts):
            raise ValueError(f"a file of a run has a name of more than 255 bytes: {name[:40]!r}...")
        if len(as_bytes(name)) > _LONGEST_NAME:
            raise ValueError(
                f"a file of a run has a name of more than {_LONGEST_NAME} bytes: {name[:40]!r}..."
            )
    contents = {name: as_bytes(data) for name, data in files.items()}
    _check_room(contents, limits)
    return contents


def _check_room(files: Mapping[str, bytes], limits: Limits) -> None:
    folders = {str(folder) for name in files for folder in PurePosixPath(name).parents} - {"."}
    if both := sorted(folders & set(files)):
        raise ValueError(f"a file of a run cannot be a folder as well: {both[0]!r}")
    if len(files) + len(folders) > limits.max_files:
        raise ValueError(
            f"a run may have {limits.max_files} files and folders (max_files), and was given "
            f"{len(files) + len(folders)}"
        )
    size = sum(-(-len(data) // _PAGE) * _PAGE for data in files.values())
    if size > limits.disk_bytes:
        raise ValueError(
            f"a run's files may have {limits.disk_bytes} bytes (disk_bytes), and these need {size}"
        )
