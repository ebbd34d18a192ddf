"""Faults of real training runs that share a cluster: `test_chaos.py` with `rollpacker train`.

Four tiny runs (an embedded engine in the run's process, a trainer in one of its own, a checkpoint
every step, tail batching on) take turns on 2 + 2 nodes of this host and come anew as they end.
Struck are the service (killed; stopped), its mailbox (a part of a letter), runs (killed; stopped
within their lease or beyond it), their trainers (killed), nodes (drained until all their runs have
moved at a commit), and runs that are preempted: cancelled, which ends them at a commit, and
submitted again. Faults come in volleys of one to four at a time. No run is struck again before it
has committed.

After the last fault all runs go on to their end, and each must have come to what the same run came
to alone, undisturbed: weights, optimizer, schedule, cursor, ledger and metrics by SHA-256; and
`exactly_once.py` must find nothing in its log. A witness sees whether two runs are ever on one
node. Engines in processes of their own are no victims: which of them ends first is not the same
twice, so nothing could be compared.

`ROLLPACKER_NUMBER=200` in the environment strikes 200 faults, of runs of 40 steps.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.exactly_once import check
from benchmarks.resume import fingerprints, write_config, write_model
from rollpacker.cluster.seats.seat import SEAT_VARIABLE
from rollpacker.core.ids import PoolName
from tests.cluster_service import lab, test_chaos
from tests.cluster_service.test_chaos import ENDED, MOST_AT_A_TIME, end_jobs, spread
from tests.cluster_service.witness import devices_of, violations
from tests.number import number_of

NUM_JOBS = 4
NUM_SEEDS = 2
STEPS = 40
MOVED_S = 240.0
"""Within which a run has been started, has come to its next commit, and is gone."""
ENDED_S = 600.0
SHARES = {
    "service killed": 0.12,
    "service stopped": 0.05,
    "letter torn": 0.05,
    "job killed": 0.15,
    "trainer killed": 0.13,
    "job stopped within its lease": 0.2,
    "job stopped beyond its lease": 0.12,
    "node drained": 0.08,
    "run preempted": 0.1,
}
DEVICES = "CHAOS_DEVICES"
"""Of a run's environment: where the witness's files are."""


def be_job(arguments: list[str]) -> int:
    """`rollpacker train`, whose seat shows the witness what it holds."""
    from rollpacker.cli.main import main as command
    from rollpacker.cluster.seats import mailbox_seat

    folder = Path(os.environ[DEVICES])
    pools: tuple[PoolName, ...] = get_args(PoolName)
    own = {pool: devices_of(folder, os.environ, pool) for pool in pools}
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


def write_run(folder: Path, seed: int, steps: int) -> Path:
    folder.mkdir(parents=True)
    write_model(folder / "model")
    path = write_config(folder, steps)
    config = json.loads(path.read_text())
    config["train"]["processes"] = 1
    config["seed"] = seed
    config["tail_batching"] = {"prompt_factor": 1.5}
    path.write_text(json.dumps(config))
    return path


@dataclass
class Lab(test_chaos.Lab):
    alone: list[dict[str, str]] = field(default_factory=list)
    """Fingerprints of the undisturbed runs, by seed."""
    ended: Counter[str] = field(default_factory=Counter)
    num_equal: int = 0
    num_steps: int = 0
    num_starts: int = 0
    num_moved: int = 0
    """Runs that were on a node which was drained."""
    num_away: int = 0
    """Runs that are about to be submitted again."""
    no_more: bool = False
    drains: threading.Lock = field(default_factory=threading.Lock)
    """One node at a time: there are two."""

    def top_up(self) -> dict[str, dict[str, Any]]:
        with self.lock:
            known = self.desk.status()
            alive = {n: one for n, one in known.items() if one["state"] not in ENDED}
            for _ in range(0 if self.no_more else NUM_JOBS - len(alive) - self.num_away):
                name = f"job-{len(self.submitted)}"
                write_run(self.folder / "runs" / name, self.seed_of(name), self.steps)
                self.submit(name)
                self.submitted.append(name)
            return alive

    def seed_of(self, name: str) -> int:
        return int(name.removeprefix("job-")) % NUM_SEEDS

    def submit(self, name: str) -> None:
        path = self.folder / "runs" / name / "run.yaml"
        self.desk.ask(
            "submit",
            job=lab.to_plain(lab.job(name, self.steps, 0.3, 0.3, slo=3.0)),
            command=[sys.executable, "-m", __name__, str(path)],
            resume=["--resume=auto"],
            environ={
                "PYTHONPATH": str(lab.ROOT),
                "OMP_NUM_THREADS": "1",
                DEVICES: str(self.desk.devices),
            },
            folder=str(path.parent),
            run=str(path.parent),
        )

    def victim(self, *, holding: bool) -> tuple[str, int] | None:
        """Runs take seconds to start: one is waited for."""
        until = time.monotonic() + MOVED_S
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
        while time.monotonic() - began_s < MOVED_S:
            one = self.state(name)
            if one["steps"] > before + 1 or one["state"] in ENDED:
                self.note(kind, time.monotonic() - began_s)
                return None
            time.sleep(0.1)
        self.problems.append(f"{name} has made no step since its trainer was killed")
        return None

    def drain(self, kind: str) -> None:
        """Until nobody is there any more."""
        with self.drains:
            if (found := self.victim(holding=False)) is None:
                return
            one = self.state(found[0])
            nodes = [*one["rollout_nodes"], *one["train_nodes"]]
            if not nodes:
                return
            node = self.rng.choice(nodes)
            began_s = time.monotonic()
            with self.lock:
                there = self.desk.ask("drain", node=node)["jobs"]
            for name in there:
                self.wait_until_off(name, node)
            self.note(kind, time.monotonic() - began_s)
            self.num_moved += len(there)
            with self.lock:
                self.desk.ask("drain", node=node, restore=True)
            self.count(kind)

    def wait_until_off(self, name: str, node: str) -> None:
        until = time.monotonic() + MOVED_S
        while time.monotonic() < until:
            one = self.state(name)
            if node not in (*one["rollout_nodes"], *one["train_nodes"]):
                return
            time.sleep(0.1)
        self.problems.append(f"{name} has not left {node}, which was drained")

    def preempt(self, kind: str) -> None:
        """It ends at its next commit, and is submitted again."""
        if (found := self.victim(holding=False)) is None:
            return
        name, _ = found
        began_s = time.monotonic()
        with self.lock:
            self.num_away += 1
            self.desk.ask("cancel", job=name)
        while (state := self.state(name)["state"]) not in ENDED:
            if time.monotonic() - began_s > MOVED_S:
                self.problems.append(f"{name} has not ended, which was cancelled")
                break
            time.sleep(0.1)
        with self.lock:
            self.num_away -= 1
            if state == "cancelled":
                self.submit(name)
        if state == "cancelled":
            self.count(kind)
            self.note(kind, time.monotonic() - began_s)

    def let_end(self) -> None:
        """All runs, undisturbed."""
        self.no_more = True
        until = time.monotonic() + ENDED_S
        while alive := self.top_up():
            if time.monotonic() > until:
                self.problems.append(f"not ended: {', '.join(alive)}")
                return
            time.sleep(0.5)

    def check(self) -> None:
        """All runs that have ended by themselves."""
        for name, one in self.desk.status().items():
            if one["state"] not in ENDED:
                continue
            self.ended[one["state"]] += 1
            self.num_starts += one["incarnation"]
            folder = self.folder / "runs" / name / "runs" / "reference"
            if one["state"] != "done":
                last = " | ".join(one["last_lines"][-5:])
                self.problems.append(f"{name} {one['state']}: {one['why']} {last}")
                continue
            self.num_steps += one["steps"]
            found = fingerprints(folder)
            expected = self.alone[self.seed_of(name)]
            differ = [what for what in expected if found[what] != expected[what]]
            self.num_equal += not differ
            if differ:
                self.problems.append(f"{name}: {', '.join(differ)} not as alone")
            problems = check(folder / "events.jsonl")["problems"]
            self.problems += [f"{name}: {problem}" for problem in problems]


def _trainer_of(pid: int) -> int:
    """The process of its trainer. Raises `LookupError`."""
    parents: dict[int, int] = {}
    for path in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
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


def run_alone(folder: Path, steps: int) -> list[dict[str, str]]:
    """By seed."""
    paths = [write_run(folder / str(seed), seed, steps) for seed in range(NUM_SEEDS)]
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "rollpacker", "train", str(path)],
            cwd=path.parent,
            env={**os.environ, "PYTHONPATH": str(lab.ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for path in paths
    ]
    assert [one.wait() for one in runs] == [0] * NUM_SEEDS
    return [fingerprints(path.parent / "runs" / "reference") for path in paths]


def run(one: Lab, faults: int) -> dict[str, Any]:
    """Strike so many faults, let all runs end, and say what was seen."""
    rng = one.rng
    began_s = time.monotonic()
    one.top_up()
    own = {"job killed": Lab.kill_part, "trainer killed": Lab.kill_part}
    own |= {"node drained": Lab.drain, "run preempted": Lab.preempt}
    strike = {**test_chaos.FAULTS, **own}
    loads = []
    with ThreadPoolExecutor(MOST_AT_A_TIME) as pool:
        while sum(one.struck.values()) < faults:
            kinds = rng.choices([*SHARES], [*SHARES.values()], k=rng.randint(1, MOST_AT_A_TIME))
            struck = [kind for kind in kinds if kind.startswith("service")]
            kinds = [kind for kind in kinds if kind not in struck] + struck[:1]
            for done in [pool.submit(strike[kind], one, kind) for kind in kinds]:
                done.result()
            one.top_up()
            loads.append(os.getloadavg()[0])
            print(dict(one.struck), one.problems[-1:], flush=True)
    struck_s = time.monotonic() - began_s
    one.let_end()
    one.check()
    one.service.kill()
    one.service.wait()
    return {
        "faults": sum(one.struck.values()),
        "struck": dict(one.struck),
        "seconds": round(struck_s, 1),
        "load": round(statistics.mean(loads), 1),
        "runs_moved": one.num_moved,
        "starts": one.num_starts,
        "runs": dict(one.ended),
        "runs_equal_to_alone": one.num_equal,
        "steps_of_ended_runs": one.num_steps,
        "two_on_one_node": violations(one.desk.devices),
        "problems": one.problems,
        "until_started_anew_or_on_s": {k: spread(times) for k, times in one.noticed_s.items()},
        "service_back_s": spread(one.back_s),
        "service_back_processor_s": spread(one.back_processor_s),
    }


@pytest.mark.timeout(1800)
def test_every_run_ends_as_it_does_alone(tmp_path: Path) -> None:
    """Whatever strikes it, the service, its mailbox and its nodes; no two are ever on one node."""
    faults = number_of(6)
    steps = min(STEPS, 9 + faults)
    alone = run_alone(tmp_path / "alone", steps)
    one = Lab(tmp_path / "shared", random.Random(1), steps, alone=alone)
    try:
        found = run(one, faults)
    finally:
        one.close()
        end_jobs(tmp_path / "shared")  # after the service, which would start them again
    print(json.dumps(found, indent=1))
    assert not found["problems"] and not found["two_on_one_node"], found


if __name__ == "__main__":
    sys.exit(be_job(sys.argv[1:]))
