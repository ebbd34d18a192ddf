"""Faults of a cluster's service and of its jobs, on this host and without ray.

Eight made-up jobs (`tests/cluster_service/fake_job.py`: a process, an engine in a session of its
own, a keeper) take turns on 2 + 2 made-up nodes, and come anew as they end. Struck are the service
(killed, or stopped for up to 8 s), the mailbox (a part of a letter in a box, as of a writer that is
killed), jobs, engines and keepers (killed), and jobs that are stopped, within their lease or beyond
it, and continued. Faults come in
volleys of one to four at a time. No job is struck again before it has committed.

A witness beside the devices sees whether two jobs are ever on one. Every job's commits must be each
iteration once, each made of the one before. Measured are: how long after a loss the service knows
(a stopped job: after its lease of 5 s; one whose engine was killed: after its own end, since it
finds out in its next turn), and how long a new service takes to answer, with the processor time
that it needs for that: on a host with much other work the two are far apart.

`ROLLPACKER_NUMBER=200` in the environment strikes 200 faults; 60 take 2 minutes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollpacker.cluster.seats.mailbox_seat import BEAT_S, LEASE_S
from rollpacker.cluster.service.local_runner import LocalRunner
from rollpacker.workers.child import children
from tests.cluster_service import lab
from tests.cluster_service.witness import violations
from tests.number import number_of

NUM_JOBS = 8
STEPS = 30
MOST_AT_A_TIME = 4
PATIENCE_S = 60.0
"""A wait that lasts longer is a fault of the service."""
FREE_S = 1.0
"""After its lease, or its end, a job's pool is free."""
BACK_S = 5.0
SHARES = {
    "service killed": 0.2,
    "service stopped": 0.05,
    "letter torn": 0.1,
    "job killed": 0.2,
    "engine killed": 0.1,
    "keeper killed": 0.1,
    "job stopped within its lease": 0.1,
    "job stopped beyond its lease": 0.15,
}


