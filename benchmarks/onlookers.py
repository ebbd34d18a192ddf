"""What those who look on cost a run: trackers, and a dashboard with a page that asks every second.

The same run, warmed-up quickstart, with nobody, with each tracker in its offline or local mode, and
with `rollpacker dash` in a process of its own and one browser's questions put to it. Arms take
turns; each run has a process of its own. A step of the quickstart takes a quarter of a second; the
large one, with more and longer responses, takes seconds. All share the machine's processors, as
they would at somebody's desk. CPU seconds of the dashboard are its own, read from the system.

    python benchmarks/onlookers.py [--blocks 3]

Needs the warmed-up model (`make quickstart`) and the packages of the four trackers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import ROOT, bench, turns

CONFIG = "configs/quickstart.yaml"
OVERRIDES = [
    *("eval.every_steps=null", "eval.max_prompts=1", "checkpoint.every_steps=1000000"),
    *("train.threads=1", "name=looked-at"),
]
SIZES = {
    "quickstart": ["train.steps=60"],
    "large": ["train.steps=12", "rollout.prompts_per_step=96", "rollout.samples_per_prompt=16"],
}
TRACKERS = ("wandb", "mlflow", "trackio", "swanlab")
ARMS = {"quickstart": ("nobody", "dash", *TRACKERS), "large": ("nobody", "dash")}
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}
FIRST_STEPS = 3
"""Left out: compiling, first files, libraries that are still being imported."""


def run(size: str, arm: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*OVERRIDES, *SIZES[size], f"runs_dir={folder}"]
        if arm in TRACKERS:
            words.append(f"trackers=[{arm}]")
        environment = {**os.environ, **OFFLINE, "HOME": name, "TRACKIO_DIR": f"{name}/trackio"}
        command = [sys.executable, "-m", "rollpacker", "train", CONFIG, *words]
        found: dict[str, float] = {}
        training = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if arm == "dash":
            found = looked_at(folder, training)
        _, said = training.communicate()
        if training.returncode:
            raise RuntimeError(said.decode())
        if arm in TRACKERS and b"goes on without" in said:
            raise RuntimeError(said.decode())
        lines = (folder / "looked-at" / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "timing_s/step" in row]
    steps = [row["timing_s/step"] for row in rows[FIRST_STEPS:-1]]
    return {"step_s": sum(steps) / len(steps), **found}


def looked_at(folder: Path, training: subprocess.Popen[bytes]) -> dict[str, float]:
    """Ask as a page does, until the run is over."""
    while not (folder / "looked-at" / "events.jsonl").exists() and training.poll() is None:
        time.sleep(0.05)
    command = [sys.executable, "-m", "rollpacker", "dash", str(folder), "--port", "0"]
    dash = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert dash.stdout is not None
    line = dash.stdout.readline()
    address = "http://" + line.partition("http://")[2].split()[0].rstrip("/")
    version, began, cpu_s, num = "", time.perf_counter(), 0.0, 0
    at_start_s = cpu_seconds(dash.pid)  # what it took to start is paid once
    try:
        while training.poll() is None:
            have = urllib.parse.quote(version)
            with urllib.request.urlopen(f"{address}/api/run/looked-at?have={have}") as answer:
                body = answer.read()
            version = state_of(answer.headers["Content-Type"], body).get("version", version)
            num += 1
            cpu_s = cpu_seconds(dash.pid) - at_start_s
            time.sleep(1.0)
    finally:
        dash.terminate()
        dash.wait()
    return {"dash_cpu_share": cpu_s / (time.perf_counter() - began), "looks": num}


def state_of(kind: str, body: bytes) -> dict[str, Any]:
    """What a page keeps of an answer: the version that it has now (see report/page/packing.py)."""
    head = body if kind == "application/json" else body[8 : 8 + int.from_bytes(body[4:8], "little")]
    found: dict[str, Any] = json.loads(head)
    return found.get("state", found)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(blocks: int = 3) -> dict[str, Any]:
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        size: {arm: [] for arm in arms} for size, arms in ARMS.items()
    }
    for size, arms in ARMS.items():
        for block, arm in turns(arms, blocks):
            found[size][arm].append(run(size, arm))
            print(block, size, arm, found[size][arm][-1], flush=True)
    return {
        "blocks": blocks,
        "results": {
            size: {arm: summed(runs, of["nobody"]) for arm, runs in of.items()}
            for size, of in found.items()
        },
    }


def summed(runs: Sequence[dict[str, float]], alone: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Of the runs of one arm: seconds of a step, and those over a run's with no onlooker."""
    pairs = zip(runs, alone, strict=True)
    told: dict[str, Any] = {
        "step_s": statistics.median(one["step_s"] for one in runs),
        "ratios": [one["step_s"] / base["step_s"] for one, base in pairs],
    }
    shares = [one["dash_cpu_share"] for one in runs if "dash_cpu_share" in one]
    return told | ({"dash_cpu_share": statistics.median(shares)} if shares else {})


if __name__ == "__main__":
    bench(main)
