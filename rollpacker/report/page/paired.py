"""How far two runs' held-out pass@1 lie apart, prompt by prompt.

Prompts differ in how hard they are far more than runs do. Where both runs answered the same ones,
the difference on each of them tells the runs apart with a much smaller error than two averages."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Prompt = tuple[str, str]
"""Id and text: rows of another data set may have the same ids."""


def paired_differences(folders: Sequence[Path]) -> list[dict[str, Any] | None]:
    """Each run's last evaluation minus the first run's, over the prompts that both have.

    `difference` of pass@1, its standard `error` (None: a single prompt has none), `prompts`, and
    the `steps` that were evaluated, the first run's first. None for the first run itself, and for
    one that shares no prompt with it or saved no evaluation."""
    base = last_evaluation(folders[0])
    found: list[dict[str, Any] | None] = [None]
    for folder in folders[1:]:
        other = last_evaluation(folder)
        found.append(_difference(base, other) if base and other else None)
    return found


def last_evaluation(folder: Path) -> tuple[int, dict[Prompt, float]] | None:
    """The step, and each prompt's share of passed responses among those with a verdict."""
    import pyarrow.parquet

    paths = sorted((folder / "evaluations").glob("step_*.parquet"))
    if not paths:
        return None
    names = ["step", "prompt_id", "prompt", "passed"]
    try:
        rows = pyarrow.parquet.read_table(paths[-1], columns=names).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        logger.warning("%s cannot be read: %s", paths[-1], str(error).split("\n")[0])
        return None
    passed: dict[Prompt, list[bool]] = {}
    for row in rows:
        if row["passed"] is not None:
            passed.setdefault((row["prompt_id"], row["prompt"] or ""), []).append(row["passed"])
    shares = {prompt: statistics.fmean(of_prompt) for prompt, of_prompt in passed.items()}
    return (int(rows[0]["step"]), shares) if shares else None


def _difference(
    base: tuple[int, dict[Prompt, float]], other: tuple[int, dict[Prompt, float]]
) -> dict[str, Any] | None:
    differences = [
        share - base[1][prompt] for prompt, share in other[1].items() if prompt in base[1]
    ]
    if not differences:
        return None
    num = len(differences)
    error = statistics.stdev(differences) / math.sqrt(num) if num > 1 else None
    return {
        "difference": statistics.fmean(differences),
        "error": error,
        "prompts": num,
        "steps": [base[0], other[0]],
    }
