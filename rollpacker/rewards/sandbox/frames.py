"""What is sent to a zygote (`zygote.py` has the formats), checked on this side."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rollpacker.rewards.sandbox import zygote
from rollpacker.rewards.sandbox.base import Limits


def header(kind: bytes, run_id: int, limits: Limits, size: int) -> bytes:
    """The fixed part of a request, before a payload of so many bytes."""
    return zygote.REQUEST.pack(
        *(zygote.MAGIC, kind, run_id, limits.wall_s, cpu_limit_s(limits), limits.memory_bytes),
        *(limits.output_bytes, limits.disk_bytes, limits.max_files, size),
    )


def cpu_limit_s(limits: Limits) -> float:
    return math.ceil(limits.wall_s) + 1 if limits.cpu_s is None else limits.cpu_s


def payload(program: str, stdin: str | bytes, files: Mapping[str, str | bytes]) -> bytes:
    """Raises ValueError for a file name that leaves the folder."""
    parts = [_field(as_bytes(program)), _field(as_bytes(stdin)), zygote.LENGTH.pack(len(files))]
    for name, data in checked_files(files).items():
        parts += (_field(as_bytes(name)), _field(data))
    return b"".join(parts)


def _field(data: bytes) -> bytes:
    return zygote.LENGTH.pack(len(data)) + data


def as_bytes(value: str | bytes) -> bytes:
    """Lone surrogates go through: what is wrong with them is for the interpreter to say."""
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


def checked_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    """Relative file names and contents. Raises ValueError for a name that leaves the folder."""
    for name in files:
        parts = name.split("/")
        if "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(
                f"a file of a run needs a relative name inside its folder, not {name!r}"
            )
        if any(len(as_bytes(part)) > 255 for part in parts):
            raise ValueError(f"a file of a run has a name of more than 255 bytes: {name[:40]!r}...")
    return {name: as_bytes(data) for name, data in files.items()}
