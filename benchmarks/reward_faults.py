"""Reward workers killed at random in a real run: is any such failure trained on as a zero?

A small model is trained on programs that run in the sandbox while a thread kills one of the
sandbox's interpreters every now and then (and stops another). Then the event log is read as plain
JSON, without the code that wrote it:

- a check that failed for the machinery is asked for once more, or its sample has no verdict;
- no sample is trained on whose last verdict is a failure, or without a verdict;
- the value trained on is the one in the log, and every verdict answers a question.

    python benchmarks/reward_faults.py
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from lab import bench
from reward_runs import entries, prepare, sandbox_workers, train


class Killer(threading.Thread):
    """Kills, or now and then stops, one of the sandbox's interpreters."""

    def __init__(self, every_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self._every_s = every_s
        self._rng = random.Random(seed)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._every_s * self._rng.uniform(0.5, 1.5)):
            workers = sandbox_workers()
            if not workers:
                continue
            name = "SIGSTOP" if self._rng.random() < 0.2 else "SIGKILL"
            try:
                os.kill(self._rng.choice(workers).pid, getattr(signal, name))
            except ProcessLookupError:
                continue
            self.counts[name] += 1

    def end(self) -> None:
        self._ended.set()
        self.join()


def check_log(log: Path) -> dict[str, Any]:
    """Counts, and problems in words."""
    asked: Counter[str] = Counter()
    last: dict[str, dict[str, Any]] = {}
    counts: Counter[str] = Counter()
    problems: list[str] = []
    pending: set[str] = set()
    for entry in entries(log):
        if entry.get("event") == "SampleScored":
            sample = entry["sample"]
            if sample not in pending:
                problems.append(f"{sample}: a verdict that nobody asked for")
            pending.discard(sample)
            last[sample] = entry
            if entry.get("cause") == "infrastructure":
                counts["infrastructure failures"] += 1
                if entry["value"] is not None:
                    problems.append(f"{sample}: an infrastructure failure has a value")
                again = [
                    command
                    for command in entry.get("commands", ())
                    if command["command"] == "Score" and command["sample"] == sample
                ]
                counts["asked again"] += bool(again)
                counts["given up"] += not again
                if again and again[0]["retry"] != asked[sample]:
                    problems.append(f"{sample}: retry {again[0]['retry']} is miscounted")
        for command in entry.get("commands", ()):
            if command["command"] == "Score":
                asked[command["sample"]] += 1
                pending.add(command["sample"])
            elif command["command"] == "TrainOn":
                for sample in (s for group in command["groups"] for s in group):
                    counts["trained samples"] += 1
                    verdict = last.get(sample)
                    if verdict is None or verdict["value"] is None:
                        problems.append(f"{sample}: trained on without a verdict")
                    elif asked[sample] > 1:
                        counts["trained after a second try"] += 1
    counts["checks"] = sum(asked.values())
    return {"counts": dict(sorted(counts.items())), "problems": problems}


def main(steps: int = 40, every_s: float = 0.7, seed: int = 0) -> dict[str, Any]:
    """`every_s`: mean seconds between kills."""
    prepare()
    killer = Killer(every_s, seed)
    settings = [f"train.steps={steps}", "eval.every_steps=null", "train.learning_rate=1.0e-5"]
    with tempfile.TemporaryDirectory() as folder:
        killer.start()
        log = train("faults", settings, Path(folder))
        killer.end()
        return {"steps": steps, "signals": dict(killer.counts), **check_log(log)}


def holds(found: dict[str, Any]) -> bool:
    """Failures were seen, and none became a verdict."""
    return not found["problems"] and found["counts"].get("infrastructure failures", 0) > 0


if __name__ == "__main__":
    bench(main, holds=holds)
