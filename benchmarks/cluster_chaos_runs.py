"""Faults of real training runs that share a cluster: `cluster_chaos.py` with `rollpacker train`.

Four tiny runs (an embedded engine in the run's process, a trainer in one of its own, a checkpoint
every step, tail batching on) take turns on 2 + 2 nodes of this host and come anew as they end.
Struck are runs (killed), their trainers (killed), runs that are stopped within their lease or
beyond it, and the service. No run is struck again before it has committed.

A run that has ended must have come to what the same run came to alone, undisturbed: weights,
optimizer, schedule, cursor, ledger and metrics by SHA-256; and `exactly_once.py` must find nothing
in its log. A witness sees whether two runs are ever on one node.

    python benchmarks/cluster_chaos_runs.py [--faults 200] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import cluster_chaos
from cluster_chaos import ENDED, PATIENCE_S, spread
from exactly_once import check
from machine import write_result
from resume import fingerprints, write_config, write_model

from rollpacker.cluster.local_runner import ROLLOUT_NODES, TRAIN_NODES
from rollpacker.cluster.seat import SEAT_VARIABLE
from rollpacker.core.ids import PoolName
from tests.cluster_service import lab
from tests.cluster_service.witness import Device, violations

NUM_JOBS = 4
STEPS = 30
SHARES = {
    "service killed": 0.15,
    "job killed": 0.35,
    "trainer killed": 0.25,
    "job stopped within its lease": 0.1,
    "job stopped beyond its lease": 0.15,
}
DEVICES = "CHAOS_DEVICES"
"""Of a run's environment: where the witness's files are."""


def be_job(arguments: list[str]) -> int:
    """`rollpacker train`, whose seat shows the witness what it holds."""
    from rollpacker.cli.main import main as command
    from rollpacker.cluster import mailbox_seat

    folder = Path(os.environ[DEVICES])
    nodes = {
        "rollout": os.environ[ROLLOUT_NODES].split(","),
        "train": os.environ[TRAIN_NODES].split(","),
    }
    own = {pool: [Device(folder, node) for node in names] for pool, names in nodes.items()}
    who = os.environ[SEAT_VARIABLE].partition("#")[2]
    enter, leave = mailbox_seat.MailboxSeat.enter, mailbox_seat.MailboxSeat.leave

    def entering(seat: Any, pool: PoolName, purpose: str, **settings: Any) -> bool:
        is_there = enter(seat, pool, purpose, **settings)
        if is_there:
            for device in own[pool]:
                device.hold(f"{who} {purpose}")
        return is_there

    def leaving(seat: Any, pool: PoolName) -> None:
        for device in own[pool]:
            device.drop()
        leave(seat, pool)

    mailbox_seat.MailboxSeat.enter = entering  # type: ignore[method-assign]
    mailbox_seat.MailboxSeat.leave = leaving  # type: ignore[method-assign]
    return command(["train", *arguments])


def write_run(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    write_model(folder / "model")
    path = write_config(folder, STEPS)
    config = json.loads(path.read_text())
    config["train"]["processes"] = 1
    config["seed"] = seed
    config["tail_batching"] = {"prompt_factor": 1.5}
    path.write_text(json.dumps(config))
    return path


@dataclass
class Lab(cluster_chaos.Lab):
    alone: list[dict[str, str]] = field(default_factory=list)
    """Fingerprints of the undisturbed runs, by seed."""
    ended: Counter[str] = field(default_factory=Counter)
    num_equal: int = 0
    num_steps: int = 0

    def top_up(self) -> dict[str, dict[str, Any]]:
        with self.lock:
            known = self.desk.status()
            alive = {n: one for n, one in known.items() if one["state"] in ("running", "waiting")}
            for _ in range(NUM_JOBS - len(alive)):
                self.submit(len(self.submitted))
            return alive

    def submit(self, number: int) -> None:
        name = f"job-{number}"
        path = write_run(self.folder / "runs" / name, number % NUM_JOBS)
        self.desk.ask(
            "submit",
            job=lab.to_plain(lab.job(name, STEPS, 0.3, 0.3, slo=8.0)),
            command=[sys.executable, __file__, "--job", str(path)],
            resume=["--resume=auto"],
            environ={
                "PYTHONPATH": str(lab.ROOT),
                "OMP_NUM_THREADS": "1",
                DEVICES: str(self.desk.devices),
            },
            folder=str(path.parent),
            run=str(path.parent),
        )
        self.submitted.append(name)

    def victim(self, *, holding: bool) -> tuple[str, int] | None:
        """Runs take seconds to start: one is waited for."""
        until = time.monotonic() + PATIENCE_S
        while (found := super().victim(holding=holding)) is None and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def pid(self, name: str, incarnation: int, what: str) -> int:
        main = super().pid(name, incarnation, "job")
        return main if what == "job" else _trainer_of(main)

    def kill_part(self, kind: str) -> None:
        if not kind.startswith("trainer"):
            return super().kill_part(kind)
        if (found := self.victim(holding=False)) is None:
            return None
        name, incarnation = found
        before = self.state(name)["steps"]
        try:
            pid = self.pid(name, incarnation, "trainer")
            os.kill(pid, 9)
        except (OSError, LookupError, ValueError):
            return None
        self.count(kind)
        began_s = time.monotonic()
        while time.monotonic() - began_s < PATIENCE_S:
            one = self.state(name)
            if one["steps"] > before + 1 or one["state"] in ENDED:
                self.note(kind, time.monotonic() - began_s)
                return None
            time.sleep(0.1)
        self.problems.append(f"{name} has made no step since its trainer was killed")
        return None

    def check(self) -> None:
        """All runs that have ended by themselves."""
        for name, one in self.desk.status().items():
            if one["state"] not in ENDED:
                continue
            self.ended[one["state"]] += 1
            folder = self.folder / "runs" / name / "runs" / "reference"
            if one["state"] == "failed":
                self.problems.append(f"{name} failed: {one['why']} {one['last_lines'][-400:]}")
            if one["state"] != "done":
                continue
            self.num_steps += one["steps"]
            found = fingerprints(folder)
            expected = self.alone[int(name.removeprefix("job-")) % NUM_JOBS]
            differ = [what for what in expected if found[what] != expected[what]]
            self.num_equal += not differ
            if differ:
                self.problems.append(f"{name}: {', '.join(differ)} not as alone")
            problems = check(folder / "events.jsonl")["problems"]
            self.problems += [f"{name}: {problem}" for problem in problems]


def _trainer_of(pid: int) -> int:
    """The process of its trainer. Raises `LookupError`."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for one in parents:
        above = one
        while above in parents and above != pid:
            above = parents[above]
        words = b""
        if above == pid and one != pid:
            words = Path(f"/proc/{one}/cmdline").read_bytes()
        if b"rollpacker.trainer" in words:
            return one
    raise LookupError(f"{pid} has no trainer")


