"""Shows samples of a run in a terminal: prompt, dialogue or response, and rewards. As models, data
and environments wrote these texts, control characters in them have no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.writing import printable

Row = Mapping[str, Any]
Line = tuple[str, str]
"""A line of text, and the rich style in which it is shown."""
_DRAWN, _GIVEN, _ASIDE = "green", "dim", "cyan"


def chosen(run: str, which: str) -> list[Row]:
    """The rows of the samples to show of a `run` (folder). `which`: a sample's id, or a number of
    samples of the newest step, from best to worst reward. Raises `ValueError` if there are none."""
    paths = sorted((Path(run) / "samples").glob("steps_*.parquet"))
    if not paths:
        raise ValueError(
            f"{run} has no samples yet: they are written with each checkpoint (not with"
            " save_samples=false)"
        )
    if not which.isdigit():
        return [_of_id(run, which, paths)]
    if int(which) < 1:
        raise ValueError("--samples takes a number of at least 1, or a sample's id")
    rows = _rows(paths[-1])
    last = max(row["step"] for row in rows)
    rows = [row for row in rows if row["step"] == last and row["trained"]]
    rows.sort(key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0), row["sample_id"]))
    num = min(int(which), len(rows))
    return [rows[round(n * (len(rows) - 1) / max(num - 1, 1))] for n in range(num)]


def _of_id(run: str, sample: str, paths: Sequence[Path]) -> Row:
    evaluated = sorted((Path(run) / "evaluations").glob("step_*.parquet"))
    for path in (*reversed(paths), *reversed(evaluated)):
        found = _rows(path, sample)
        if found:
            return found[-1]
    raise ValueError(f"{run} has no sample {sample}; ids are as in train/0/3#0.1")


def _rows(path: Path, sample: str | None = None) -> list[dict[str, Any]]:
    import pyarrow.parquet

    only = None if sample is None else [("sample_id", "=", sample)]
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(path, filters=only).to_pylist()
    return found


def lines_of(row: Row) -> Iterator[Line]:
    """Yields the lines that show a sample; the model's own text is marked by ">"."""
    reward = "no verdict" if row["reward"] is None else f"reward {row['reward']:g}"
    told = f"{row['sample_id']}  step {row['step']}, {reward}, {row['num_tokens']} tokens drawn"
    yield printable(f"{told}, ended by {row['finish_reason']}"), "bold"
    dialogue = _read(row.get("dialogue"))
    if dialogue is None:
        yield from _text(" ", row["rendered_prompt"], _GIVEN)
        yield from _text(">", row["completion"], _DRAWN)
    else:
        if not isinstance(dialogue.get("begin"), list):
            yield from _text(" ", row["rendered_prompt"], _GIVEN)
        yield from _dialogue(dialogue)
    yield "", ""


def _read(text: Any) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("turns"), list) else None


def _dialogue(dialogue: Mapping[str, Any]) -> Iterator[Line]:
    begin = dialogue.get("begin")
    for message in begin if isinstance(begin, list) else ():
        yield from _message(" ", message, "messages", _GIVEN)
    turn = 0
    for one in dialogue["turns"]:
        if not isinstance(one, dict):
            turn += one if isinstance(one, int) else 0
            yield from _message(" ", one, "turns", _GIVEN)
            continue
        turn += 1
        yield f"- turn {turn}{_seconds(one, 'policy_s')}", _ASIDE
        yield from _message(">", one.get("message"), "", _DRAWN)
        reward = one.get("reward")
        if reward is not None or one.get("environment_s") is not None:
            told = "no reward" if reward is None else f"reward {reward}"
            yield printable(f"- environment{_seconds(one, 'environment_s')}, {told}"), _ASIDE
        for answer in one.get("answers") or ():
            yield from _message(" ", answer, "messages", _GIVEN)


def _seconds(one: Mapping[str, Any], name: str) -> str:
    value = one.get(name)
    return f", {value:.3f} s" if isinstance(value, int | float) else ""


def _message(mark: str, message: Any, what: str, style: str) -> Iterator[Line]:
    """Yields the lines that show a message of a dialogue, with `mark` before them. A number instead
    of a message stands for as many messages or turns (`what`) that the file leaves out."""
    if not isinstance(message, dict):
        yield printable(f"  ... {message} {what} left out here ..."), _ASIDE
        return
    name = f" {message['name']}" if message.get("name") else ""
    yield printable(f"{mark} [{message.get('role')}{name}]"), style
    if message.get("reasoning_content"):
        yield from _text(f"{mark} (thought)", message["reasoning_content"], style)
    if message.get("content"):
        yield from _text(mark, message["content"], style)
    for name in ("tool_calls", "malformed_tool_calls"):
        calls = message.get(name) or []
        for call in calls if isinstance(calls, list) else [calls]:
            label = "calls" if name == "tool_calls" else "a call that cannot be read:"
            asked = call.get("function", call) if isinstance(call, dict) else call
            yield from _text(f"{mark} {label}", asked, style)


def _text(mark: str, value: Any, style: str) -> Iterator[Line]:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    for line in text.split("\n"):
        yield f"{mark} {printable(line)}", style
