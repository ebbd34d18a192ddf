"""The service, jobs that are done and have not ended, and jobs that are submitted to go on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from rollpacker.cluster.service.store import FORMAT, Store
from tests.cluster_service.test_service import House, look_always, submit
from tests.cluster_service.test_staying_away import RoundRobin

__all__ = ["look_always"]


def trained(folder: Path, **settings: int) -> RoundRobin:
    """Of two jobs one has trained, and the other waits for its turn."""
    house = RoundRobin(folder, nodes=1)
    for name in "ab":
        submit(house, name, **settings)
    for pool in ("rollout", "train"):
        house.ask("a", pool)
        house.leave("a")
    house.ask("b", "rollout")
    assert house.job("b")["holds"] is None, "a comes first in the next turn"
    return house


def test_a_job_that_has_done_its_last_step_keeps_nobody_waiting(tmp_path: Path) -> None:
    house = trained(tmp_path, steps=7)
    house.commit("a", 7)
    assert house.job("b")["holds"] == "rollout" and house.job("a")["state"] == "running"
    house.service.close()
    house.new_service()  # which knows the same
    house.end("a", 0)
    house.until(lambda: house.job("a")["state"] == "done")


def test_a_run_says_by_itself_which_its_last_step_is(tmp_path: Path) -> None:
    house = trained(tmp_path, steps=7)
    house.commit("a", 7, last=False)
    a = house.job("a")
    assert house.job("b")["holds"] is None and (a["steps"], a["of_steps"]) == (7, 7)
    house.commit("a", 8, last=True)
    a = house.job("a")
    assert house.job("b")["holds"] == "rollout" and (a["steps"], a["of_steps"]) == (8, 8)


def test_a_program_that_numbers_its_commits_otherwise_is_told_of_and_not_taken_for_done(
    tmp_path: Path,
) -> None:
    house = trained(tmp_path, steps=7)
    for step in (100, 101):
        house.commit("a", step)
    assert house.job("b")["holds"] is None
    told = "a has committed step 100, and was submitted with 7: its commits are counted as they"
    assert [one for one in house.told if one.startswith(told)] == [f"{told} come"]


def test_a_run_that_goes_on_has_the_steps_of_its_checkpoint(tmp_path: Path) -> None:
    house = trained(tmp_path, steps=5, steps_before=15)
    a = house.job("a")
    assert (a["steps"], a["of_steps"]) == (15, 20)
    house.commit("a", 20)
    assert house.job("b")["holds"] == "rollout" and house.job("a")["steps"] == 20


def test_a_folder_of_an_earlier_version_is_served_and_then_known_as_of_this_one(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, nodes=1)
    submit(house, "a")
    house.service.close()
    path = tmp_path / "events.db"
    with sqlite3.connect(path) as base:
        base.execute("UPDATE facts SET value = '1' WHERE name = 'format'")
    house.new_service()
    assert house.job("a")["state"] == "running"
    house.service.close()
    with sqlite3.connect(path) as base:
        (found,) = base.execute("SELECT value FROM facts WHERE name = 'format'").fetchone()
    assert found == str(FORMAT)
    Store(path).close()


def test_an_end_of_an_earlier_job_of_the_name_is_not_that_of_the_present_one(
    tmp_path: Path,
) -> None:
    """It was cancelled while it waited for nodes, and its process ends late, and well."""
    house = House(tmp_path, nodes=1)
    submit(house, "a")
    house.ask("a", "rollout")
    house.leave("a")
    house.desk.ask("drain", node="cheap/0")
    house.commit("a", 1)
    assert house.job("a")["state"] == "waiting"
    house.desk.ask("cancel", job="a")
    submit(house, "a")
    house.desk.ask("drain", node="cheap/0", restore=True)
    assert ("a", 2) not in house.runner.orders, "the first one's process is there still"
    house.end("a", 0, 1)
    house.until(lambda: ("a", 2) in house.runner.orders)
    assert house.job("a")["state"] == "running"
    house.end("a", 0, 2)
    house.until(lambda: house.job("a")["state"] == "done")
