"""A service, its jobs and their devices as processes: all together, and struck."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollpacker.cluster.on_ray.warden import HOSTS
from rollpacker.cluster.seats.mailbox_seat import LEASE_S
from rollpacker.cluster.service.local_runner import ROLLOUT_NODES, TRAIN_NODES, LocalRunner
from rollpacker.cluster.service.starts_alive import SILENT_S
from tests.cluster_service import lab
from tests.cluster_service.witness import Device, devices_of, is_held, violations


class Town:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.desk = lab.Desk(folder)
        self.service = lab.start_service(folder)

    def restart(self) -> None:
        self.service.kill()
        self.service.wait()
        self.service = lab.start_service(self.folder)

    def until(self, true: Callable[[], object], within_s: float = 60.0) -> float:
        began_s = time.monotonic()
        while not true():
            assert time.monotonic() - began_s < within_s, self.desk.ask("status")
            time.sleep(0.02)
        return time.monotonic() - began_s

    def state(self, name: str) -> str:
        return str(self.desk.status()[name]["state"])

    def process(self, name: str) -> int:
        return int((self.folder / "jobs" / name / "1" / "process").read_text())


def has_ended(pid: int) -> bool:
    """Also where nobody has asked yet how."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    town.service.kill()
    town.service.wait()
    runner = LocalRunner(tmp_path)
    for place in tmp_path.glob("jobs/*/[0-9]*"):
        runner.kill(place.parent.name, int(place.name))


def test_jobs_share_nodes_and_each_does_every_iteration_once(town: Town) -> None:
    names = ["a", "b", "c"]
    for name in names:
        town.desk.submit(lab.job(name, 5, 0.15, 0.15))
    town.until(lambda: all(town.state(name) == "done" for name in names))
    assert [lab.problems(town.desk, name, 5) for name in names] == [[], [], []]
    assert violations(town.desk.devices) == []
    used = {one["by"].split("#")[0] for name in names for one in town.desk.commits(name)}
    assert used == {"a", "b", "c"}


def is_stopped_while_it_holds(town: Town, name: str) -> bool:
    """If it left its pool just before it stood still, it goes on."""
    if town.desk.status()[name]["holds"]:
        os.kill(town.process(name), signal.SIGSTOP)
        if town.desk.status()[name]["holds"]:
            return True
        os.kill(town.process(name), signal.SIGCONT)
    return False


def test_a_stopped_job_is_ended_before_its_pool_is_given_on(town: Town) -> None:
    """The service is killed meanwhile; the stopped job goes on, if it can."""
    for name in "ab":
        town.desk.submit(lab.job(name, 4, 0.4, 0.4))
    town.until(lambda: town.desk.status()["a"]["steps"] >= 1)
    town.until(lambda: is_stopped_while_it_holds(town, "a"))
    stopped_s = time.monotonic()
    town.restart()
    town.until(lambda: town.desk.status()["a"]["incarnation"] == 2)
    assert time.monotonic() - stopped_s < SILENT_S, "those who wait have so long"
    assert has_ended(town.process("a"))
    town.until(lambda: all(town.state(name) == "done" for name in "ab"))
    assert [lab.problems(town.desk, name, 4) for name in "ab"] == [[], []]
    assert violations(town.desk.devices) == []


def test_jobs_go_on_while_there_is_no_service(town: Town) -> None:
    town.desk.submit(lab.job("a", 3, 1.0, 0.2))
    town.until(lambda: is_held(town.desk.devices, "cheap/0"))
    town.service.kill()
    town.service.wait()
    time.sleep(LEASE_S + 1.0)
    town.restart()
    town.until(lambda: town.state("a") == "done")
    assert town.desk.status()["a"]["incarnation"] == 1
    assert lab.problems(town.desk, "a", 3) == []


def test_the_witness_sees_two_on_one_device(tmp_path: Path) -> None:
    first, second = Device(tmp_path, "cheap/0"), Device(tmp_path, "cheap/0")
    assert first.hold("a") and is_held(tmp_path, "cheap/0")
    assert violations(tmp_path) == []
    assert not second.hold("b")
    (seen,) = violations(tmp_path)
    assert '"comes": "b"' in seen and f"a (pid {os.getpid()})" in seen
    first.drop()
    assert not is_held(tmp_path, "cheap/0") and second.hold("b")


def test_the_witness_sees_two_nodes_that_are_one_host(tmp_path: Path) -> None:
    first, second = (
        {ROLLOUT_NODES: f"cheap/{n}", TRAIN_NODES: "fast/0", HOSTS["rollout"]: "10.0.0.7"}
        for n in range(2)
    )
    (one,), (other,) = (devices_of(tmp_path, own, "rollout") for own in (first, second))
    assert one.hold("a") and not other.hold("b")
    assert '"device": "10.0.0.7"' in violations(tmp_path)[0]
    (alone,) = devices_of(tmp_path, first, "train")
    assert alone.node == "fast/0", "where jobs have no other host"


def test_a_service_is_a_process_that_may_be_killed_at_once(tmp_path: Path) -> None:
    service: subprocess.Popen[bytes] = lab.start_service(tmp_path)
    service.kill()
    assert service.wait() == -signal.SIGKILL
    town = Town(tmp_path)
    assert town.desk.status() == {}
    town.service.kill()
    town.service.wait()
