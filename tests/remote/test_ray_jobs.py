"""Which hosts of ray are a pool's nodes, and when a job is gone from one that ray does not have;
what needs a ray is in tests/cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="runtime=ray needs it")
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.on_ray import wardens as ray_wardens
from rollpacker.cluster.on_ray.jobs import RayRunner, pool_resource
from rollpacker.cluster.on_ray.wardens import MARGIN_S, Wardens
from rollpacker.cluster.service.keeper import FENCE_S
from rollpacker.cluster.service.runner import JobOrder
from rollpacker.workers.hosts.ray_agents import LEASE_S
from rollpacker.workers.hosts.token import MODE, PATH

HEAD = {"node:__internal_head__": 1.0}
CHEAP, FAST = ({pool_resource(pool): 1.0} for pool in ("cheap", "fast"))


class Runner(RayRunner):
    """On hosts that are made up."""

    there: dict[str, dict[str, float]]

    def hosts(self, *, fresh: bool = True) -> dict[str, dict[str, float]]:
        return self.there


def runner(folder: Path, one_host: bool = False, **there: dict[str, float]) -> Runner:
    found = Runner("lab", head="a:1", folder=folder, one_host=one_host)
    found.there = there
    return found


def test_without_marks_a_node_of_each_phase_is_the_heads_host(tmp_path: Path) -> None:
    lab = runner(tmp_path, one_host=True, a=HEAD, b={})
    assert {lab.host_of(Node(pool, 0)) for pool in ("cheap", "fast")} == {"a"}


def test_without_marks_several_nodes_of_a_phase_are_no_hosts(tmp_path: Path) -> None:
    """Hosts of the pools may come later; two nodes must not be one host's devices."""
    lab = runner(tmp_path, a=HEAD, b={})
    assert [lab.host_of(Node("cheap", n)) for n in range(3)] == [None] * 3


def test_no_two_nodes_have_one_host_and_a_node_keeps_its_own(tmp_path: Path) -> None:
    lab = runner(tmp_path, a={**HEAD, **FAST}, b=CHEAP, c=CHEAP, d=CHEAP)
    assert lab.host_of(Node("fast", 0)) == "a"
    hosts = [lab.host_of(Node("cheap", number)) for number in range(3)]
    assert sorted(map(str, hosts)) == ["b", "c", "d"]
    assert lab.host_of(Node("cheap", 3)) is None
    # The first host is away: nobody else becomes its node, in the next service neither.
    lab = runner(tmp_path, a={**HEAD, **FAST}, c=CHEAP, d=CHEAP)
    assert lab.host_of(Node("cheap", 0)) is None
    assert [lab.host_of(Node("cheap", n)) for n in (1, 2)] == hosts[1:]
    lab.there["e"] = CHEAP  # it takes the place
    assert lab.host_of(Node("cheap", 0)) == "e"
    lab.there["b"] = CHEAP  # and the one that comes back has none
    assert [lab.host_of(Node("cheap", n)) for n in range(3)] == ["e", *hosts[1:]]
    assert lab.host_of(Node("cheap", 3)) == "b"


def test_a_node_without_a_host_is_said_with_what_to_do(tmp_path: Path) -> None:
    lab = runner(tmp_path, a={**HEAD, **FAST})
    with pytest.raises(OSError, match=r"no host for node 0 of the pool cheap.*pool_cheap"):
        lab._address(Node("cheap", 0))
    assert not lab.has_host(Node("cheap", 0)) and lab.has_host(Node("fast", 0))


