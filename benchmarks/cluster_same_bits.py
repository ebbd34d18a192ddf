"""Jobs that share pools compute what they compute alone: two real runs, one rollout pool, one
training pool.

Each job is trained alone, and then beside the other, in turns (`tests/cluster_phase/file_seat.py`,
where a pool is a lock that both want). Compared by SHA-256: weights, optimizer, schedule, cursor,
ledger with queues, metrics. One job carries tokens of deferred prompts; the other evaluates. In a
second arm one is killed after every step and resumed; in a third, interrupted by Ctrl-C while it
waits. That no pool was two jobs' is read from what seats wrote; `exactly_once.py` checks the logs.

    python benchmarks/cluster_same_bits.py [--steps 4] [--quick]
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from exactly_once import check
from lab import bench
from resume import committed, run, start, write_config, write_model
from resume import fingerprints as all_fingerprints

from tests.cluster_phase.file_seat import handed_over, sit, turns, two_at_once

PROCESSES = ("train.processes=1", "checkpoint.every_steps=1")
JOBS = {
    "carrying": (*PROCESSES, "tail_batching.prompt_factor=1.5"),
    "evaluating": (*PROCESSES, "seed=3", "data.eval_fraction=0.2", "eval.every_steps=2"),
}


def fingerprints(run: Path) -> dict[str, str]:
    """Of a run's last checkpoint, without how long it waited for pools."""
    newest = (run / "checkpoints" / "latest").read_text().strip()
    path = run / "checkpoints" / newest / "state.json"
    state = json.loads(path.read_text())
    state["job"].pop("waited_s", None)
    path.write_text(json.dumps(state))
    return all_fingerprints(run)


def train(config: Path, job: str, seats: Path, **settings: Any) -> Any:
    """In a process of its own, which is returned, with a seat there."""
    return start(
        config,
        f"{job}-{seats.name}",
        prepare=partial(sit, seats, job),
        overrides=JOBS[job],
        **settings,
    )


def interrupt_at(condition: Callable[[], bool]) -> None:
    """In the run's own process, as Ctrl-C does."""

    def work() -> None:
        while not condition():
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=work, daemon=True).start()


def has_no_pool(seats: Path, job: str) -> bool:
    """It has taken a step, and has no pool."""
    of_job = [turn for turn in turns(seats) if turn["job"] == job]
    steps = sum(turn["what"] == "committed" for turn in of_job)
    return steps >= 1 and of_job[-1]["what"] in ("left", "committed")


def sit_and_be_interrupted(seats: Path, job: str) -> None:
    sit(seats, job)
    interrupt_at(partial(has_no_pool, seats, job))


def together(config: Path, runs: Path) -> Path:
    """Both, at the same time. Returns where their seats are."""
    seats = runs.parent / "shared"
    processes = [train(config, job, seats) for job in JOBS]
    for process in processes:
        process.join()
        assert process.exitcode == 0, process.exitcode
    return seats


def killed_again_and_again(config: Path, runs: Path, steps: int) -> tuple[Path, int]:
    """The first, after each of its steps, while the second goes on; or as long as that lasts."""
    seats = runs.parent / "killed"
    first, second = JOBS
    other = train(config, second, seats)
    kills = 0
    for step in range(1, steps + 1):
        process = train(config, first, seats, resume=kills > 0, kill=committed(step))
        process.join()
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        kills += 1
    last = train(config, first, seats, resume=True)
    for process in (last, other):
        process.join()
        assert process.exitcode == 0, process.exitcode
    return seats, kills


def interrupted(config: Path, runs: Path) -> Path:
    """The first, by Ctrl-C while it waits for its turn; resumed then."""
    seats = runs.parent / "interrupted"
    first, second = JOBS
    other = train(config, second, seats)
    name = f"{first}-{seats.name}"
    process = start(
        config,
        name,
        prepare=partial(sit_and_be_interrupted, seats, first),
        overrides=JOBS[first],
    )
    process.join()
    assert process.exitcode == 0, process.exitcode
    newest = (runs / name / "checkpoints" / "latest").read_text()
    assert newest != (runs / f"{first}-alone" / "checkpoints" / "latest").read_text(), "it ended"
    last = train(config, first, seats, resume=True)
    for process in (last, other):
        process.join()
        assert process.exitcode == 0, process.exitcode
    return seats


def compared(runs: Path, seats: Path) -> dict[str, Any]:
    """Name the parts in which runs differ from the same jobs alone."""
    found: dict[str, Any] = {"two_at_once": two_at_once(seats), "handed_over": handed_over(seats)}
    for job in JOBS:
        alone = fingerprints(runs / f"{job}-alone")
        shared = fingerprints(runs / f"{job}-{seats.name}")
        problems = check(runs / f"{job}-{seats.name}" / "events.jsonl")["problems"]
        different = [part for part in alone if alone[part] != shared[part]]
        found[job] = {"sha256": shared, "different": different, "problems": problems}
    return found


def is_good(arm: dict[str, Any]) -> bool:
    clean = not any(arm[job]["different"] or arm[job]["problems"] for job in JOBS)
    return clean and not arm["two_at_once"] and min(arm["handed_over"].values()) >= 2


def measure(steps: int) -> dict[str, Any]:
    import torch
    import transformers  # noqa: F401  (imported once, before the forks)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model")
        config, runs = write_config(folder, steps), folder / "runs"
        for job, overrides in JOBS.items():
            assert run(config, f"{job}-alone", overrides=overrides) == 0
        arms: dict[str, Any] = {"shared": compared(runs, together(config, runs))}
        killed, kills = killed_again_and_again(config, runs, steps)
        arms["killed"] = {**compared(runs, killed), "kills": kills}
        arms["interrupted"] = compared(runs, interrupted(config, runs))
    return arms


def main(steps: int = 4, quick: bool = False) -> dict[str, Any]:
    arms = measure(3 if quick else steps)
    return {"arms": arms, "all_equal": all(map(is_good, arms.values()))}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["all_equal"])
