"""Faults of a cluster's service, of its jobs, and of ray below them: the chaos of
`tests/cluster_service/test_chaos.py` on a ray cluster of several hosts.

Hosts are namespaces of this machine, each with a raylet, processes and folders of its own (Linux,
as root; the packages of `make cluster`): ray's head with the service, two training nodes and two
rollout nodes. Made-up jobs take turns on made-up
devices, and a witness is beside every device.

Struck are, one to three at a time: the service, the mailbox's actor, wardens, jobs, engines,
keepers (killed), and jobs that are stopped within or beyond their lease and continued. Alone: a
host's raylet, killed and started again at once, soon, or after its jobs were given up; a host cut
off, for a moment, or until ray has given it up; all of ray, head and service included. After each
of these all jobs have to go on.

`ROLLPACKER_NUMBER=200` in the environment strikes 200 faults, which take 40 minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cluster.decide.cluster_turns import MAX_LOSSES
from rollpacker.cluster.seats.mailbox_seat import LEASE_S
from rollpacker.workers.child import children
from tests.cluster.lab import RayLab, in_threads
from tests.cluster.netns import Network, why_impossible
from tests.cluster_service import test_chaos as chaos
from tests.cluster_service.test_chaos import BACK_S, ENDED, FREE_S, spread
from tests.cluster_service.witness import violations
from tests.number import number_of

POOLS = ("none", "fast", "fast", "cheap", "cheap")
"""The pool of each host. The first is ray's head and the service's."""
TRAIN_HOSTS = (1, 2)
"""Where jobs' processes are."""
LOST_S = 10.0
"""After which ray gives up a host that does not answer."""
LONG_S = 45.0
"""Until what is on a host that is away has been given up."""
NUM_JOBS = 6
STEPS = 80
MOST_AT_A_TIME = 3
NUM_TRIES = 4
PATIENCE_S = 180.0
SHARES = {
    "service killed": 0.14,
    "mailbox killed": 0.1,
    "warden killed": 0.1,
    "job killed": 0.2,
    "engine killed": 0.12,
    "keeper killed": 0.1,
    "job stopped within its lease": 0.06,
    "job stopped beyond its lease": 0.18,
}
OF_RAY = {
    "raylet killed": 0.6,
    "host cut off for a moment": 0.15,
    "host cut off for long": 0.1,
    "all of ray restarted": 0.15,
}
OF_RAY_EVERY = 6
"""So many volleys of the others between two of these."""