# -- hosts that are away -------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Hosts(Wardens):
    """Made up: raylets by address, and wardens that know what was started."""

    def __init__(self, *addresses: str) -> None:
        super().__init__("lab", head="a:1", folder=Path("none"))
        self.raylets = [(address, f"{address}-1", True) for address in addresses]
        self.running: dict[str, set[tuple[str, int]]] = {address: set() for address in addresses}
        self.killed: list[tuple[str, tuple[str, int]]] = []
        self.asked: list[tuple[str, str, tuple[Any, ...]]] = []
        self.codes: dict[tuple[str, int], int] = {}
        """Of starts that are to end with another one than 0."""

    def ask_ray(self, function: Any, *arguments: Any) -> Any:
        return [
            {"NodeManagerAddress": address, "NodeID": name, "Alive": is_alive, "Resources": mark}
            for address, name, is_alive in self.raylets
            for mark in [{pool_resource("fast" if address in "ab" else "cheap"): 1.0}]
        ]

    def lose(self, address: str) -> None:
        self.raylets = [(a, name, is_alive and a != address) for a, name, is_alive in self.raylets]

    def make(self, address: str) -> None:
        pass

    def begin(self, address: str, method: str, *arguments: Any, key: Any = None) -> None:
        if address in self.hosts():
            self.answer(address, method, *arguments)

    def tell(self, addresses: Any, method: str, *arguments: Any, **_: Any) -> list[Any]:
        if away := set(addresses) - self.hosts().keys():
            raise OSError(f"{away} does not answer")
        return [self.answer(address, method, *arguments) for address in addresses]

    def answer(self, address: str, method: str, *arguments: Any) -> Any:
        there = self.running[address]
        self.asked.append((address, method, arguments))
        match method:
            case "begin":
                there.add((arguments[0].job, arguments[0].incarnation))
            case "kill":
                self.killed.append((address, arguments))
                there.discard(arguments)
            case "codes":
                codes = {start: self.codes.get(start, 0) for start in arguments[0]}
                return {start: None if start in there else code for start, code in codes.items()}
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_wardens, "time", clock)
    monkeypatch.setattr("rollpacker.cluster.on_ray.jobs.time", clock)
    monkeypatch.setenv(MODE, "token")
    monkeypatch.setenv(PATH, "none")
    return clock


def started(folder: Path) -> tuple[RayRunner, Hosts]:
    """A job whose first process is on host a, with an engine on host c; b may take a's place."""
    lab = RayRunner("lab", head="a:1", folder=folder)
    hosts = lab._wardens = Hosts("a", "b", "c")
    lab.start(order(1))
    assert lab.ended("one", 1) is None
    return lab, hosts


def order(incarnation: int, job: str = "one", train: int = 0) -> JobOrder:
    return JobOrder(
        job=job,
        incarnation=incarnation,
        command=["true"],
        environ={},
        folder="/",
        rollout_nodes=[Node("cheap", 0)],
        train_nodes=[Node("fast", train)],
    )


def test_a_host_that_is_away_has_its_job_until_its_keepers_have_ended_it(
    tmp_path: Path, clock: Clock
) -> None:
    lab, hosts = started(tmp_path)
    hosts.lose("a")
    clock.now_s += 5.0
    assert lab.ended("one", 1) is None
    with pytest.raises(OSError, match="a is cut off, and what one has there is not gone yet"):
        lab.kill("one", 1)
    assert ("c", ("one", 1)) in hosts.killed, "others need not wait for it"
    clock.now_s += FENCE_S
    assert lab.ended("one", 1) is None
    clock.now_s += 2 * MARGIN_S
    assert lab.ended("one", 1) == -1
    again = RayRunner("lab", head="a:1", folder=tmp_path)  # a new service
    assert again.ended("one", 1) == -1
    # It is back, and what was left there, if anything, ends before anybody is started.
    hosts.raylets.append(("a", "a-2", True))
    clock.now_s += 5.0
    lab.start(order(2))
    assert ("a", ("one", 1)) in hosts.killed
    assert hosts.running["a"] == {("one", 2)}


def test_a_host_that_was_back_for_a_moment_may_have_its_job_still(
    tmp_path: Path, clock: Clock
) -> None:
    """Its new raylet had a warden, which has told its keepers that it is one of the cluster's."""
    lab, hosts = started(tmp_path)
    hosts.lose("a")
    clock.now_s += 5.0
    assert lab.ended("one", 1) is None
    hosts.raylets.append(("a", "a-2", False))
    clock.now_s += FENCE_S + MARGIN_S
    assert lab.ended("one", 1) is None
    clock.now_s += FENCE_S + MARGIN_S + 2.0
    assert lab.ended("one", 1) == -1


def test_engines_on_a_host_that_is_away_end_with_their_agent(tmp_path: Path, clock: Clock) -> None:
    lab, hosts = started(tmp_path)
    hosts.lose("c")
    clock.now_s += 5.0
    with pytest.raises(OSError, match="c is cut off"):
        lab.kill("one", 1)
    assert hosts.running["a"] == set()
    assert lab.ended("one", 1) is None
    clock.now_s += FENCE_S + MARGIN_S + 2.0
    assert FENCE_S > LEASE_S
    lab.kill("one", 1)
    assert lab.ended("one", 1) == 0


