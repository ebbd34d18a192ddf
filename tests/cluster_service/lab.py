"""A cluster of made-up devices and jobs on this host, for tests and the chaos tests beside it.

python -m tests.cluster_service.lab FOLDER      # its service, until it is killed
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.seats.mailbox import SERVICE
from rollpacker.cluster.service.local_runner import LocalRunner
from rollpacker.cluster.service.service import Service
from rollpacker.codec import to_plain
from tests.cluster_service import fake_job

ROOT = Path(__file__).parents[2]


def pools(nodes: int = 2) -> tuple[Pool, Pool]:
    settings = {"nodes": nodes, "devices_per_node": 1, "host_memory_gib": 100.0}
    return (
        Pool(name="cheap", phase="rollout", price_per_device_h=1.0, **settings),  # type: ignore[arg-type]
        Pool(name="fast", phase="train", price_per_device_h=3.0, **settings),  # type: ignore[arg-type]
    )


def make_service(folder: Path, nodes: int = 2, tell: Callable[[str], None] = print) -> Service:
    return Service(
        Cluster(pools(nodes), CheapestWork(confidence=0.9), max_group=8),
        name="lab",
        folder=folder,
        mailbox=FileMailbox(folder / "mail"),
        runner=LocalRunner(folder),
        tell=tell,
    )


def job(name: str, steps: int, rollout_s: float, train_s: float, slo: float = 20.0) -> ClusterJob:
    rounds = (RoundTimes(rollout_s=(rollout_s,), train_s=(train_s,)),)
    return ClusterJob(
        name=name, rounds=rounds, steps=steps, slo=slo, rollout_devices=1, train_devices=1
    )


class Refused(Exception):
    pass


class Desk:
    """Asks the service."""

    def __init__(self, folder: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile`: what makes the service get on, if it is in this thread."""
        self.folder = folder
        self.devices = folder / "devices"
        self.devices.mkdir(parents=True, exist_ok=True)
        self.mailbox = FileMailbox(folder / "mail")
        self.name = f"desk {secrets.token_hex(4)}"
        self._meanwhile = meanwhile
        self._number = self._after = 0

    def ask(self, kind: str, within_s: float = 90.0, **facts: Any) -> dict[str, Any]:
        self._number += 1
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            with contextlib.suppress(OSError):  # once more
                self.mailbox.post(SERVICE, self.name, f"{self._number}", kind, facts)
            self._meanwhile()
            for letter in self.mailbox.read(self.name, self._after, 0.05):
                self._after = letter.number
                self.mailbox.forget(self.name, letter.number)
                if letter.kind == "refused":
                    raise Refused(letter.facts["why"])
                if letter.facts["about"] == f"{self._number}":
                    return dict(letter.facts)
        raise TimeoutError(f"{kind}: no answer within {within_s:g} s")

    def submit(self, one: ClusterJob, command: list[str] | None = None) -> dict[str, Any]:
        folder = self.folder / "runs" / one.name
        folder.mkdir(parents=True, exist_ok=True)
        mean = one.mean
        own = [str(folder), str(self.devices), str(one.steps)]
        times = [str(mean.rollout_s), str(mean.train_s)]
        return self.ask(
            "submit",
            job=to_plain(one),
            command=command or [sys.executable, fake_job.__file__, *own, *times],
            resume=[] if command is None else ["--resume=auto"],
            environ={"PYTHONPATH": str(ROOT)},
            folder=str(folder),
            run=str(folder),
        )

    def status(self) -> dict[str, dict[str, Any]]:
        return {one["job"]: one for one in self.ask("status")["jobs"]}

    def commits(self, name: str) -> list[dict[str, Any]]:
        return fake_job.committed(self.folder / "runs" / name)


def start_service(folder: Path) -> subprocess.Popen[bytes]:
    """In a process of its own."""
    with (folder / "service.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.cluster_service.lab", str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def problems(desk: Desk, name: str, steps: int) -> list[str]:
    """Of a job that is done: iterations lost, doubled, or made of something else."""
    found, state = [], ""
    lines = desk.commits(name)
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        found.append(f"{name}: steps {[line['step'] for line in lines]}")
    for line in lines:
        state = fake_job.following(state, int(line["step"]))
        if line["state"] != state:
            found.append(f"{name}: state after step {line['step']}")
    return found


def main(folder: Path) -> None:
    began_s = time.time()

    def tell(text: str) -> None:
        print(f"{time.time() - began_s:8.2f} {text}", flush=True)

    make_service(folder, tell=tell).run(lambda: False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
