"""A snapshot spares a new service most of the replay, and is used only where it is the same."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Event
from rollpacker.cluster.service import past
from rollpacker.cluster.service.service import Service
from tests.cluster_service.test_service import Clock, House, clock, look_always, submit

__all__ = ["clock", "look_always"]

EVERY = 5


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the core was told since it was emptied."""
    monkeypatch.setattr(past, "EVERY", EVERY)
    seen: list[Event] = []
    handle = Cluster.handle

    def noting(cluster: Cluster, event: Event) -> Any:
        seen.append(event)
        return handle(cluster, event)

    monkeypatch.setattr(Cluster, "handle", noting)
    return seen


def played(folder: Path, clock: Clock) -> House:
    """Three jobs of which one waits, and some turns: a snapshot, and events behind it."""
    house = House(folder, 1, clock)
    for name in "abc":
        submit(house, name, slo=20.0 if name != "c" else 1.0)
    for step in (1, 2):
        for name in "ab":
            for pool in ("rollout", "train"):
                house.ask(name, pool)
                house.leave(name)
            house.commit(name, step)
            clock.sleep(1.0)
    house.service.close()
    return house


def known(house: House) -> Any:
    """All that the service says, but for how long ago something was."""
    whole = house.desk.ask("status")
    return [whole["jobs"], whole["pools"], whole["events"]]


def anew(house: House) -> Service:
    return house.new_service()


def test_a_new_service_replays_what_is_behind_it_and_is_the_same(
    tmp_path: Path, clock: Clock, handled: list[Event]
) -> None:
    house = played(tmp_path, clock)
    num_events = len(handled)
    handled.clear()
    anew(house)
    assert 0 < len(handled) < EVERY < num_events
    with_it = known(house)
    house.service.close()
    (tmp_path / "snapshot").unlink()
    handled.clear()
    anew(house)
    assert len(handled) == num_events and known(house) == with_it
    house.ask("a", "rollout")
    assert house.job("a")["holds"] == "rollout"


def damaged(folder: Path) -> None:
    path = folder / "snapshot"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def cut_short(folder: Path) -> None:
    path = folder / "snapshot"
    path.write_bytes(path.read_bytes()[:20])


def of_another_past(folder: Path) -> None:
    number = int((folder / "snapshot").read_bytes().split(b"\n")[0])
    with sqlite3.connect(folder / "events.db") as base:
        base.execute(
            "UPDATE events SET event = replace(event, '\"job\"',  ' \"job\"') WHERE number = ?",
            (number,),
        )


def of_lost_events(folder: Path) -> None:
    """A crash of the host has lost the last ones."""
    number = int((folder / "snapshot").read_bytes().split(b"\n")[0])
    with sqlite3.connect(folder / "events.db") as base:
        base.execute("DELETE FROM events WHERE number >= ?", (number,))


@pytest.mark.parametrize("spoil", [damaged, cut_short, of_another_past, of_lost_events])
def test_one_of_something_else_is_left_aside(
    tmp_path: Path, clock: Clock, handled: list[Event], spoil: Callable[[Path], None]
) -> None:
    house = played(tmp_path, clock)
    spoil(tmp_path)
    handled.clear()
    anew(house)
    with sqlite3.connect(tmp_path / "events.db") as base:
        assert len(handled) == base.execute("SELECT count(*) FROM events").fetchone()[0]


def test_one_of_other_code_is_left_aside(
    tmp_path: Path, clock: Clock, handled: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = played(tmp_path, clock)
    num_events = len(handled)
    handled.clear()
    monkeypatch.setattr(past, "_digest_of_code", lambda: b"of another version")
    anew(house)
    assert len(handled) == num_events


def test_one_of_other_pools_does_not_hide_that_they_changed(
    tmp_path: Path, clock: Clock, handled: list[Event]
) -> None:
    house = played(tmp_path, clock)
    house.nodes = 2
    with pytest.raises(ValueError, match="leads to something else now"):
        anew(house)


def test_where_it_cannot_be_written_the_service_goes_on(
    tmp_path: Path, clock: Clock, handled: list[Event]
) -> None:
    (tmp_path / "snapshot.new").mkdir()
    house = House(tmp_path, 1, clock)
    submit(house, "a")
    for _ in range(EVERY):
        house.ask("a", "rollout")
        house.leave("a")
    assert house.job("a")["state"] == "running" and not any("snapshot" in one for one in house.told)
    assert not (tmp_path / "snapshot").exists()
