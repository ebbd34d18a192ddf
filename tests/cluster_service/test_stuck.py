"""The service where something can neither be ended nor dealt with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Cancelled, Command, Event
from rollpacker.cluster.seats.mailbox import SERVICE
from rollpacker.cluster.seats.mailbox_seat import LEASE_S
from rollpacker.cluster.service.service import AWAY_S
from rollpacker.cluster.service.status import Status
from tests.cluster_service.test_service import (
    Clock,
    House,
    Pretended,
    clock,
    look_always,
    submit,
)

__all__ = ["clock", "look_always"]

STUCK_S = 10.0
assert STUCK_S > AWAY_S


class Stuck(Pretended):
    """The processes of one start do not end, which is found out after long."""

    clock: Clock
    start_id = ("a", 1)
    is_stuck = True

    def kill(self, job: str, incarnation: int) -> None:
        if self.is_stuck and (job, incarnation) == self.start_id:
            self.clock.sleep(STUCK_S)
            raise OSError(f"job {job}: its processes do not end")
        super().kill(job, incarnation)

    def ended(self, job: str, incarnation: int) -> int | None:
        if self.is_stuck and (job, incarnation) == self.start_id and self.marked:
            self.kill(job, incarnation)
        return super().ended(job, incarnation)

    marked = False
    """Somebody was about to end it."""


def stuck(folder: Path, nodes: int, clock: Clock) -> tuple[House, Stuck]:
    house = House(folder, nodes, clock)
    runner = house.runner = Stuck()
    runner.clock = clock
    house.service.close()
    house.new_service()
    return house, runner


def test_a_kill_that_takes_long_in_vain_excuses_nobody_elses_silence(
    tmp_path: Path, clock: Clock
) -> None:
    house, _ = stuck(tmp_path, 2, clock)
    for name in "ab":
        submit(house, name, slo=1.0)
        house.ask(name, "rollout")
        assert house.job(name)["holds"] == "rollout"
        clock.sleep(1.0)  # a is silent first
    waited_s = house.passes(lambda: "kill b 1" in house.runner.log)
    assert waited_s <= LEASE_S + 3 * STUCK_S


def test_a_service_comes_while_something_does_not_end(tmp_path: Path, clock: Clock) -> None:
    house, runner = stuck(tmp_path, 1, clock)
    submit(house, "a")
    house.ask("a", "rollout")
    house.service.close()
    runner.marked = True
    house.new_service()
    assert house.job("a")["state"] == "running" and house.job("a")["incarnation"] == 1
    runner.is_stuck = False
    house.end("a", -9)
    house.until(lambda: ("a", 2) in runner.orders)


def test_a_letter_that_the_core_fails_at_ends_one_service_and_not_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, nodes=1)
    submit(house, "a")
    handle = Cluster.handle

    def failing(cluster: Cluster, event: Event) -> list[Command]:
        assert not isinstance(event, Cancelled), "an error of ours"
        return handle(cluster, event)

    monkeypatch.setattr(Cluster, "handle", failing)
    house.mailbox.post(SERVICE, "who asked before", "1", "drain", {"node": "cheap/0"})
    house.mailbox.post(SERVICE, "somebody", "1", "cancel", {"job": "a"})
    house.mailbox.post(SERVICE, "who asks later", "1", "status", {})
    with pytest.raises(AssertionError, match="an error of ours"):
        house.step()
    assert "cancel of somebody is left out" in house.told[-1]
    (answer,) = house.mailbox.read("somebody", 0, 0.0)
    assert answer.kind == "refused" and "an error of ours" in answer.facts["why"]
    house.service.close()
    house.new_service()
    house.step()
    assert house.job("a")["state"] == "running"
    assert house.mailbox.read("somebody", answer.number, 0.0) == []
    for asker in ("who asked before", "who asks later"):
        (answer,) = house.mailbox.read(asker, 0, 0.0)
        assert answer.kind != "refused"
    house.service.close()
    house.new_service()
    house.step()
    assert not [one for one in house.told if "left out" in one][1:], "said once"


def test_a_start_that_a_new_service_makes_once_more_can_still_be_silent(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was away when the service came, and answers again just before the start."""
    house = House(tmp_path, 1, clock)
    submit(house, "a")
    house.ask("a", "rollout")
    house.service.close()
    house.runner.is_cut_off = True
    house.new_service()
    start_due = house.service._start_due

    def answers_again() -> None:
        house.runner.is_cut_off = False
        start_due()

    monkeypatch.setattr(house.service, "_start_due", answers_again)
    house.passes(lambda: "kill a 1" in house.runner.log)


def test_a_question_that_the_service_fails_at_is_refused_and_the_others_are_answered(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, 1, clock)
    submit(house, "a")

    def failing(self: Status, name: str, began_s: float) -> Any:
        raise ZeroDivisionError("an error of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Status, "whole", failing)
        house.mailbox.post(SERVICE, "somebody", "1", "status", {})
        house.step()
    (answer,) = house.mailbox.read("somebody", 0, 0.0)
    assert answer.kind == "refused" and "an error of ours" in answer.facts["why"]
    assert house.job("a")["state"] == "running"
