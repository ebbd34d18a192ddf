"""Draws docs/timeline.png: the same steps of the quickstart with and without tail batching.

Both runs start from the quickstart's warmed-up model (`make quickstart` leaves it in runs/).

    python docs/make_timeline.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import rollpacker
from rollpacker.report.timeline import draw_comparison

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5


def run(folder: str, name: str, *, enabled: bool) -> Path:
    """The event log of a short run."""
    overrides = [
        f"name={name}",
        f"runs_dir={folder}",
        f"tail_batching.enabled={str(enabled).lower()}",
        f"train.steps={STEPS}",
        "eval.max_prompts=1",
        "eval.every_steps=null",
    ]
    return rollpacker.train(ROOT / "configs/quickstart.yaml", overrides).folder / "events.jsonl"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with_tail_batching = run(folder, "with", enabled=True)
        without = run(folder, "without", enabled=False)
        draw_comparison(
            with_tail_batching, without, ROOT / "docs/timeline.png", steps=range(1, STEPS + 1)
        )


if __name__ == "__main__":
    main()
