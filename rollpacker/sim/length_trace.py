"""Reads trace files of response lengths: JSONL with one response or one prompt per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config.document import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Contents of a trace file: either `lengths`, the tokens of each response, or `pools`, for each
    prompt the tokens of its responses."""

    lengths: tuple[int, ...] = ()
    pools: tuple[tuple[int, ...], ...] = ()


def read_trace(path: str) -> Trace:
    """Read the trace file at `path`. Raises `ConfigError` that names the first wrong line and says
    which lines can still be used."""
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{path}: the trace of lengths cannot be read ({reason}). Paths are relative to the "
            "folder that the command is run in."
        ) from None
    lengths: list[int] = []
    pools: list[tuple[int, ...]] = []
    prompts: dict[Any, int] = {}
    for number, line in _lines(content):
        found = _trace_line(line)
        problem = found if isinstance(found, str) else ""
        if not problem and isinstance(found, tuple):
            name, values = found
            if lengths:
                problem = "names a prompt, the lines before do not"
            elif name in prompts:
                problem = f"has the prompt of line {prompts[name]} again"
            else:
                prompts[name] = number
                pools.append(values)
        elif not problem:
            assert isinstance(found, int)
            if pools:
                problem = "names no prompt, the lines before do"
            lengths.append(found)
        if problem:
            raise ConfigError(f"{path}, line {number}: {problem}. {_usable(number)}")
    if not lengths and not pools:
        raise ConfigError(
            f"{path}: the trace holds no lengths. Write one JSON object per line, such as "
            '{"length": 120} or {"prompt": "a", "lengths": [120, 95]}.'
        )
    return Trace(lengths=tuple(lengths), pools=tuple(pools))


def _usable(number: int) -> str:
    if number == 1:
        return "Nothing before it can be used; is it a trace of lengths?"
    before = "The line" if number == 2 else f"The {number - 1} lines"
    return f"{before} before it can be used: head -n {number - 1} keeps what is good."


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    # `splitlines` would also end a line at a carriage return, which JSON allows between values.
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _trace_line(line: bytes) -> int | tuple[str, tuple[int, ...]] | str:
    """Returns the response's length, or a prompt's name and lengths, or a text on what is wrong."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return "is no JSON (cut off?)"
    if not isinstance(value, dict) or ("length" in value) == ("lengths" in value):
        return 'must be {"length": n} or {"prompt": id, "lengths": [n, ...]}'
    if "length" in value:
        length = value["length"]
        problem = f"has the length {_shown(length)}, not a whole number from 1 on"
        return length if _is_length(length) else problem
    lengths, prompt = value["lengths"], value.get("prompt")
    if not isinstance(prompt, str | int):
        return "has lengths, but no prompt with a text or a number as its name"
    if not isinstance(lengths, list) or not lengths or not all(map(_is_length, lengths)):
        return f"has the lengths {_shown(lengths)}, not a list of whole numbers from 1 on"
    return str(prompt), tuple(lengths)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
