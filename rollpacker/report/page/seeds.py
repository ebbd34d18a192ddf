"""Runs that differ in nothing but their seed, taken together.

How far a run gets depends on its seed, often by more than two settings lie apart. Only several
seeds of each say how much."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NOT_THE_SAME = ("name", "seed", "runs_dir")
"""Settings in which the runs of a group may differ."""


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs of the same settings, and their last pass@1 on held-out prompts."""

    names: tuple[str, ...]
    seeds: int
    """So many different ones. Runs of one seed are no independent draws: their mean counts."""
    steps: tuple[int, ...]
    """The steps after which it was evaluated, each once, sorted."""
    mean: float | None
    deviation: float | None
    """Over the seeds. None: runs of fewer than two of them were evaluated."""
    difference: float | None
    """The mean minus the first group's. None for the first group."""
    error: float | None
    """The difference's standard error over seeds. None: a group has no deviation."""

    @property
    def means(self) -> list[float]:
        return [] if self.mean is None else [self.mean]

    @property
    def deviations(self) -> list[float]:
        return [] if self.deviation is None else [self.deviation]

    @property
    def told_steps(self) -> str:
        """Several where the runs of the group did not come equally far."""
        return ", ".join(f"{step:,}" for step in self.steps) or "-"

    @property
    def told_difference(self) -> str:
        if self.difference is None:
            return "-"
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.difference:+.3f}{error}"

    def plain(self) -> dict[str, Any]:
        """For the page."""
        return {
            "names": list(self.names),
            "seeds": self.seeds,
            "steps": self.told_steps,
            "mean": self.mean,
            "deviation": self.deviation,
            "difference": self.told_difference,
        }


def seed_groups(runs: Sequence[Mapping[str, Any]]) -> list[SeedGroup]:
    """In the order of their first runs, as `RunBook.plain` tells these. Empty: no two runs have the
    same settings and different seeds."""
    gathered: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for number, run in enumerate(runs):
        if not run["settings"]:  # not known
            gathered[(("run", str(number)),)] = [run]
            continue
        settings = sorted((key, value) for key, value, _ in run["settings"])
        same = tuple(one for one in settings if one[0] not in _NOT_THE_SAME)
        gathered.setdefault(same, []).append(run)
    if all(len({_seed(run) for run in group}) == 1 for group in gathered.values()):
        return []
    found: list[SeedGroup] = []
    first: list[float] = []
    for group in gathered.values():
        steps: set[int] = set()
        by_seed: dict[str | None, list[float]] = {}
        for run in group:
            last = _last(run)
            if last is not None:
                steps.add(last[0])
                by_seed.setdefault(_seed(run), []).append(last[1])
        passes = [statistics.fmean(passed) for passed in by_seed.values()]
        first = first if found else passes
        found.append(
            SeedGroup(
                names=tuple(run["name"] for run in group),
                seeds=len({_seed(run) for run in group}),
                steps=tuple(sorted(steps)),
                mean=statistics.fmean(passes) if passes else None,
                deviation=statistics.stdev(passes) if len(passes) > 1 else None,
                **_difference(first, passes if found else []),
            )
        )
    return found


def _difference(first: Sequence[float], other: Sequence[float]) -> dict[str, float | None]:
    if not first or not other:
        return {"difference": None, "error": None}
    enough = len(first) > 1 and len(other) > 1
    squares = [statistics.variance(one) / len(one) for one in (first, other)] if enough else []
    difference = statistics.fmean(other) - statistics.fmean(first)
    return {"difference": difference, "error": math.sqrt(sum(squares)) if enough else None}


def _seed(run: Mapping[str, Any]) -> str | None:
    """None: it has the default's."""
    return next((value for key, value, _ in run["settings"] if key == "seed"), None)


def _last(run: Mapping[str, Any]) -> tuple[int, float] | None:
    """Step and pass@1 of the last evaluation that has one."""
    known = [row for row in run["summary"]["evaluations"] if row.get("eval/pass@1") is not None]
    return (known[-1]["step"], known[-1]["eval/pass@1"]) if known else None
