"""Stalls in a real training run: endless programs, and a reward worker that is stopped.

A small model writes one-line programs, of which about 5 % never end; limits are scaled down ten
times. *Deadlines*: steps per second with the adaptive limit against the fixed one, interleaved.
*Stopped worker*: an interpreter of the sandbox is stopped (SIGSTOP) while steps go on: how much
longer do all other checks take than without, and when does the log name it?

    python benchmarks/reward_stalls.py
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lab import bench
from reward_runs import Warnings, entries, prepare, sandbox_workers, step_ends, train

FIXED = "rewards.0.deadline={min_s: 0.2, factor: 1.5, max_s: 3.0, adaptive: false}"
ADAPTIVE = "rewards.0.deadline={min_s: 0.2, factor: 1.5, max_s: 3.0}"
COMMON = ("eval.every_steps=null", "checkpoint.every_steps=1000", "train.learning_rate=1.0e-5")
SKIPPED = 3
"""Steps until the first right answer set the limit."""


def steps_per_s(log: Path) -> float:
    ends = step_ends(log)[SKIPPED:]
    return (len(ends) - 1) / (ends[-1] - ends[0])


def verdicts(log: Path) -> list[dict[str, Any]]:
    return [
        entry
        for entry in entries(log)
        if entry.get("event") == "SampleScored" and entry.get("cause") != "cancelled"
    ]


def deadlines(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"fixed": [], "adaptive": []}
    endless: list[float] = []
    rewards: dict[str, list[float]] = {"fixed": [], "adaptive": []}
    for number in range(rounds):
        for arm, setting in (("fixed", FIXED), ("adaptive", ADAPTIVE)):
            overrides = (setting, f"train.steps={steps}", f"seed={number}", *COMMON)
            log = train(f"{arm}-{number}", overrides, folder)
            speeds[arm].append(steps_per_s(log))
            found = verdicts(log)
            rewards[arm].append(
                statistics.fmean(v["value"] for v in found if v["value"] is not None)
            )
            if arm == "fixed":
                endless.append(sum(v["timed_out"] for v in found) / len(found))
            print(f"  {arm:8} seed {number}: {speeds[arm][-1]:.3f} steps/s", flush=True)
    ratios = [a / f for a, f in zip(speeds["adaptive"], speeds["fixed"], strict=True)]
    return {
        "steps_per_s": speeds,
        "ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "endless_share": statistics.fmean(endless),
        "mean_reward": {arm: statistics.fmean(values) for arm, values in rewards.items()},
    }


class Stopper(threading.Thread):
    """Stops one interpreter of the sandbox, again and again, and remembers when."""

    def __init__(self, every_s: float) -> None:
        super().__init__(daemon=True)
        self.stopped: list[tuple[float, int]] = []
        self._every_s = every_s
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            workers = [worker for worker in sandbox_workers() if worker.state != "T"]
            if workers:
                try:
                    os.kill(workers[0].pid, signal.SIGSTOP)
                except ProcessLookupError:
                    continue
                self.stopped.append((time.time(), workers[0].pid))

    def end(self) -> None:
        self._ended.set()
        self.join()


def stopped_worker(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Runs without endless programs' noise in the comparison: the same seeds with and without."""
    ratios: list[float] = []
    named_after: list[float] = []
    unnamed = 0
    for number in range(rounds):
        overrides = (ADAPTIVE, f"train.steps={steps}", f"seed={number}", *COMMON)
        plain = _check_time(train(f"plain-{number}", overrides, folder))
        heard, stopper = Warnings(), Stopper(every_s=4.0)
        logging.getLogger("rollpacker").addHandler(heard)
        stopper.start()
        log = train(f"stopped-{number}", overrides, folder)
        stopper.end()
        logging.getLogger("rollpacker").removeHandler(heard)
        ratios.append(_check_time(log) / plain)
        for when, pid in stopper.stopped:
            lines = [t for t, line in heard.lines if str(pid) in line and t >= when]
            unnamed += not lines
            named_after += [lines[0] - when] if lines else []
        print(number, len(stopper.stopped), "stopped; other checks over without:", ratios[-1])
    return {
        "others_time_ratio": statistics.geometric_mean(ratios),
        "ratios": ratios,
        "stopped": len(named_after) + unnamed,
        "not_named": unnamed,
        "named_after_s": {
            "median": statistics.median(named_after) if named_after else None,
            "max": max(named_after, default=None),
        },
    }


def _check_time(log: Path) -> float:
    """Mean seconds of a check in which nothing failed, its queue included."""
    asked: dict[str, float] = {}
    ready: dict[str, float] = {}
    took: list[float] = []
    for entry in entries(log):
        if entry.get("event") == "SampleGenerated":
            ready[entry["sample"]] = entry["t"]
        elif entry.get("event") == "SampleScored":
            undisturbed = not (entry["cause"] or entry["timed_out"] or asked[entry["sample"]])
            if undisturbed:
                took.append(entry["t"] - ready[entry["sample"]])
        for command in entry.get("commands", ()):
            if command["command"] == "Score":
                asked[command["sample"]] = command["retry"]
    return statistics.fmean(took)


def main(steps: int = 30, rounds: int = 3) -> dict[str, Any]:
    prepare()
    with tempfile.TemporaryDirectory() as name:
        return {
            "deadlines": deadlines(Path(name), steps, rounds),
            "stopped_worker": stopped_worker(Path(name), steps, rounds),
        }


if __name__ == "__main__":
    bench(main)
