"""Which hosts of ray are a pool's nodes; what needs a ray is in tests/cluster/test_service.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="runtime=ray needs it")
from rollpacker.core.coexecution.nodes import Node
from rollpacker.remote.ray_jobs import RayRunner, pool_resource

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
