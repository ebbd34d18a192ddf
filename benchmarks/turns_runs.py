"""What the benchmarks of several turns share: a tiny model with a chat template, and the config of
a run over trajectories. Real engine, trainer, controller and processes of environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import ROOT

sys.path.insert(0, str(ROOT))  # for the tests' model

NUM_ROWS = 512
SAMPLES = 4
PROMPTS = 8


def write_model(folder: Path) -> None:
    """With random weights: what it says does not matter."""
    from tests.run.test_turns import save_model

    save_model(folder, max_positions=1024)


def write_run(folder: Path, environment: str, source: str, *, model: Path) -> None:
    """A folder in which `start` runs. `source`: the file in which the class `environment` is."""
    (folder / "played.py").write_text(source)
    rows = [{"prompt": f"Row {n}", "number": n} for n in range(NUM_ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "run",
        "model": {"path": str(model)},
        "data": {
            "train": {"kind": "jsonl", "path": "rows.jsonl", "chat": True},
            "max_prompt_tokens": 64,
        },
        "environment": {"function": f"played.py:{environment}", "max_turns": 8, "workers": 2},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": 16,
            "stop": ["a", "e", "i", "o", "t", "s"],
        },
        "rewards": [{"function": "environment"}],
        "train": {"steps": 9, "learning_rate": 1e-4, "threads": 1},
        "checkpoint": {"every_steps": 1_000_000},
    }
    (folder / "run.yaml").write_text(json.dumps(config))  # JSON is YAML


def start(
    folder: Path, *overrides: str, code: str = "", said: Path | None = None
) -> subprocess.Popen[bytes]:
    """The run, in a process of its own, whose folder is `folder`. `code` is executed before it;
    `said`: the file for what it says."""
    arguments = ["train", "run.yaml", *overrides]
    program = f"{code}\nfrom rollpacker.cli.main import main\nraise SystemExit(main({arguments!r}))"
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    out = subprocess.DEVNULL if said is None else said.open("wb")
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=out,
        stderr=out,
        start_new_session=True,
    )


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def steps_s(run: Path) -> list[float]:
    """Seconds of each step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row["timing_s/step"] for row in map(json.loads, lines) if "timing_s/step" in row]


def trained(found: Sequence[dict[str, Any]]) -> list[str]:
    """Samples, as often as they were trained on."""
    return [
        sample
        for one in found
        for command in one.get("commands", ())
        if command["command"] == "TrainOn"
        for group in command["groups"]
        for sample in group
    ]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """What the run has kept of each sample that was trained on."""
    import pyarrow.parquet

    found: list[dict[str, Any]] = []
    for path in sorted((run / "samples").glob("*.parquet")):
        found += [r for r in pyarrow.parquet.read_table(path).to_pylist() if r["trained"]]
    return found
