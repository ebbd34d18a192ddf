"""A cluster of this host for `cluster_real.py` and `cluster_size.py`: its service in a thread, its
jobs in processes, and what their logs say afterwards. Or one on the ray cluster that RAY_ADDRESS
names, whose hosts are all namespaces of this machine and have its files."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.job import ClusterJob, Iteration
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.profile.phase_times import PhaseTimes
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.seats.mailbox import SERVICE, Mailbox
from rollpacker.cluster.service.local_runner import LocalRunner
from rollpacker.cluster.service.runner import Runner
from rollpacker.cluster.service.service import Service
from rollpacker.cluster.service.store import Store
from rollpacker.codec import to_plain
from rollpacker.report.log import EventLog

ROOT = Path(__file__).parents[1]
CONFIDENCE = 0.9
MAX_GROUP = 8


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a job that has ended."""

    times: list[Iteration]
    """Of each step, as its run tells them: without waits and switches."""
    commits_s: list[float]
    """Of each step, by the service's clock, which all jobs have in common."""
    waits_s: list[float]
    """Of each step: for pools, with switches."""


def pools(rollout_nodes: int, train_nodes: int) -> tuple[Pool, Pool]:
    """Of one device a node."""
    return (
        Pool(
            name="rollout",
            phase="rollout",
            nodes=rollout_nodes,
            devices_per_node=1,
            price_per_device_h=1.85,
            host_memory_gib=1500.0,
        ),
        Pool(
            name="train",
            phase="train",
            nodes=train_nodes,
            devices_per_node=1,
            price_per_device_h=5.28,
            host_memory_gib=1500.0,
        ),
    )


def new_cluster(nodes: tuple[int, int]) -> Cluster:
    """With so many nodes of each pool, and the shipped policy. Tails are not released: no run
    does that yet."""
    policy = CheapestWork(confidence=CONFIDENCE, tail_release=False)
    return Cluster(pools(*nodes), policy, max_group=MAX_GROUP)


@contextlib.contextmanager
def serving(folder: Path, nodes: tuple[int, int], *, on_ray: bool = False) -> Iterator[Mailbox]:
    """Serve until all jobs that were submitted inside have ended. `on_ray`: this process is
    connected to it (`connect_to_ray`)."""
    over = threading.Event()
    folder.mkdir(parents=True)
    mailbox, runner = _on_ray(folder) if on_ray else _on_this_host(folder)

    def serve() -> None:
        service = Service(
            new_cluster(nodes), name="benchmark", folder=folder, mailbox=mailbox, runner=runner
        )
        service.run(over.is_set)
        service.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield mailbox
        wait(folder)
    finally:
        over.set()
        thread.join()


def _on_this_host(folder: Path) -> tuple[Mailbox, Runner]:
    return FileMailbox(folder / "mail.db"), LocalRunner(folder)


def connect_to_ray() -> None:
    """By RAY_ADDRESS."""
    from rollpacker.workers.hosts.token import demand_token

    demand_token()
    from rollpacker.workers.hosts.ray_connection import connect

    connect(os.environ["RAY_ADDRESS"])


def _on_ray(folder: Path) -> tuple[Mailbox, Runner]:
    from rollpacker.cluster.on_ray.jobs import RayRunner
    from rollpacker.cluster.on_ray.mail import RayMailbox

    name = f"benchmark-{folder.name}"
    return RayMailbox(f"mail-{name}"), RayRunner(
        name, head=os.environ["RAY_ADDRESS"], folder=folder
    )


def wait(folder: Path) -> None:
    """Until all jobs have ended. Raises `RuntimeError` for one that failed."""
    for own in sorted(folder.glob("runs/*")):
        code = None
        while (code := ended(folder, own.name)) is None:
            time.sleep(0.2)
        if code:
            output = (folder / "jobs" / own.name / "output").read_text()
            raise RuntimeError(f"{own.name} ended with {code}: {output[-2000:]}")


def submit(
    folder: Path, job: ClusterJob, command: Sequence[str], mailbox: Mailbox | None = None
) -> None:
    """`command`: of the project's Python, run in the job's own folder, FOLDER/runs/NAME. `mailbox`:
    the service's; None: that of its folder."""
    own = folder / "runs" / job.name
    own.mkdir(parents=True, exist_ok=True)
    facts = {
        "job": to_plain(job),
        "command": [sys.executable, *command],
        "resume": ["--resume=auto"],
        "environ": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        "folder": str(own),
        "run": str(own),
    }
    mailbox = mailbox or FileMailbox(folder / "mail.db")
    mailbox.post(SERVICE, "benchmark", job.name, "submit", facts)


def ended(folder: Path, name: str) -> int | None:
    """The exit code of a job's first start; None: it runs."""
    path = folder / "jobs" / name / "1" / "exit"
    return int(path.read_text()) if path.exists() else None


def read(folder: Path, name: str, log: Path) -> Told:
    """What a job's log and the service's events say."""
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