@dataclass
class Lab(chaos.Lab):
    network: Network = field(kw_only=True)
    pools: tuple[str, ...] = field(kw_only=True)
    gave_up: list[str] = field(default_factory=list)
    """Jobs that were lost too often: what is promised."""
    on_s: dict[str, list[float]] = field(default_factory=dict)
    """By fault of ray: until all jobs have gone on."""

    def __post_init__(self) -> None:
        self.desk = RayLab(self.network, self.folder, self.nodes)  # type: ignore[assignment]
        self.num_jobs, self.steps, self.patience_s = NUM_JOBS, STEPS, PATIENCE_S
        self.ray.start_ray(self.pools)
        self.ray.serve()

    @property
    def nodes(self) -> tuple[int, int]:
        return self.pools.count("cheap"), self.pools.count("fast")

    @property
    def ray(self) -> RayLab:
        assert isinstance(self.desk, RayLab)
        return self.desk

    def victim(self, *, holding: bool) -> tuple[str, int] | None:
        """Who is lost once more does not give up."""
        found = super().victim(holding=holding)
        return None if found and found[1] > MAX_LOSSES else found

    def pid(self, name: str, incarnation: int, what: str) -> int:
        part = f"{self.folder}/{name}\0{self.ray.devices}"
        kept = f"/jobs/{name}/{incarnation}\0"
        for host in TRAIN_HOSTS:
            keepers = set(self.network.named(host, kept))
            for main in set(self.network.named(host, part)) - keepers:
                return main if what == "job" else children(main)[0]
            if what == "keeper" and keepers:
                return keepers.pop()
        raise OSError(f"{name} has none")

    def left_over(self, states: dict[str, dict[str, Any]]) -> list[str]:
        for name, one in states.items():
            if one["state"] == "failed" and one["incarnation"] > MAX_LOSSES:
                self.gave_up.append(name)
        told = tuple(f"{name} failed" for name in self.gave_up)
        self.problems = [one for one in self.problems if not one.startswith(told)]
        there = {pid for host in TRAIN_HOSTS for pid in self.network.named(host, "fake_job.py")}
        return [f"process {pid} runs still" for pid in sorted(there)]

    def close(self) -> None:
        self.ray.close()
        self.ray.strike(0, "cluster\0serve")

    # -- faults ------------------------------------------------------------------------

    def strike(self, kind: str) -> None:
        FAULTS[kind](self, kind)

    def kill_service(self, kind: str) -> None:
        self.ray.strike(0, "cluster\0serve")
        time.sleep(self.rng.choice((0.0, 0.5, 2.0, LEASE_S + 2.0)))
        began_s = time.monotonic()
        self.ray.serve()
        with self.lock:
            self.ray.status()
        self.back_s.append(time.monotonic() - began_s)
        self.count(kind)

    def kill_actor(self, kind: str) -> None:
        mailbox = kind.startswith("mailbox")
        host = 0 if mailbox else self.rng.choice(TRAIN_HOSTS)
        if self.ray.strike(host, "ray::Boxes" if mailbox else "ray::Warden"):
            self.count(kind)

    def kill_raylet(self, kind: str) -> None:
        host = self.rng.choice((*TRAIN_HOSTS, *TRAIN_HOSTS, *range(3, len(self.pools))))
        if self.rng.random() < 0.5:  # as a host does whose processes are all stopped for a while
            self.ray.strike(host, "ray::Warden")
        self.end_ray(host)
        time.sleep(self.rng.choice((0.0, 2.0, 10.0, LONG_S)))
        self.start_ray(host)

    def cut(self, kind: str) -> None:
        host = self.rng.choice((*TRAIN_HOSTS, len(self.pools) - 1))
        for_long = kind.endswith("long")
        if held := for_long and self.rng.random() < 0.5:
            self.ray.strike(host, "fake_job.py", signal.SIGSTOP)
        self.network.cut(host)
        time.sleep(LOST_S + LONG_S if for_long else self.rng.uniform(1.0, 8.0))
        self.network.mend(host)
        if held:
            self.ray.strike(host, "fake_job.py", signal.SIGCONT)
        if for_long:  # ray has given it up, and its raylet learns that now
            self.end_ray(host)
            self.start_ray(host)

    def restart_ray(self, kind: str) -> None:
        in_threads([lambda h=host: self.end_ray(h) for host in range(len(self.pools))])  # type: ignore[misc]
        self.ray.strike(0, "cluster\0serve")
        self.ray.strike(0, "tests.cluster.desk")  # ray takes nobody over into another cluster
        time.sleep(self.rng.choice((0.0, 5.0)))
        for host in range(len(self.pools)):
            self.start_ray(host)
        began_s = time.monotonic()
        self.ray.serve()
        self.back_s.append(time.monotonic() - began_s)

    def end_ray(self, host: int) -> None:
        self.ray.strike(host, "gcs_server")
        self.ray.strike(host, "raylet/raylet")
        until = time.monotonic() + 30.0
        while self.network.named(host, "raylet/raylet") and time.monotonic() < until:
            time.sleep(0.1)

    def start_ray(self, host: int) -> None:
        """As a person would: what is left of ray itself is ended first, and it is tried again."""
        for left in reversed(range(NUM_TRIES)):
            for part in ("site-packages/ray/", "ray::"):
                self.ray.strike(host, part)
            try:
                self.network.start_ray([host], resources={f"pool_{self.pools[host]}": 1})
                return
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(f"ray has not started on host {host}: {str(error)[-300:]}", flush=True)
                if not left:
                    raise

    def strike_ray(self, kind: str) -> None:
        """Alone, and wait until all jobs go on."""
        alive = self.top_up()
        self.ray.goes_on(*alive, more=1, within_s=self.patience_s)
        print(f"{time.strftime('%X')}  {kind}", flush=True)
        FAULTS[kind](self, kind)
        self.count(kind)
        began_s = time.monotonic()
        before = {name: len(self.ray.commits(name)) for name in alive}
        while waiting := self.stands_still(before):
            if time.monotonic() - began_s > self.patience_s:
                self.problems.append(f"{kind}: {', '.join(waiting)} did not go on")
                return
            time.sleep(0.2)
        self.on_s.setdefault(kind, []).append(time.monotonic() - began_s)

    def stands_still(self, before: dict[str, int]) -> list[str]:
        waiting = [name for name, n in before.items() if len(self.ray.commits(name)) <= n]
        if not waiting:
            return []
        with self.lock:
            states = self.ray.status()
        return [name for name in waiting if states[name]["state"] not in ENDED]


