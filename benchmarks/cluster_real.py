"""Two real jobs that share a rollout core and a training core, against each of them alone.

Two tiny models are trained by `rollpacker train`, in processes of their own, by the cluster's
service: each run's process, with its engine, is pinned to core 0 (the rollout pool), its trainer's
process to core 1 (the training pool). Arms are interleaved, repetition by repetition:

    alone a, alone b    one job at a time: what dedicated pools would do, one job for two cores
    shared              both jobs on the same two cores, taking turns

Shown: the shared period against the closed form from the same session's phases alone (asked: within
10 %); prompts trained per core-second against dedicated pools (1.4x); slowdowns against the SLO.
Iterations in which only one of the two jobs runs, and each job's first ones, do not count.

    python benchmarks/cluster_real.py [--repetitions 3] [--steps 14] [--quick]
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cluster_lab import Told, ended, read, serving, submit
from lab import bench
from resume import write_config, write_model

from rollpacker.cluster.decide.group import Holds, period_s
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from rollpacker.cluster.service.local_runner import MARK

ROLLOUT_CORE, TRAIN_CORE = 0, 1
SHAPE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
SAMPLES = 8
JOBS = {"a": {"prompts": 10, "tokens": 200}, "b": {"prompts": 12, "tokens": 160}}
"""Of like size, and not the same."""
SLO = 1.5
WARM_UP = 3
"""First iterations of a job that do not count, and last ones of the shared arm."""


def compare(alone: dict[str, Told], shared: dict[str, Told]) -> dict[str, Any]:
    holds = {name: _holds(told) for name, told in alone.items()}
    closed_s = period_s([*holds.values()], [(0,)] * len(holds))
    both_s = (
        max(told.commits_s[WARM_UP - 1] for told in shared.values()),
        min(told.commits_s[-1] for told in shared.values()),
    )
    own: dict[str, dict[str, float]] = {}
    for name, told in shared.items():
        inside = [n for n, at in enumerate(told.commits_s) if both_s[0] <= at <= both_s[1]]
        first, last = inside[0], inside[-1]
        elapsed_s = told.commits_s[last] - told.commits_s[first]
        waited_s = sum(told.waits_s[first + 1 : last + 1])
        own[name] = {
            "iterations": last - first,
            "period_s": elapsed_s / (last - first),
            "slowdown": elapsed_s / (elapsed_s - waited_s),
        }
    iteration_s = {name: _mean_iteration_s(told) for name, told in alone.items()}
    period = fmean(one["period_s"] for one in own.values())
    cores = 2
    dedicated = sum(JOBS[name]["prompts"] / (cores * iteration_s[name]) for name in JOBS) / 2
    together = sum(JOBS[name]["prompts"] / (cores * own[name]["period_s"]) for name in JOBS)
    return {
        "alone": {
            name: {**hold._asdict(), "iteration_s": iteration_s[name]}
            for name, hold in holds.items()
        },
        "shared": own,
        "closed_form_s": closed_s,
        "period_over_closed_form": period / closed_s,
        "prompts_per_core_second_over_dedicated": together / dedicated,
        "slowdown": {name: one["slowdown"] for name, one in own.items()},
    }


def _holds(told: Told) -> Holds:
    times = told.times[WARM_UP:]
    parts = ("rollout_s", "between_s", "train_s", "after_s")
    return Holds(*(fmean(getattr(one, part) for one in times) for part in parts))


def _mean_iteration_s(told: Told) -> float:
    return (told.commits_s[-1] - told.commits_s[WARM_UP - 1]) / (len(told.commits_s) - WARM_UP)


# -- a cluster of two cores -----------------------------------------------------------


def run(folder: Path, names: Sequence[str], steps: int) -> dict[str, Told]:
    """Have these jobs trained by a cluster, all at once, and read what their logs say."""
    with serving(folder, (1, 1)):
        for name in names:
            submit_run(folder, name, steps)
        pin(folder, names)
    logs = {name: folder / "runs" / name / "runs" / "reference" / "events.jsonl" for name in names}
    return {name: read(folder, name, log) for name, log in logs.items()}


def submit_run(folder: Path, name: str, steps: int) -> None:
    own = folder / "runs" / name
    own.mkdir(parents=True)
    write_model(own / "model", **SHAPE)
    path = write_config(own, steps)
    config = json.loads(path.read_text())
    sizes = JOBS[name]
    rows = [{"prompt": f"{n}+{n % 7}="} for n in range(400)]
    (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["rollout"] = {
        "prompts_per_step": sizes["prompts"],
        "samples_per_prompt": SAMPLES,
        "max_response_tokens": sizes["tokens"],
    }
    config["train"]["processes"] = 1
    config["tail_batching"] = {"enabled": False}
    config["checkpoint"] = {"every_steps": 1000}
    path.write_text(json.dumps(config))
    job = ClusterJob(
        name=name,
        rounds=(RoundTimes(rollout_s=(1.0,), train_s=(1.0,)),),
        steps=steps,
        slo=SLO,
        rollout_devices=1,
        train_devices=1,
    )
    submit(folder, job, ["-m", "rollpacker", "train", str(path)])


def pin(folder: Path, names: Sequence[str]) -> None:
    """Each process of a job to its pool's core, as soon as it is there."""
    pinned = set[int]()
    while any(ended(folder, name) is None for name in names):
        for pid, words in _processes(folder):
            if pid not in pinned:
                core = TRAIN_CORE if any("trainer" in word for word in words) else ROLLOUT_CORE
                with contextlib.suppress(OSError):
                    for task in os.listdir(f"/proc/{pid}/task"):
                        os.sched_setaffinity(int(task), {core})
                    if any("trainer" in word for word in words):
                        pinned.add(pid)
        time.sleep(1.0)


def _processes(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """With the words of their commands."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (path / "environ").read_bytes()
            if f"{MARK}={folder}/".encode() in environ:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                yield int(path.name), words


def main(repetitions: int = 3, steps: int = 14, quick: bool = False) -> dict[str, Any]:
    os.sched_setaffinity(0, {ROLLOUT_CORE, TRAIN_CORE})
    length = 9 if quick else steps
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1 if quick else repetitions):
            folder = Path(scratch) / str(number)
            alone = {name: run(folder / f"alone-{name}", [name], length)[name] for name in JOBS}
            rows.append(compare(alone, run(folder / "shared", [*JOBS], length)))
            print(json.dumps(rows[-1]), flush=True)
    medians = ("period_over_closed_form", "prompts_per_core_second_over_dedicated")
    return {
        "slo": SLO,
        "repetitions": rows,
        **{name: median(row[name] for row in rows) for name in medians},
        "slowdown": max(max(row["slowdown"].values()) for row in rows),
    }


if __name__ == "__main__":
    bench(main)