def test_who_is_at_another_host_now_is_not_started_twice(tmp_path: Path, clock: Clock) -> None:
    """Its start was made, and the answer lost with the host."""
    lab, hosts = started(tmp_path)
    hosts.lose("a")
    clock.now_s += 5.0
    lab.start(order(1))
    assert hosts.running["b"] == set()
    assert lab.ended("one", 1) is None
    clock.now_s += FENCE_S + MARGIN_S + 2.0
    assert lab.ended("one", 1) == -1
    lab.start(order(1))
    assert hosts.running["b"] == {("one", 1)}
    assert lab.ended("one", 1) is None
    assert RayRunner("lab", head="a:1", folder=tmp_path)._codes == {}


def test_a_host_whose_node_another_one_is_now_becomes_no_other_node_while_its_job_is_there(
    tmp_path: Path, clock: Clock
) -> None:
    """In the next service neither. Two jobs would be on one host's devices at once."""
    lab, hosts = started(tmp_path)
    hosts.lose("a")
    clock.now_s += 2.0
    lab.start(order(1, "two"))
    assert hosts.running["b"] == {("two", 1)}
    hosts.raylets.append(("a", "a-2", True))  # soon enough for its job to go on
    clock.now_s += 3.0
    again = RayRunner("lab", head="a:1", folder=tmp_path)
    again._wardens = hosts
    for one in (lab, again):
        assert one.ended("one", 1) is None
        with pytest.raises(OSError, match="no host for node 1 of the pool fast"):
            one.start(order(1, "three", train=1))
    assert hosts.running["a"] == {("one", 1)}
    again.kill("one", 1)
    again.start(order(1, "three", train=1))
    assert hosts.running["a"] == {("three", 1)}


@pytest.mark.parametrize("away", ["a", "c"])
def test_what_was_left_on_a_host_that_was_away_ends_also_if_the_service_is_another_one(
    away: str, tmp_path: Path, clock: Clock
) -> None:
    """Of the job's first process, or of its engines."""
    lab, hosts = started(tmp_path)
    hosts.running["c"].add(("one", 1))
    hosts.lose(away)
    clock.now_s += 5.0
    with pytest.raises(OSError, match=f"{away} is cut off"):
        lab.kill("one", 1)
    clock.now_s += FENCE_S + 2 * MARGIN_S
    lab.kill("one", 1)
    assert hosts.running[away] == {("one", 1)}, "its keepers were killed, or stopped with it"
    hosts.raylets.append((away, f"{away}-2", True))
    clock.now_s += 5.0
    again = RayRunner("lab", head="a:1", folder=tmp_path)
    again._wardens = hosts
    again.start(order(2))
    assert ("one", 1) not in hosts.running[away]
    assert hosts.running["a"] == {("one", 2)}
    hosts.killed.clear()  # that was all: a later service does not look for it once more
    later = RayRunner("lab", head="a:1", folder=tmp_path)
    later._wardens = hosts
    later.start(order(1, "two"))
    assert hosts.killed == []


def test_nobody_asks_about_a_start_that_was_killed_any_more(tmp_path: Path, clock: Clock) -> None:
    lab, hosts = started(tmp_path)
    hosts.codes["one", 1] = -9
    lab.kill("one", 1)
    lab.start(order(2))
    hosts.asked.clear()
    clock.now_s += 1.0
    assert lab.ended("one", 2) is None
    assert lab.ended("one", 1) == -9
    assert hosts.asked == [("a", "codes", ([("one", 2)],))]
    again = RayRunner("lab", head="a:1", folder=tmp_path)
    assert again.ended("one", 1) == -9


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_job_that_has_ended_before_it_is_killed_keeps_its_code(
    is_asked_first: bool, tmp_path: Path, clock: Clock
) -> None:
    lab, hosts = started(tmp_path)
    hosts.codes["one", 1] = 3
    hosts.running["a"].clear()
    clock.now_s += 1.0
    if is_asked_first:
        assert lab.ended("one", 1) == 3
    lab.kill("one", 1)
    assert lab.ended("one", 1) == 3