def run_alone(folder: Path) -> list[dict[str, str]]:
    """By seed."""
    found = []
    for seed in range(NUM_JOBS):
        path = write_run(folder / str(seed), seed)
        subprocess.run(
            [sys.executable, "-m", "rollpacker", "train", str(path)],
            cwd=path.parent,
            env={**os.environ, "PYTHONPATH": str(lab.ROOT), "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
        found.append(fingerprints(path.parent / "runs" / "reference"))
    return found


def run(folder: Path, faults: int, seed: int) -> dict[str, Any]:
    alone = run_alone(folder / "alone")
    rng = random.Random(seed)
    began_s = time.monotonic()
    one = Lab(folder / "shared", rng, alone=alone)
    one.top_up()
    strike = {kind: cluster_chaos.FAULTS.get(kind, Lab.kill_part) for kind in SHARES}
    strike["job killed"] = Lab.kill_part
    with ThreadPoolExecutor(2) as pool:
        while sum(one.struck.values()) < faults:
            kinds = rng.choices([*SHARES], [*SHARES.values()], k=rng.choice((1, 1, 2)))
            if len({kind.partition(" ")[0] for kind in kinds}) < len(kinds):
                kinds = kinds[:1]
            for done in [pool.submit(strike[kind], one, kind) for kind in kinds]:
                done.result()
            one.top_up()
            print(dict(one.struck), one.problems[-1:], flush=True)
    one.check()
    for name, state in one.desk.status().items():
        if state["state"] not in ENDED:
            one.desk.ask("cancel", job=name, now=True)
    time.sleep(2.0)
    one.service.kill()
    one.service.wait()
    return {
        "faults": sum(one.struck.values()),
        "struck": dict(one.struck),
        "seconds": round(time.monotonic() - began_s, 1),
        "runs": dict(one.ended),
        "runs_equal_to_alone": one.num_equal,
        "steps_of_ended_runs": one.num_steps,
        "two_on_one_node": violations(one.desk.devices),
        "problems": one.problems,
        "until_started_anew_or_on_s": {k: spread(times) for k, times in one.noticed_s.items()},
        "service_back_s": spread(one.back_s),
    }


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        sys.exit(be_job(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="12 faults, nothing written")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    payload = run(folder, 12 if args.quick else args.faults, args.seed)
    print(json.dumps(payload, indent=1), folder)
    if not args.quick:
        write_result("cluster_chaos_runs", payload)
    sys.exit(bool(payload["problems"] or payload["two_on_one_node"]))


if __name__ == "__main__":
    main()
