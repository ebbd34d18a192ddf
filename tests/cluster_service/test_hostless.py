"""The service takes jobs off nodes whose host is away for long."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollpacker.cluster import hostless, losses
from rollpacker.cluster.book import node_name
from rollpacker.cluster.runner import NoHost, Order
from rollpacker.cluster.service import Service
from rollpacker.core.coexecution.nodes import Node
from tests.cluster_service.test_service import House, Pretended, look_always, submit

__all__ = ["look_always"]


@dataclass
class Away(Pretended):
    away: set[str] = field(default_factory=set)
    """Nodes without a host."""
    wishes: list[Mapping[str, int]] = field(default_factory=list)

    def start(self, order: Order) -> None:
        for node in (*order.train_nodes, *order.rollout_nodes):
            if node_name(node) in self.away:
                raise NoHost(node, f"no host for {node_name(node)}")
        super().start(order)

    def has_host(self, node: Node) -> bool:
        return node_name(node) not in self.away

    def want(self, num_nodes: Mapping[str, int]) -> None:
        self.wishes.append(num_nodes)


class Village(House):
    def new_service(self) -> Service:
        if not isinstance(self.runner, Away):
            self.runner: Away = Away()
        return super().new_service()


def lost(folder: Path, nodes: int) -> Village:
    """A job has run on cheap/0, whose host is gone."""
    village = Village(folder, nodes)
    assert submit(village, "a")["rollout_nodes"] == ["cheap/0"]
    village.ask("a", "rollout")
    village.leave("a")
    village.commit("a", 1)
    village.runner.away.add("cheap/0")
    village.end("a", -1)
    village.until(lambda: village.job("a")["incarnation"] == 2)
    return village


def test_a_job_goes_elsewhere_if_its_nodes_host_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostless, "HOSTLESS_S", 0.5)
    village = lost(tmp_path, nodes=2)
    began_s = time.monotonic()
    village.until(lambda: ("a", 3) in village.runner.orders)
    assert time.monotonic() - began_s > 0.3, "it waited for the host"
    assert village.job("a")["rollout_nodes"] == ["cheap/1"]
    assert village.runner.orders["a", 3].command[-1] == "--resume=auto"
    assert "node cheap/0 has no host, and gets no more jobs until it does" in village.told
    village.service.close()
    village.new_service()  # which knows the same
    village.runner.away.clear()
    village.until(lambda: "node cheap/0 may have jobs again" in village.told)
    assert village.job("a")["incarnation"] == 3, "where it is it stays"


def test_who_cannot_be_started_yet_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was heard last is its earlier start's: it would be lost again and again."""
    monkeypatch.setattr(losses, "SILENT_S", 0.3)
    village = lost(tmp_path, nodes=2)
    time.sleep(0.5)
    for _ in range(5):
        village.step()
    assert (village.job("a")["state"], village.job("a")["incarnation"]) == ("running", 2)
    village.runner.away.clear()
    village.until(lambda: ("a", 2) in village.runner.orders)


def test_where_it_fits_nowhere_else_it_waits_for_the_host_which_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostless, "HOSTLESS_S", 0.2)
    village = lost(tmp_path, nodes=1)
    village.until(lambda: village.job("a")["state"] == "waiting")
    assert village.job("a")["why"] == "cheap/0 of pool cheap may have jobs once there is a host"
    assert village.runner.wishes[-1]["cheap"] == 1, "for who can rent one"
    village.runner.away.clear()
    village.until(lambda: ("a", 3) in village.runner.orders)
    assert village.job("a")["rollout_nodes"] == ["cheap/0"]


def test_a_node_that_somebody_drains_stays_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostless, "HOSTLESS_S", 0.2)
    monkeypatch.setattr(hostless, "_LOOK_S", 0.0)
    village = lost(tmp_path, nodes=2)
    village.until(lambda: ("a", 3) in village.runner.orders)
    village.desk.ask("drain", node="cheap/0")
    village.runner.away.clear()
    for _ in range(5):
        village.step()
    (cheap,) = (one for one in village.desk.ask("status")["pools"] if one["name"] == "cheap")
    assert cheap["drained"] == ["cheap/0"]


def test_who_drains_a_node_without_a_host_sends_its_jobs_elsewhere_at_once(tmp_path: Path) -> None:
    village = lost(tmp_path, nodes=2)
    village.desk.ask("drain", node="cheap/0")
    village.until(lambda: ("a", 3) in village.runner.orders)
    village.runner.away.clear()
    village.step()
    assert "node cheap/0 may have jobs again" not in village.told


def test_a_host_that_comes_back_soon_keeps_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostless, "HOSTLESS_S", 1.0)
    village = lost(tmp_path, nodes=2)
    time.sleep(0.6)
    village.runner.away.clear()
    village.until(lambda: ("a", 2) in village.runner.orders)
    village.runner.away.add("cheap/0")  # and again: that counts anew
    village.end("a", -1, 2)
    village.until(lambda: village.job("a")["incarnation"] == 3)
    time.sleep(0.6)
    village.step()
    assert not any("has no host, and gets" in one for one in village.told)
