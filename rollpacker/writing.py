"""Writes files that are either complete or not there at all, and makes texts safe to print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a temporary path to write to. At the end the new file replaces `path`; if writing
    raises, the new file is removed and `path` stays as it was. `durable`: a loss of power leaves
    the old file or the whole new one, and the new one once this is over."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        if durable:
            fsync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def printable(text: str) -> str:
    r"""The text with control characters, half surrogates and characters that change the direction
    of writing replaced by `\xNN` or `\uNNNN`, so that it is safe in a terminal and in any file."""
    if text.isprintable():
        return text
    clean = text.encode("utf-8", "backslashreplace").decode()
    return "".join(one if one.isprintable() else _code(one) for one in clean)


def _code(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def clock(seconds: float) -> str:
    """A number of seconds as a text for people: "12.3 s", "4:05", "1:02:03"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
