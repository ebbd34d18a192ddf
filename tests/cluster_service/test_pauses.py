"""When jobs that were lost are started again, and what is said of jobs that wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rollpacker.cluster.commands.show import doing
from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.cluster_turns import MAX_LOSSES
from rollpacker.cluster.service import book, service
from rollpacker.cluster.service.service import BUSY, Service
from tests.cluster_service import lab
from tests.cluster_service.test_last_commit import trained
from tests.cluster_service.test_service import House, clock, house, look_always, submit

__all__ = ["clock", "house", "look_always"]


def test_who_is_lost_again_is_started_after_a_pause(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "PAUSES_S", (0.0, 600.0))
    submit(house, "a")
    house.step()
    house.end("a", 1)
    house.until(lambda: ("a", 2) in house.runner.orders)  # at once
    house.end("a", 1, 2)
    house.until(lambda: house.job("a")["incarnation"] == 3)
    for _ in range(3):
        house.step()
    assert ("a", 3) not in house.runner.orders
    told = "starts again in 600 s: its process ended with exit code 1"
    assert house.job("a")["why"] == told
    house.service.close()
    house.new_service()  # which knows the same
    house.step()
    assert ("a", 3) not in house.runner.orders
    house.clock.sleep(600.0)
    house.until(lambda: ("a", 3) in house.runner.orders)
    house.ask("a", "rollout", 3)
    house.leave("a", 3)
    house.commit("a", 1, 3)
    house.end("a", 1, 3)
    house.until(lambda: ("a", 4) in house.runner.orders)  # a commit makes up for it


def test_who_finds_another_run_in_its_folder_tries_again_for_as_long_as_it_takes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "PAUSES_S", (0.0,))
    submit(house, "a")
    for incarnation in range(1, 2 * MAX_LOSSES + 2):
        house.until(lambda n=incarnation: ("a", n) in house.runner.orders)  # type: ignore[misc]
        house.end("a", BUSY, incarnation)
    house.until(lambda: ("a", 2 * MAX_LOSSES + 2) in house.runner.orders)
    assert house.job("a")["state"] == "running"


# -- what is said ------------------------------------------------------------------


def test_in_round_robin_it_is_said_whose_turn_it_is(tmp_path: Path) -> None:
    house = trained(tmp_path)
    assert house.job("b")["why"] == "it is a's turn"
    house.ask("a", "rollout")
    assert house.job("b")["why"] == "", "a holds it"


def test_a_job_whose_nodes_are_not_left_yet_says_who_is_there(tmp_path: Path) -> None:
    house = House(tmp_path, nodes=1)
    submit(house, "a", slo=1.0)
    submit(house, "b", slo=1.0)
    house.ask("a", "rollout")
    house.leave("a")
    house.desk.ask("drain", node="cheap/0")
    house.commit("a", 1)  # it has lost its nodes, and its process is there
    house.desk.ask("cancel", job="a")
    house.desk.ask("drain", node="cheap/0", restore=True)
    b = house.job("b")
    assert (b["state"], b["why"]) == ("running", "starts once a has left cheap/0")
    house.end("a", 130)
    house.until(lambda: ("b", 1) in house.runner.orders)
    assert house.job("b")["why"] == "starts"


def test_who_waits_for_a_quota_or_behind_another_is_told_so(tmp_path: Path) -> None:
    class Ruled(House):
        def new_service(self) -> Service:
            self.service = super().new_service()
            self.service.close()
            self.service = Service(
                Cluster(lab.pools(2), CheapestWork(), quotas={"ann": {"rollout": 1}}),
                name="lab",
                folder=self.folder,
                mailbox=self.mailbox,
                runner=self.runner,
                tell=self.told.append,
            )
            return self.service

    house = Ruled(tmp_path, nodes=2)
    submit(house, "a", slo=1.0, owner="ann")
    assert submit(house, "b", slo=1.0, owner="ann")["why"] == (
        "ann's running jobs have 1 of the 1 rollout devices of quotas.ann, and it needs 1"
    )
    submit(house, "c", slo=1.0, owner="bob")
    assert "the slowdown of a would be" in submit(house, "d", slo=1.0, owner="bob")["why"]
    assert submit(house, "e", slo=9.0, owner="bob")["why"] == (
        "d comes first, which fits nowhere now, and nobody overtakes it"
    )


def test_a_pause_is_shown_of_a_job_that_was_heard_before_its_loss(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "PAUSES_S", (600.0,))
    submit(house, "a")
    house.ask("a", "rollout")
    house.leave("a")
    house.end("a", 1)
    house.until(lambda: house.job("a")["incarnation"] == 2)
    told = "starts again in 600 s: its process ended with exit code 1"
    assert house.job("a")["why"] == told


def test_a_job_that_is_done_without_a_commit_is_told_so(house: House) -> None:
    for name, num_commits in (("a", 0), ("b", 1)):
        submit(house, name)
        house.ask(name, "rollout")
        house.leave(name)
        for step in range(num_commits):
            house.commit(name, step + 1)
        house.end(name, 0)
        house.until(lambda name=name: house.job(name)["state"] == "done")  # type: ignore[misc]
    assert "rollpacker.cluster.committed(step)" in doing(house.job("a"))
    assert doing(house.job("b")) == "-"


# -- the host's clock --------------------------------------------------------------


@pytest.mark.parametrize("restarts", [False, True])
def test_a_clock_that_is_set_forward_and_back_holds_up_no_pause(
    house: House, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Also if what happened last was written while it was wrong."""
    monkeypatch.setattr(book, "PAUSES_S", (10.0,))
    right = service.time
    wrong = SimpleNamespace(
        time=lambda: house.clock.now_s + 86400.0,
        monotonic=house.clock.monotonic,
        sleep=house.clock.sleep,
    )
    submit(house, "a")
    house.step()
    monkeypatch.setattr(service, "time", wrong)
    if restarts:
        house.service.close()
        house.new_service()
    house.end("a", 1)
    house.until(lambda: house.job("a")["incarnation"] == 2)
    monkeypatch.setattr(service, "time", right)
    if restarts:
        house.service.close()
        house.new_service()
    assert house.passes(lambda: ("a", 2) in house.runner.orders) == pytest.approx(10.0, abs=1.0)
