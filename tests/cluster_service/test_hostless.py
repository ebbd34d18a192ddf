"""The service takes jobs off nodes whose host is away for long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.service.book import node_name
from rollpacker.cluster.service.runner import JobOrder, NoHost
from rollpacker.cluster.service.service import Service
from rollpacker.cluster.service.starts_alive import HOSTLESS_S, SILENT_S
from tests.cluster_service.test_service import (
    Clock,
    House,
    Pretended,
    clock,
    look_always,
    submit,
)

__all__ = ["clock", "look_always"]


@dataclass
class Away(Pretended):
    away: set[str] = field(default_factory=set)
    """Nodes without a host."""
    wishes: list[Mapping[str, int]] = field(default_factory=list)

    def start(self, order: JobOrder) -> None:
        self._check()
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


def lost(folder: Path, nodes: int, clock: Clock) -> Village:
    """A job has run on cheap/0, whose host is gone."""
    village = Village(folder, nodes, clock)
    assert submit(village, "a")["rollout_nodes"] == ["cheap/0"]
    village.ask("a", "rollout")
    village.leave("a")
    village.commit("a", 1)
    village.runner.away.add("cheap/0")
    village.end("a", -1)
    village.until(lambda: village.job("a")["incarnation"] == 2)
    village.step()  # and it was to be started
    return village


def test_a_job_goes_elsewhere_if_its_nodes_host_stays_away(tmp_path: Path, clock: Clock) -> None:
    village = lost(tmp_path, clock=clock, nodes=2)
    waited_s = village.passes(lambda: ("a", 3) in village.runner.orders)
    assert HOSTLESS_S < waited_s <= HOSTLESS_S + 2.0
    assert village.job("a")["rollout_nodes"] == ["cheap/1"]
    assert village.runner.orders["a", 3].command[-1] == "--resume=auto"
    assert "node cheap/0 has no host, and gets no more jobs until it does" in village.told
    village.service.close()
    village.new_service()  # which knows the same
    village.runner.away.clear()
    village.passes(lambda: "node cheap/0 may have jobs again" in village.told)
    assert village.job("a")["incarnation"] == 3, "where it is it stays"


def test_who_cannot_be_started_yet_is_not_silent(tmp_path: Path, clock: Clock) -> None:
    """What was heard last is its earlier start's: it would be lost again and again."""
    village = lost(tmp_path, clock=clock, nodes=2)
    for _ in range(int(SILENT_S) + 5):
        clock.sleep(1.0)
        village.step()
    assert (village.job("a")["state"], village.job("a")["incarnation"]) == ("running", 2)
    village.runner.away.clear()
    village.until(lambda: ("a", 2) in village.runner.orders)


def test_where_it_fits_nowhere_else_it_waits_for_the_host_which_is_wanted(
    tmp_path: Path, clock: Clock
) -> None:
    village = lost(tmp_path, clock=clock, nodes=1)
    village.passes(lambda: village.job("a")["state"] == "waiting")
    assert village.job("a")["why"] == "cheap/0 of pool cheap may have jobs once there is a host"
    assert village.runner.wishes[-1]["cheap"] == 1, "for who can rent one"
    village.runner.away.clear()
    village.passes(lambda: ("a", 3) in village.runner.orders)
    assert village.job("a")["rollout_nodes"] == ["cheap/0"]


def test_what_cannot_be_said_for_a_moment_does_not_begin_the_wait_anew(
    tmp_path: Path, clock: Clock
) -> None:
    """Every other second ray does not answer."""
    village = lost(tmp_path, clock=clock, nodes=2)

    def turns() -> bool:
        village.runner.is_cut_off = not village.runner.is_cut_off
        return ("a", 3) in village.runner.orders

    waited_s = village.passes(turns)
    assert HOSTLESS_S < waited_s <= HOSTLESS_S + 5.0
    assert village.job("a")["rollout_nodes"] == ["cheap/1"]


def test_a_node_is_drained_only_while_it_has_no_host(tmp_path: Path, clock: Clock) -> None:
    """Its host is back, and what was asked of it is not answered yet."""
    village = lost(tmp_path, clock=clock, nodes=2)
    for _ in range(int(HOSTLESS_S) - 5):
        clock.sleep(1.0)
        village.step()
    village.runner.away.clear()
    village.runner.is_slow = True
    for _ in range(20):
        clock.sleep(1.0)
        village.step()
    village.runner.is_slow = False
    village.until(lambda: ("a", 2) in village.runner.orders)
    assert not any("has no host, and gets" in one for one in village.told)


def test_a_node_that_somebody_drains_stays_drained(tmp_path: Path, clock: Clock) -> None:
    village = lost(tmp_path, clock=clock, nodes=2)
    village.passes(lambda: ("a", 3) in village.runner.orders)
    village.desk.ask("drain", node="cheap/0")
    village.runner.away.clear()
    for _ in range(5):
        clock.sleep(1.0)
        village.step()
    (cheap,) = (one for one in village.desk.ask("status")["pools"] if one["name"] == "cheap")
    assert cheap["drained"] == ["cheap/0"]


def test_who_drains_a_node_without_a_host_sends_its_jobs_elsewhere_at_once(
    tmp_path: Path, clock: Clock
) -> None:
    village = lost(tmp_path, clock=clock, nodes=2)
    village.desk.ask("drain", node="cheap/0")
    village.until(lambda: ("a", 3) in village.runner.orders)
    village.runner.away.clear()
    village.step()
    assert "node cheap/0 may have jobs again" not in village.told


def test_a_host_that_comes_back_soon_keeps_its_jobs(tmp_path: Path, clock: Clock) -> None:
    village = lost(tmp_path, clock=clock, nodes=2)
    for _ in range(200):
        clock.sleep(1.0)
        village.step()
    village.runner.away.clear()
    village.until(lambda: ("a", 2) in village.runner.orders)
    village.runner.away.add("cheap/0")  # and again: that counts anew
    village.end("a", -1, 2)
    village.until(lambda: village.job("a")["incarnation"] == 3)
    for _ in range(200):
        clock.sleep(1.0)
        village.step()
    assert not any("has no host, and gets" in one for one in village.told)
