"""Files that are complete or not there at all, and texts that are no more than texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to: it takes `path`'s place, or is removed if writing fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def printable(text: str) -> str:
    """The text with control characters, half surrogates and what turns the direction of writing
    told as `\\xNN` or `\\uNNNN`: no terminal obeys it, and every file can hold it."""
    if text.isprintable():
        return text
    clean = text.encode("utf-8", "backslashreplace").decode()
    return "".join(one if one.isprintable() else _code(one) for one in clean)


def _code(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def clock(seconds: float) -> str:
    """Seconds for people: "12.3 s", "4:05", "1:02:03"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