@dataclass
class Lab:
    folder: Path
    rng: random.Random
    steps: int = STEPS
    """Of each job."""
    desk: lab.Desk = field(init=False)
    service: Any = field(init=False)
    struck: Counter[str] = field(default_factory=Counter)
    noticed_s: dict[str, list[float]] = field(default_factory=dict)
    back_s: list[float] = field(default_factory=list)
    back_processor_s: list[float] = field(default_factory=list)
    """Of it, the service's processor time: the host may have other work."""
    problems: list[str] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    struck_at: dict[str, int] = field(default_factory=dict)
    """By job: its commits when it was struck last."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_jobs: int = NUM_JOBS
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        self.desk = lab.Desk(self.folder)
        self.service = lab.start_service(self.folder)

    # -- jobs --------------------------------------------------------------------------

    def top_up(self) -> dict[str, dict[str, Any]]:
        """As many jobs as there should be."""
        with self.lock:
            known = self.desk.status()
            alive = {n: one for n, one in known.items() if one["state"] in ("running", "waiting")}
            for _ in range(self.num_jobs - len(alive)):
                name = f"job-{len(self.submitted)}"
                rollout_s, train_s = (self.rng.choice((0.2, 0.3, 0.4)) for _ in range(2))
                one = lab.job(name, self.steps, rollout_s, train_s, slo=4.0)
                self.desk.submit(structs.replace(one, cold_start_s=1.0))
                self.submitted.append(name)
            return alive

    def state(self, name: str) -> dict[str, Any]:
        with self.lock:
            return self.desk.status()[name]

    def victim(self, *, holding: bool) -> tuple[str, int] | None:
        """A job that has committed since it was struck, of those that hold a pool if some do."""
        alive = self.top_up()
        with self.lock:
            fit = {
                name: one
                for name, one in alive.items()
                if one["state"] == "running"
                and one["why"] != "starts"
                and 0 < one["steps"] < self.steps - 3
                and one["steps"] > self.struck_at.get(name, 0)
            }
            chosen = {n: one for n, one in fit.items() if one["holds"] and holding} or fit
            if not chosen:
                return None
            name = self.rng.choice(sorted(chosen))
            self.struck_at[name] = chosen[name]["steps"] + 1
            return name, chosen[name]["incarnation"]

    def pid(self, name: str, incarnation: int, what: str) -> int:
        place = self.folder / "jobs" / name / str(incarnation)
        if what == "keeper":
            return int((place / "keeper").read_text())
        main = int((place / "process").read_text())
        return main if what == "job" else children(main)[0]

    def wait_for_loss(self, name: str, incarnation: int, since_s: float) -> float | None:
        """Seconds until the service has started it anew; None: it ended first."""
        until = time.monotonic() + self.patience_s
        while time.monotonic() < until:
            one = self.state(name)
            if one["incarnation"] > incarnation:
                return time.monotonic() - since_s
            if one["state"] not in ("running", "waiting"):
                return None
            time.sleep(0.02)
        self.problems.append(f"{name} was not noticed to be lost")
        return None

    # -- faults ------------------------------------------------------------------------

    def strike(self, kind: str) -> None:
        """Once, and wait until what follows from it is there."""
        FAULTS[kind](self, kind)

    def count(self, kind: str) -> None:
        with self.lock:
            self.struck[kind] += 1

    def kill_service(self, kind: str) -> None:
        self.service.kill()
        self.service.wait()
        time.sleep(self.rng.choice((0.0, 0.5, 2.0, LEASE_S + 2.0)))
        began_s = time.monotonic()
        self.service = lab.start_service(self.folder)
        lab.Desk(self.folder).ask("status", within_s=PATIENCE_S)
        self.back_s.append(time.monotonic() - began_s)
        self.back_processor_s.append(processor_s(self.service.pid))
        self.count(kind)

    def stop_service(self, kind: str) -> None:
        self.service.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.choice((1.0, 3.0, LEASE_S + 3.0)))
        self.service.send_signal(signal.SIGCONT)
        self.count(kind)

    def tear_letter(self, kind: str) -> None:
        box = self.rng.choice(sorted((self.folder / "mail").glob("*.letters")))
        with box.open("ab") as file:
            file.write(b'\n{"sender": "job-0", "key": "1/7", "kind": "le')
        self.count(kind)

    def kill_part(self, kind: str) -> None:
        if (found := self.victim(holding=kind == "job killed")) is None:
            return
        with contextlib.suppress(OSError, IndexError, ValueError):  # it moves, or it has ended
            pid = self.pid(*found, kind.split()[0])
            main = self.pid(*found, "job")
            began_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            self.count(kind)
            if kind.startswith("engine"):  # the job finds out when it has its next turn
                began_s = self.end_of(main)
            self.note(kind, self.wait_for_loss(*found, began_s))

    def end_of(self, pid: int) -> float:
        """When the process is gone, whose parent waits for it."""
        until = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.01)
        return time.monotonic()

    def stop_job(self, kind: str) -> None:
        if (found := self.victim(holding=True)) is None:
            return
        beyond = kind.endswith("beyond its lease")
        with contextlib.suppress(OSError, ValueError):
            pid = self.pid(*found, "job")
            began_s = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            if beyond and self.state(found[0])["holds"]:
                self.count(kind)
                self.note(kind, self.wait_for_loss(*found, began_s))
            elif not beyond:
                time.sleep(self.rng.uniform(0.5, 3.0))
                self.count(kind)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            stopped_s = time.monotonic() - began_s
            if stopped_s < LEASE_S - BEAT_S:
                self.check_not_silent(found[0], time.time() - stopped_s)

    def check_not_silent(self, name: str, since_s: float) -> None:
        with self.lock:
            events = self.desk.ask("status")["events"]
        for event in events:
            if event["at_s"] > since_s and event["text"].startswith(f"{name} was lost: it was sil"):
                self.problems.append(f"{event['text']}, though it was stopped within its lease")

    def note(self, kind: str, seconds: float | None) -> None:
        with self.lock:
            if seconds is not None:
                self.noticed_s.setdefault(kind, []).append(seconds)

    # -- the end -----------------------------------------------------------------------

    def finish(self) -> dict[str, int]:
        """Cancel what runs, and check what every job has committed."""
        states = self.desk.status()
        for name, one in states.items():
            if one["state"] in ("running", "waiting"):
                self.desk.ask("cancel", job=name)
        until = time.monotonic() + self.patience_s
        while not all(one["state"] in ENDED for one in states.values()):
            if time.monotonic() > until:
                self.problems.append(f"not ended: {states}")
                break
            time.sleep(0.2)
            states = self.desk.status()
        for name, one in states.items():
            done = len(self.desk.commits(name))
            self.problems += lab.problems(
                self.desk, name, self.steps if one["state"] == "done" else done
            )
            if one["state"] == "failed":
                self.problems.append(f"{name} failed: {one['why']} {one['last_lines'][-3:]}")
        self.problems += self.left_over(states)
        self.close()
        return dict(Counter(one["state"] for one in states.values()))

    def left_over(self, states: dict[str, dict[str, Any]]) -> list[str]:
        """What runs of jobs that have ended."""
        runner = LocalRunner(self.folder)
        return [
            f"{name} {incarnation} runs still"
            for name, one in states.items()
            for incarnation in range(1, one["incarnation"] + 1)
            if runner.ended(name, incarnation) is None
        ]

    def close(self) -> None:
        self.service.kill()
        self.service.wait()


ENDED = ("done", "failed", "cancelled")
FAULTS: dict[str, Callable[[Lab, str], None]] = {
    "service killed": Lab.kill_service,
    "service stopped": Lab.stop_service,
    "letter torn": Lab.tear_letter,
    "job killed": Lab.kill_part,
    "engine killed": Lab.kill_part,
    "keeper killed": Lab.kill_part,
    "job stopped within its lease": Lab.stop_job,
    "job stopped beyond its lease": Lab.stop_job,
}


def run(one: Lab, faults: int) -> dict[str, Any]:
    """Strike so many faults, let all jobs end, and say what was seen."""
    rng = one.rng
    began_s = time.monotonic()
    one.top_up()
    undisturbed: dict[str, list[float]] = {}
    loads: list[float] = []
    with ThreadPoolExecutor(MOST_AT_A_TIME) as pool:
        while sum(one.struck.values()) < faults:
            kinds = rng.choices([*SHARES], [*SHARES.values()], k=rng.randint(1, MOST_AT_A_TIME))
            struck = [kind for kind in kinds if kind.startswith("service")]
            kinds = [kind for kind in kinds if kind not in struck] + struck[:1]
            before = {kind: len(times) for kind, times in one.noticed_s.items()}
            for done in [pool.submit(one.strike, kind) for kind in kinds]:
                done.result()
            if not any(kind.startswith("service") for kind in kinds):
                for kind, times in one.noticed_s.items():
                    undisturbed.setdefault(kind, []).extend(times[before.get(kind, 0) :])
            time.sleep(rng.uniform(0.0, 0.5))
            loads.append(os.getloadavg()[0])
            one.top_up()
    load = round(statistics.mean(loads), 1)
    ended = one.finish()
    late = [
        f"{kind}: {seconds:.2f} s"
        for kind, times in undisturbed.items()
        for seconds in times
        if seconds > FREE_S + (LEASE_S if "stopped" in kind else 0.0)
    ]
    return {
        "faults": sum(one.struck.values()),
        "struck": dict(one.struck),
        "seconds": round(time.monotonic() - began_s, 1),
        "jobs": ended,
        "commits": sum(len(one.desk.commits(name)) for name in one.submitted),
        "two_on_one_device": violations(one.desk.devices),
        "problems": one.problems,
        "lost_until_started_anew_s": {kind: spread(times) for kind, times in undisturbed.items()},
        "late": late,
        "load": load,
        "service_back_s": spread(one.back_s),
        "service_back_processor_s": spread(one.back_processor_s),
        "service_back_late": sum(seconds > BACK_S for seconds in one.back_s),
    }


def processor_s(pid: int) -> float:
    """That a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(times: list[float]) -> dict[str, float]:
    if not times:
        return {}
    return {
        "count": len(times),
        "median": round(statistics.median(times), 3),
        "largest": round(max(times), 3),
    }


def end_jobs(folder: Path) -> None:
    runner = LocalRunner(folder)
    for place in folder.glob("jobs/*/[0-9]*"):
        runner.kill(place.parent.name, int(place.name))


@pytest.mark.timeout(600)
def test_no_fault_loses_or_doubles_a_commit(tmp_path: Path) -> None:
    """And no two jobs are ever on one device."""
    one = Lab(tmp_path, random.Random(1))
    try:
        found = run(one, number_of(20))
    finally:
        one.close()
        end_jobs(tmp_path)  # after the service, which would start them again
    print(found)
    assert not found["problems"] and not found["two_on_one_device"], found
