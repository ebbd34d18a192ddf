"""Summary of a trainer's pipeline stages over a run: how busy they were, which links they used, and
the steps at which a link or stage turned slow. All numbers come from the metrics of steps
(`perf/pipeline/...`)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollpacker.report.step_summary import StepSummary

PREFIX = "perf/pipeline/"
_USUAL_STEPS = 8
"""Number of steps before a link turned slow whose median message time counts as usual."""


def summarize_pipeline(steps: Sequence[StepSummary]) -> dict[str, Any] | None:
    """Return the summary of a run's pipeline stages. Means are over the steps since the layers were
    last split anew. None: the trainer has no stages."""
    rows = [(one.step, _of_pipeline(one.trainer)) for one in steps]
    rows = [(step, row) for step, row in rows if row]
    if not rows:
        return None
    _, last = rows[-1]
    layers = {name: value for name, value in last.items() if name.endswith("/layers")}
    since = len(rows)
    while since and layers.items() <= rows[since - 1][1].items():
        since -= 1
    same = [row for _, row in rows[since:]]
    return {
        "bubble_ratio": _mean(same, "bubble_ratio"),
        "links_used": _kind(last),
        "stages": [
            {
                "stage": number,
                "layers": int(last[f"{name}/layers"]),
                "busy_ratio": _mean(same, f"{name}/busy_ratio"),
                "busy_s": _mean(same, f"{name}/busy_s"),
                "waiting_s": _waiting_s(same, name),
                "live_tokens": max(int(row.get(f"{name}/live_tokens/max", 0)) for row in same),
                "slow_since": _slow_since(rows, name),
            }
            for number, name in _places(last, "stage")
        ],
        "links": [
            {
                "link": number,
                "message_s": _median(same, f"{name}/message_s"),
                "slow_since": _slow_since(rows, name),
            }
            for number, name in _places(last, "link")
        ],
        "events": [
            event
            for at in range(1, len(rows))
            for event in _events(rows[max(at - _USUAL_STEPS, 0) : at], rows[at])
        ],
    }


Row = Mapping[str, float]


def _of_pipeline(metrics: Row) -> dict[str, float]:
    return {
        name.removeprefix(PREFIX): value
        for name, value in metrics.items()
        if name.startswith(PREFIX)
    }


def _events(before: Sequence[tuple[int, Row]], now: tuple[int, Row]) -> Iterator[dict[str, Any]]:
    """Yield the events of the step `now` (its number and metrics) after the steps `before`: a link
    or stage turned slow or well, or links or layers were changed."""
    (step, row), (_, last) = now, before[-1]
    if _kind(row) != _kind(last):
        slow = [number for number, name in _places(last, "link") if last.get(f"{name}/slow")]
        yield {"step": step, "event": "links", "links": _kind(row), "slow_links": slow}
    if "relayout_s" in last:
        layers = [int(row[f"{name}/layers"]) for _, name in _places(row, "stage")]
        yield {"step": step, "event": "layout", "layers": layers, "seconds": last["relayout_s"]}
    for what in ("link", "stage"):
        for number, name in _places(row, what):
            is_slow = bool(row.get(f"{name}/slow"))
            if is_slow == bool(last.get(f"{name}/slow")):
                continue
            event = "slow" if is_slow else "well"
            found: dict[str, Any] = {"step": step, "event": event, what: number}
            if what == "link":
                well = [one for _, one in before if not one.get(f"{name}/slow")]
                found["message_s"] = row.get(f"{name}/message_s")
                found["usual_s"] = _median(well, f"{name}/message_s")
            yield found


def _kind(row: Row) -> str:
    return "host" if row.get("host_links") else "direct"


def _places(row: Row, what: str) -> list[tuple[int, str]]:
    found = {match[1] for name in row if (match := re.match(rf"{what}_(\d+)/", name))}
    return [(number, f"{what}_{number}") for number in sorted(map(int, found))]


def _slow_since(rows: Sequence[tuple[int, Row]], name: str) -> int | None:
    """Return the step since when this stage or link has been slow without a gap. None: it was not
    slow in the last step."""
    since = None
    for step, row in reversed(rows):
        if not row.get(f"{name}/slow"):
            break
        since = step
    return since


def _waiting_s(rows: Sequence[Row], name: str) -> float | None:
    pairs = [(row.get(f"{name}/busy_s"), row.get(f"{name}/busy_ratio")) for row in rows]
    waits = [busy_s / ratio - busy_s for busy_s, ratio in pairs if busy_s and ratio]
    return statistics.fmean(waits) if waits else None


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return statistics.fmean(values) if values else None


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return statistics.median(values) if values else None
