"""A host of which ray knows nothing any more, while a job's processes are there still: nobody is
started in the job's place before they are gone. Every host has processes and a folder of its own,
so that nobody can end them from another one.

The jobs are stopped first, as one is that cannot notice that its lease is over.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollpacker.cluster.service.keeper import FENCE_S
from tests.cluster.lab import RayLab, send
from tests.cluster.netns import Network, why_impossible
from tests.cluster.test_cluster import pytestmark
from tests.cluster_service.lab import job

__all__ = ["pytestmark"]
STEPS = 400
LOST_S = 6.0
SLACK_S = 40.0
"""For ray, and for a start on a busy machine."""
POOLS = ("none", "fast", "fast", "cheap")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RayLab]:
    """With two hosts for one training node."""
    if why := why_impossible():
        pytest.fail(why)
    with Network(len(POOLS), cores=1, apart=True, lost_s=LOST_S) as network:
        lab = RayLab(network, tmp_path, (1, 1))
        lab.start_ray(POOLS)
        lab.serve()
        lab.submit(job("one", STEPS, 0.3, 0.3))
        lab.goes_on()
        yield lab
        lab.close()


def stop(lab: RayLab) -> tuple[int, list[int]]:
    """The job's host, and its processes, which are stopped while one of them holds a device."""
    host = next(host for host in (1, 2) if lab.pids(host, "one"))
    pids = lab.pids(host, "one")
    for _ in range(100):
        send(pids, signal.SIGSTOP)
        if lab.status()["one"]["holds"]:
            return host, pids
        send(pids, signal.SIGCONT)
        time.sleep(0.1)
    raise AssertionError("it never holds anything")


def comes_back(lab: RayLab, host: int, within_s: float) -> None:
    """The job goes on where it was, on this host, and never twice at a time."""
    began = time.monotonic()
    lab.goes_on(within_s=within_s)
    print(f"it went on after {time.monotonic() - began:.1f} s")
    assert lab.problems() == []
    assert lab.pids(host, "one")
    assert lab.status()["one"]["incarnation"] == 2


def test_a_job_is_gone_before_it_is_started_elsewhere_though_its_raylet_is_dead(lab: RayLab):
    """The warden dies with it, sooner or later; the job's processes do not."""
    host, pids = stop(lab)
    assert lab.strike(host, "raylet/raylet") and lab.strike(host, "ray::Warden")
    comes_back(lab, 3 - host, FENCE_S + SLACK_S)
    send(pids, signal.SIGCONT)
    assert not lab.pids(host, "one")


def test_a_job_is_gone_before_it_is_started_elsewhere_though_its_host_is_cut_off(lab: RayLab):
    host, _ = stop(lab)
    lab.network.cut(host)
    comes_back(lab, 3 - host, LOST_S + FENCE_S + SLACK_S)
    assert not lab.pids(host, "one")
    lab.network.mend(host)
    lab.goes_on(more=10)
    assert lab.problems() == []


def test_a_job_goes_on_elsewhere_if_its_host_is_gone_for_good(lab: RayLab):
    host, _ = stop(lab)
    lab.network.kill_all(host)
    comes_back(lab, 3 - host, LOST_S + FENCE_S + SLACK_S)


def test_a_raylet_that_is_started_again_finds_its_hosts_jobs_and_ends_them(lab: RayLab):
    """At the same address, with another node id; nobody waits until keepers do."""
    host, _ = stop(lab)
    assert lab.strike(host, "raylet/raylet") and lab.strike(host, "ray::Warden")
    began = time.monotonic()
    lab.network.start_ray([host], resources={"pool_fast": 1})
    comes_back(lab, host, SLACK_S)
    assert time.monotonic() - began < FENCE_S + SLACK_S
