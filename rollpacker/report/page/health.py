"""Finds what an operator should know of a run before looking at its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollpacker.report.carrying import why_awaited
from rollpacker.report.summary_table import MANY_LOST
from rollpacker.report.time_book import POOL_CAUSES

MUCH_IDLE = 0.3
"""From this share of the rollout's seconds lost to idle slots in engines, the page says so."""
MUCH_WAIT = 0.1
"""Share of the run's seconds spent on waits for rewards, from which on the page says so."""
MANY_CLIPPED = 0.2
"""Share of the trained responses that end at the length limit, from which on the page says so."""
MANY_SILENT = 0.7
"""Share of the trained groups whose rewards are all equal, from which on the page says so."""
RECENT_STEPS = 20
"""Number of last steps over which metrics are averaged for the page's findings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence on the state of a run, and a level that says how bad that state is."""

    level: Literal["good", "note", "warning", "bad"]
    text: str


def findings(summary: Mapping[str, Any], recent: Mapping[str, float]) -> list[Finding]:
    """The findings on a run with this summary, the worst first. `recent`: mean of each metric over
    the last steps, by name."""
    found = [*_correctness(summary), *_learning(summary, recent), *_speed(summary, recent)]
    order = ("bad", "warning", "note", "good")
    return sorted(found, key=lambda one: order.index(one.level))


def _correctness(summary: Mapping[str, Any]) -> list[Finding]:
    found = []
    if "failed" in summary:
        found.append(Finding("bad", f"The run failed: {summary['failed']}."))
    if summary.get("unsandboxed"):
        found.append(Finding("bad", "Model-written code ran without isolation."))
    if summary.get("weighted_carrying"):
        found.append(Finding("warning", "Weighted carrying: not exact (tokens of older weights)."))
    samples = summary["samples"]
    silent = sum(samples["no_verdict"].values())
    if silent:
        most = max(samples["no_verdict"].items(), key=lambda one: one[1])
        share = silent / max(1, samples["launched"])
        text = f"{silent:,} samples have no verdict ({100 * share:.2g} % of those launched)"
        level: Literal["warning", "note"] = "warning" if share > MANY_LOST else "note"
        found.append(Finding(level, f"{text}. Most often: {most[0]} ({most[1]:,})."))
    if samples["failed"]:
        found.append(
            Finding("warning", f"Engine or environment failed on {samples['failed']:,} samples.")
        )
    for one in summary.get("episodes", {}).get("lost", ()):
        told = f"{one['count']:,} answers of environments were lost ({one['cause']}). The first:"
        found.append(Finding("warning", f"{told} {one['first']}"))
    for name, kind in summary["checks"].items():
        machinery = kind["failed"].get("infrastructure", 0)
        if machinery:
            told = f"{machinery:,} checks of {name} failed by their machinery, not by the answer."
            found.append(Finding("warning", told))
        if kind["timed_out"]:
            found.append(Finding("note", f"{kind['timed_out']:,} checks of {name} timed out."))
    dropped = sum(summary["prompts"]["dropped"].values())
    if dropped:
        after = summary["prompts"].get("dropped_after", {})
        reasons = ", ".join(
            f"{why} ({num:,}{f'; the first after: {after[why]}' if why in after else ''})"
            for why, num in summary["prompts"]["dropped"].items()
        )
        found.append(Finding("note", f"{dropped:,} prompts were dropped: {reasons}."))
    if not found:
        found.append(Finding("good", "Every sample that finished has a verdict."))
    return found


def _learning(summary: Mapping[str, Any], recent: Mapping[str, float]) -> list[Finding]:
    found = []
    silent = recent.get("critic/frac_reward_zero_std")
    if silent is not None and silent >= MANY_SILENT:
        told = f"{100 * silent:.0f} % of the groups teach nothing: their rewards are all equal."
        found.append(Finding("warning", f"Of the last steps, {told}"))
    clipped = recent.get("response_length/clip_ratio")
    if clipped is not None and clipped >= MANY_CLIPPED:
        told = f"{100 * clipped:.0f} % of the responses trained on end at the length limit."
        found.append(Finding("warning", f"Of the last steps, {told}"))
    shift = summary["lengths"]["shift"]
    if shift is not None and abs(shift) > 0.05:
        told = f"Responses trained on are {100 * abs(shift):.0f} % "
        told += f"{'longer' if shift > 0 else 'shorter'} than the policy's own."
        found.append(Finding("note", told))
    evaluated = [one for one in summary["evaluations"] if one.get("eval/pass@1") is not None]
    known = [one["eval/pass@1"] for one in evaluated]
    if len(known) > 1:
        told = f"Held-out pass@1 went from {known[0]:.3f} to {known[-1]:.3f}"
        errors = [one.get("eval/stderr/pass@1") for one in (evaluated[0], evaluated[-1])]
        told_apart = None in errors or abs(known[-1] - known[0]) > 2 * math.hypot(*errors)
        best = max(known)
        if known[-1] < best - 0.05:
            found.append(Finding("warning", f"{told}, below its best of {best:.3f}."))
        elif not told_apart:
            found.append(
                Finding("note", f"{told}: within two standard errors, so it may be chance.")
            )
        else:
            level: Literal["good", "note"] = "good" if known[-1] > known[0] else "note"
            found.append(Finding(level, f"{told}."))
    return found


def _speed(summary: Mapping[str, Any], recent: Mapping[str, float]) -> list[Finding]:
    found = []
    idle = recent.get("perf/tail_idle_ratio")
    if idle is not None and idle >= MUCH_IDLE:
        told = (
            f"Slots stood empty for {100 * idle:.0f} % of the rollout's seconds in the last steps."
        )
        found.append(Finding("note", told))
    if awaited := why_awaited(summary["carrying"] or {"rounds_awaited": 0}):
        found.append(Finding("note", awaited))
    wall = summary["wall_s"] - sum(summary["seconds"].get(cause, 0.0) for cause in POOL_CAUSES)
    waited = summary["seconds"].get("reward_wait", 0.0)
    if wall and waited / wall >= MUCH_WAIT:
        found.append(
            Finding(
                "warning", f"{100 * waited / wall:.0f} % of the time went to waiting for rewards."
            )
        )
    pipeline = summary.get("pipeline", {"links": (), "stages": ()})
    places = [(f"Pipeline link {x['link']}-{x['link'] + 1}", x) for x in pipeline["links"]]
    places += [(f"Pipeline stage {x['stage']}", x) for x in pipeline["stages"]]
    for name, one in places:
        if one["slow_since"] is not None:
            found.append(Finding("warning", f"{name} is slow since step {one['slow_since']}."))
    if summary["sessions"] > 1:
        found.append(Finding("note", f"The run was taken up {summary['sessions'] - 1} times."))
    return found
