"""Two real jobs that share a rollout core and a training core, against each of them alone.

Two tiny models are trained by `rollpacker train` under the cluster's service: each run's process
and engine on core 0 (the rollout pool), its trainer on core 1 (the training pool). Alone (what
dedicated pools would do) and shared, interleaved. Shown: the shared period against the closed form
from the phases alone (asked: within 10 %); prompts per core-second against dedicated pools (1.4x);
slowdowns against the SLO. Iterations of one job alone, and first ones, do not count.

    python benchmarks/cluster_real.py [--repetitions 3] [--steps 14] [--quick]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lab import ROOT, bench
from resume import write_config, write_model

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.group import Holds, period_s
from rollpacker.cluster.decide.job import ClusterJob, Iteration, RoundTimes
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.profile.phase_times import PhaseTimes
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.seats.mailbox import SERVICE
from rollpacker.cluster.service.local_runner import MARK, LocalRunner
from rollpacker.cluster.service.service import Service
from rollpacker.cluster.service.store import Store
from rollpacker.codec import to_plain
from rollpacker.report.log import EventLog

ROLLOUT_CORE, TRAIN_CORE = 0, 1
SHAPE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
SAMPLES = 8
JOBS = {"a": {"prompts": 10, "tokens": 200}, "b": {"prompts": 12, "tokens": 160}}
"""Prompts of a step and tokens of a response; the two jobs are of like size, and not the same."""
SLO = 1.5
CONFIDENCE = 0.9
POOLS = tuple(
    Pool(
        name=name,
        phase=phase,
        nodes=1,
        devices_per_node=1,
        price_per_device_h=price,
        host_memory_gib=1500.0,
    )
    for name, phase, price in (("rollout", "rollout", 1.85), ("train", "train", 5.28))
)
WARM_UP = 3
"""First iterations of a job that do not count, and last ones of the shared arm."""


def compare(alone: dict[str, Told], shared: dict[str, Told]) -> dict[str, Any]:
    holds = {name: _holds(told) for name, told in alone.items()}
    closed_s = period_s([*holds.values()], [frozenset({0})] * len(holds))
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


@dataclass(frozen=True, slots=True)
class Told:
    """A job that has ended, step by step."""

    times: list[Iteration]
    """Seconds of each step's phases, as the run tells them: without waits and switches."""
    commits_s: list[float]
    """When each step was committed, by the service's clock, which all jobs have in common."""
    waits_s: list[float]
    """Seconds that each step waited for pools, with switches."""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Serve a node of each pool until all jobs that were submitted inside have ended. Tails are not
    released: no run does that yet."""
    over = threading.Event()
    folder.mkdir(parents=True)
    policy = CheapestWork(confidence=CONFIDENCE, tail_release=False)

    def serve() -> None:
        service = Service(
            Cluster(POOLS, policy, max_group=2),
            name="benchmark",
            folder=folder,
            mailbox=FileMailbox(folder / "mail.db"),
            runner=LocalRunner(folder),
        )
        service.run(over.is_set)
        service.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
        wait(folder)
    finally:
        over.set()
        thread.join()


def wait(folder: Path) -> None:
    """Wait until all jobs have ended. Raises `RuntimeError` for one that failed."""
    for own in sorted(folder.glob("runs/*")):
        code = None
        while (code := ended(folder, own.name)) is None:
            time.sleep(0.2)
        if code:
            output = (folder / "jobs" / own.name / "output").read_text()
            raise RuntimeError(f"{own.name} ended with {code}: {output[-2000:]}")


def ended(folder: Path, name: str) -> int | None:
    """The exit code of a job's first start; None: it runs."""
    path = folder / "jobs" / name / "1" / "exit"
    return int(path.read_text()) if path.exists() else None


def read(folder: Path, name: str, log: Path) -> Told:
    """Read a job's log and the service's events of it."""
    store = Store(folder / "events.db")
    commits = [
        float(entry.event["event"]["at_s"])
        for entry in store.entries()
        if entry.event["kind"] == "Committed" and entry.event["event"]["job"] == name
    ]
    store.close()
    phases, times, waits = PhaseTimes(), list[Iteration](), list[float]()
    for entry in EventLog(log):
        if (found := phases.feed(entry)) is not None:
            times.append(found)
            waits.append(phases.waited_s - sum(waits))
    assert len(times) == len(commits), (name, len(times), len(commits))
    return Told(times, commits, waits)


def run(folder: Path, names: Sequence[str], steps: int) -> dict[str, Told]:
    """Have these jobs trained by a cluster, all at once, and read what their logs say."""
    with serving(folder):
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
    rollout = {"prompts_per_step": sizes["prompts"], "max_response_tokens": sizes["tokens"]}
    config["rollout"] = {**rollout, "samples_per_prompt": SAMPLES}
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
    facts = {
        "job": to_plain(job),
        "command": [sys.executable, "-m", "rollpacker", "train", str(path)],
        "resume": ["--resume=auto"],
        "environ": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        "folder": str(own),
        "run": str(own),
    }
    FileMailbox(folder / "mail.db").post(SERVICE, "benchmark", job.name, "submit", facts)


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
