"""Environments that hang and environments that are slow: what a run of several turns waits for.

Real runs of a small model that plays 3 to 8 turns with an environment whose answers take a second
on average; one of 20 episodes hangs, another one of 20 is ten times slower. All seconds of
environments, deadlines and hangs are divided by `SCALE`; those of engine and trainer are not.

    as_it_is       what a user gets: races (tail batching) and adaptive deadlines
    neither        no races, and no deadline but the hang's own end after 600 s, the default of the
                   HTTP clients by which environments are reached most (httpx as openai sets it)
    fixed_60_s     no races; 60 s for every answer, the default of `environment.timeout_s`

In each block `neither` runs beside the others. An episode says a number of its own by its reward;
one that hangs writes it to a file, in which what was trained on is looked up.

    python benchmarks/turns_nobody_waits.py [--blocks 3]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import ROOT, bench, metrics

from tests.run.test_turns import save_model

SCALE = 10.0
HANG_S, FIXED_S = 600.0, 60.0
SOURCE = """
import hashlib, os, random, time

SCALE, HANG_S = {scale}, {hang_s}

def write(name, text):
    with open(name, "a") as file:  # short lines: whole ones, whoever else writes
        file.write(text + chr(10))

class Waits:
    def reset(self, row):
        self.random = random.SystemRandom()
        self.last = 3 + row["seed"] % 6
        self.turn, self.number = 0, self.random.uniform(1, 2)
        chance = self.random.random()
        self.hangs_at = self.random.randint(1, self.last) if chance < 0.05 else 0
        self.times = 10 if 0.05 <= chance < 0.1 else 1
        return [{{"role": "user", "content": f"Begin {{row['number']}}."}}]

    def step(self, message):
        self.turn += 1
        if self.turn == self.hangs_at:
            write("hung.txt", repr(self.number))
            time.sleep(HANG_S / SCALE)
            raise TimeoutError("nobody answered")
        time.sleep(self.times * self.random.expovariate(1) / SCALE)
        reward = self.number if self.turn == 1 else 0.0
        return [{{"role": "user", "content": "Go on."}}], reward, self.turn == self.last
"""
ADAPTIVE = f"import rollpacker.run.parts.environments as e; e.SLOW_S = {30.0 / SCALE}"
FIXED = "import rollpacker.run.parts.environments as e; e.SLOW_S = 1e9"
NO_RACES = "tail_batching.enabled=false"
ARMS: dict[str, tuple[str, float, tuple[str, ...], int]] = {
    "as_it_is": (ADAPTIVE, FIXED_S, (), 8),
    "neither": (FIXED, 2 * HANG_S, (NO_RACES,), 3),
    "fixed_60_s": (FIXED, FIXED_S, (NO_RACES,), 4),
}
"""Code that is executed before, seconds that an answer may take, overrides, and steps."""
LONGEST_S = 1800.0
NUM_ROWS = 512
SAMPLES = 4
PROMPTS = 8


def write_run(folder: Path, *, model: Path) -> None:
    """A folder in which `start` runs."""
    source = SOURCE.format(scale=SCALE, hang_s=HANG_S)
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
        "environment": {"function": "played.py:Waits", "max_turns": 8, "workers": 2},
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
    return [row["timing_s/step"] for row in metrics(run) if "timing_s/step" in row]


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
    """Rows that the run has kept of the samples that were trained on."""
    import pyarrow.parquet

    found: list[dict[str, Any]] = []
    for path in sorted((run / "samples").glob("*.parquet")):
        found += [r for r in pyarrow.parquet.read_table(path).to_pylist() if r["trained"]]
    return found


def waited(folder: Path, arm: str) -> dict[str, Any]:
    """One run of this arm."""
    code, limit_s, overrides, steps = ARMS[arm]
    folder.mkdir()
    write_run(folder, model=folder.parent / "model")
    timeout = f"environment.timeout_s={limit_s / SCALE}"
    said = folder / "said.txt"
    run = start(folder, timeout, f"train.steps={steps}", *overrides, code=code, said=said)
    assert run.wait(LONGEST_S) == 0, said.read_text()
    found = entries(folder / "runs/run")
    acted = [one for one in found if one.get("event") == "Acted"]
    late = {one["sample"] for one in acted if one.get("cause")}
    samples, rows = trained(found), rows_of(folder / "runs/run")
    hung = lines(folder / "hung.txt")
    cut_off = [row for row in rows if row["finish_reason"] == "length"]
    seconds = steps_s(folder / "runs/run")
    return {
        "steps": len(seconds),
        "seconds": round(sum(seconds), 2),
        "step_s": [round(one, 2) for one in seconds],
        "episodes_that_hung": len(hung),
        "answers_lost": dict(Counter(one["cause"] for one in acted if one.get("cause"))),
        "trained": len(samples),
        "trained_and_lost": len(late.intersection(samples)),
        "trained_and_hung": len(hung & {repr(row["reward"]) for row in rows}),
        "zeros_that_no_limit_explains": sum(not row["reward"] for row in rows)
        - sum(not row["reward"] for row in cut_off),
        "trained_twice": len(samples) - len(set(samples)),
        "rows": len(rows),
    }


def lines(path: Path) -> set[str]:
    return set(path.read_text().splitlines()) if path.exists() else set()


def waits(blocks: int, folder: Path) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    save_model(folder / "model", max_positions=1024)

    def run(arms: tuple[str, ...], block: int) -> None:
        for arm in arms:
            found[arm].append(waited(folder / f"{arm}-{block}", arm))
            print(arm, found[arm][-1], flush=True)

    for block in range(blocks):
        beside = threading.Thread(target=run, args=(("neither",), block))
        beside.start()
        run(("as_it_is", "fixed_60_s"), block)
        beside.join()
    rates = {
        arm: [60 * one["steps"] / one["seconds"] for one in runs] for arm, runs in found.items()
    }
    names = ("trained_and_lost", "trained_and_hung", "zeros_that_no_limit_explains")
    ratios = {
        arm: [own / other for own, other in zip(rates["as_it_is"], of, strict=True)]
        for arm, of in rates.items()
    }
    return {
        "scale": SCALE,
        "steps_a_minute": {arm: [round(r, 2) for r in of] for arm, of in rates.items()},
        "as_it_is_over": {
            arm: {"median": round(statistics.median(of), 2), "least": round(min(of), 2)}
            for arm, of in ratios.items()
            if arm != "as_it_is"
        },
        "hung_and_trained_on": sum(
            one[name] for runs in found.values() for one in runs for name in names
        ),
        "runs": found,
    }


def main(blocks: int = 3) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return waits(blocks, Path(folder))


if __name__ == "__main__":
    bench(main)
