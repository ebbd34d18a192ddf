"""The service passes over a job that hangs between two phases."""

from __future__ import annotations

from pathlib import Path

from rollpacker.cluster.decide.cluster_turns import PATIENCE_S
from tests.cluster_service.test_service import Clock, House, clock, look_always, submit

__all__ = ["clock", "look_always"]


class RoundRobin(House):
    order = "round_robin"


def test_a_job_that_hangs_between_phases_keeps_nobody_waiting(tmp_path: Path, clock: Clock) -> None:
    house = RoundRobin(tmp_path, 1, clock)
    for name in "ab":
        submit(house, name)
    house.ask("a", "rollout")
    house.leave("a")
    house.ask("b", "rollout")
    assert house.job("b")["waits_for"] == "rollout", "a comes first in the next turn"

    def goes_on() -> bool:
        house.say("b", "beat", left=0, ask=1, pool="rollout", purpose="round")
        return bool(house.job("b")["holds"])

    waited_s = house.passes(goes_on)
    assert PATIENCE_S < waited_s <= PATIENCE_S + 1.0
    (said,) = [one for one in house.told if "passed over" in one]
    assert said == "a is away for longer than it said: it is passed over until it asks again"

    house.service.close()
    house.new_service()  # which knows the same
    house.leave("b")
    house.ask("a", "train")
    assert house.heard("a")[-1] == ("grant", 2)
