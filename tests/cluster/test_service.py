"""A cluster's service on ray over three hosts: jobs outlive it, its mailbox and a host's warden,
and no two are ever on one device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.lab import RayLab
from tests.cluster.netns import Network, why_impossible
from tests.cluster.test_cluster import pytestmark
from tests.cluster_service.lab import job

__all__ = ["pytestmark"]
STEPS = 25


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if why := why_impossible():
        pytest.fail(why)
    with Network(3) as network:
        for host, pool in enumerate(("fast", "cheap", "cheap")):
            network.start_ray([host], resources={f"pool_{pool}": 1})
        yield network


def test_jobs_outlive_service_mailbox_and_wardens(network: Network, tmp_path: Path) -> None:
    lab = RayLab(network, tmp_path, (2, 1))
    print("served after", lab.serve())
    one, two = (lab.submit(job(name, STEPS, 0.3, 0.2)) for name in ("one", "two"))
    assert (one["state"], two["state"]) == ("running", "running"), (one, two)
    assert one["train_nodes"] == ["fast/0"]
    lab.goes_on()
    assert network.named(0, "fake_job.py"), "jobs run where their training is"

    assert lab.strike(0, "cluster\0serve")
    print("served again after", lab.serve())
    lab.goes_on()
    assert lab.strike(0, "ray::Boxes")
    lab.goes_on()
    assert lab.strike(0, "ray::Warden")
    lab.goes_on()
    assert lab.strike(0, f"{tmp_path}/one\0{tmp_path}/devices")
    lab.goes_on()

    lab.until(lambda: {one["state"] for one in lab.status().values()} == {"done"}, 200.0)
    assert lab.problems() == []
    assert {name: len(lab.commits(name)) for name in lab.jobs} == {"one": STEPS, "two": STEPS}
    ended = lab.status()
    assert (ended["one"]["incarnation"], ended["two"]["incarnation"]) == (2, 1)
    hosts = json.loads((lab.own / "nodes.json").read_text())
    assert hosts["fast/0"] == network.addresses[0]
    assert set(hosts.values()) <= set(network.addresses)
    assert not [n for host in range(3) for n in network.named(host, "fake_job.py")]
    lab.close()