FAULTS: dict[str, Callable[[Lab, str], None]] = {
    "service killed": Lab.kill_service,
    "mailbox killed": Lab.kill_actor,
    "warden killed": Lab.kill_actor,
    "job killed": Lab.kill_part,
    "engine killed": Lab.kill_part,
    "keeper killed": Lab.kill_part,
    "job stopped within its lease": Lab.stop_job,
    "job stopped beyond its lease": Lab.stop_job,
    "raylet killed": Lab.kill_raylet,
    "host cut off for a moment": Lab.cut,
    "host cut off for long": Lab.cut,
    "all of ray restarted": Lab.restart_ray,
}


def volley(one: Lab, pool: ThreadPoolExecutor, undisturbed: dict[str, list[float]]) -> None:
    """What was noticed while only jobs were struck is undisturbed."""
    one.top_up()
    kinds = one.rng.choices([*SHARES], [*SHARES.values()], k=one.rng.randint(1, MOST_AT_A_TIME))
    struck = [kind for kind in kinds if kind.startswith("service")]
    kinds = [kind for kind in kinds if kind not in struck] + struck[:1]
    print(f"{time.strftime('%X')}  {kinds}", flush=True)
    before = {kind: len(times) for kind, times in one.noticed_s.items()}
    for done in [pool.submit(one.strike, kind) for kind in kinds]:
        done.result()
    if not any(kind.startswith(("service", "mailbox", "warden")) for kind in kinds):
        for kind, times in one.noticed_s.items():
            undisturbed.setdefault(kind, []).extend(times[before.get(kind, 0) :])
    time.sleep(one.rng.uniform(0.0, 0.5))


def run(one: Lab, faults: int) -> dict[str, Any]:
    began_s, undisturbed, number = time.monotonic(), dict[str, list[float]](), 0
    load = []
    one.top_up()
    with ThreadPoolExecutor(MOST_AT_A_TIME) as pool:
        while sum(one.struck.values()) < faults and not one.problems:
            number += 1
            load.append(os.getloadavg()[0])
            if number % OF_RAY_EVERY:
                volley(one, pool, undisturbed)
            else:
                (kind,) = one.rng.choices([*OF_RAY], [*OF_RAY.values()])
                one.strike_ray(kind)
    commits = {name: one.ray.commits(name) for name in one.submitted}
    ended = one.finish()
    late = [
        f"{kind}: {seconds:.2f} s"
        for kind, times in undisturbed.items()
        for seconds in times
        if seconds > FREE_S + (LEASE_S if "stopped" in kind else 0.0)
    ]
    return {
        "hosts": len(one.pools),
        "nodes": one.nodes,
        "jobs_at_a_time": NUM_JOBS,
        "faults": sum(one.struck.values()),
        "struck": dict(one.struck),
        "seconds": round(time.monotonic() - began_s, 1),
        "jobs": ended,
        "gave_up_after_losses": len(one.gave_up),
        "commits": sum(map(len, commits.values())),
        "incarnations": sum(len({c["by"] for c in lines}) for lines in commits.values()),
        "two_on_one_device": violations(one.ray.devices),
        "problems": one.problems,
        "lost_until_started_anew_s": {kind: spread(times) for kind, times in undisturbed.items()},
        "late": late,
        "service_back_s": spread(one.back_s),
        "service_back_late": sum(seconds > BACK_S for seconds in one.back_s),
        "all_jobs_go_on_after_s": {kind: spread(times) for kind, times in one.on_s.items()},
        "load_mean": round(sum(load) / len(load), 1),
    }


@pytest.mark.skipif("ROLLPACKER_TEST_CLUSTER" not in os.environ, reason="make test-cluster runs it")
@pytest.mark.timeout(3600)
def test_no_fault_loses_or_doubles_a_commit(tmp_path: Path) -> None:
    """And no two jobs are ever on one device."""
    if why := why_impossible():
        pytest.fail(why)
    with Network(len(POOLS), cores=1, apart=True, lost_s=LOST_S) as network:
        one = Lab(tmp_path, random.Random(1), network=network, pools=POOLS)
        try:
            found = run(one, number_of(12))
        finally:
            with suppress(OSError):
                one.close()
    print(found)
    assert not found["problems"] and not found["two_on_one_device"], found
