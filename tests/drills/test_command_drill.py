"""A drill: a command and its event are added in three places, and nowhere else.

    1. the noun      subclasses of `BaseCommand` and `BaseEvent`: the log can hold them, the bus
                     asks for a port
    2. the machine   the core says the one and hears the other
    3. the port      obeys the one and brings the other

The made-up command warms the engine's caches after each hand-over, before the step is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.exactly_once import check
from rollpacker.bus import Bus, Port, Routes
from rollpacker.core.commands import Command, Commit
from rollpacker.core.events import WeightsSynced
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.messages import COMMANDS, EVENTS, BaseCommand, BaseEvent
from rollpacker.core.records import Record, Session
from rollpacker.report.log import EventLog
from rollpacker.report.summary import summarize_entries
from rollpacker.run.driver import Controller
from tests.core.world import World, commands_of, events_of
from tests.run.fakes import drive, make, run_config

# -- 1. the noun -----------------------------------------------------------------------


class WarmUp(BaseCommand, frozen=True, kw_only=True):
    """Fill the engine's caches for these weights; answered by `WarmedUp`."""

    version: int


class WarmedUp(BaseEvent, frozen=True, kw_only=True):
    """The engine's caches are those of `version`."""

    version: int


# -- 2. the machine that decides -------------------------------------------------------


class WarmingJob(Job):
    """Has the engine warmed up before a step is committed."""

    HANDLERS: ClassVar[dict[type, str]] = {**Job.HANDLERS, WarmedUp: "_on_warmed_up"}

    def _on_synced(self, event: WeightsSynced) -> list[Command]:
        self._synced = event
        return [WarmUp(version=event.version)]  # type: ignore[list-item]

    def _on_warmed_up(self, event: WarmedUp) -> list[Command]:
        assert event.version == self.version
        return super()._on_synced(self._synced)


# -- 3. the port -----------------------------------------------------------------------


class WarmUps:
    """Warms up at once, and says so."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def routes(self) -> Routes:
        return {WarmUp: self.warm_up}

    def warm_up(self, command: WarmUp) -> None:
        event: Any = WarmedUp(time_s=0.0, version=command.version)
        self.bus.take(event)


# -- the drill -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def known_here_alone() -> Iterator[None]:
    """Other tests have no port for it."""
    COMMANDS["WarmUp"], EVENTS["WarmedUp"] = WarmUp, WarmedUp
    yield
    del COMMANDS["WarmUp"], EVENTS["WarmedUp"]


del COMMANDS["WarmUp"], EVENTS["WarmedUp"]


class WarmingController(Controller):
    """In the package this is a line of `Controller._ports`."""

    def _ports(self) -> list[Port]:
        return [*super()._ports(), WarmUps(self.bus)]


class WarmingWorld(World):
    """The tests' world in virtual time: warming up takes 0.5 s."""

    def routes(self) -> Routes:
        return {**super().routes(), WarmUp: self.warm_up}

    def warm_up(self, command: WarmUp) -> None:
        answer: Any = WarmedUp(time_s=0.0, version=command.version)
        self.push(0.5, answer)


def job_config() -> JobConfig:
    return JobConfig(prompts_per_step=3, samples_per_prompt=2, max_steps=4)


def test_a_bus_without_its_port_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no port obeys WarmUp"):
        make(tmp_path, run_config())


def test_a_run_obeys_it_and_its_log_tells_of_it(tmp_path: Path) -> None:
    config = run_config(steps=4)
    controller, _ = make(tmp_path, config, controller_class=WarmingController, job_class=WarmingJob)
    assert drive(controller) == "every step is done"
    path = tmp_path / "events.jsonl"
    log = list(EventLog(path))
    records = [entry for entry in log if isinstance(entry, Record)]
    said = [c.version for r in records for c in r.commands if isinstance(c, WarmUp)]
    heard = [r.event.version for r in records if isinstance(r.event, WarmedUp)]
    assert said == heard == list(range(1, controller.parts.job.version + 1)) != []
    by_event = {type(r.event): {type(c) for c in r.commands} for r in records}
    assert by_event[WeightsSynced] == {WarmUp} and by_event[WarmedUp] == {Commit}
    # Who does not know the noun is not disturbed by it.
    assert check(path)["problems"] == []
    assert summarize_entries(log)["steps"]["total"] == controller.parts.job.step
    assert isinstance(log[0], Session)
    job = WarmingJob(JobConfig.from_plain(log[0].job))
    for record in records:
        assert tuple(job.handle(record.event)) == record.commands


def test_it_takes_its_time_where_time_is_virtual() -> None:
    world = WarmingWorld(job_config(), num_rows=40)
    world.job = WarmingJob(job_config())
    world.run()
    assert len(commands_of(world, WarmUp)) == len(events_of(world, WarmedUp)) == world.version > 3
    times = [(r.time_s, r.event) for r in world.log]
    synced = [t for t, e in times if isinstance(e, WeightsSynced)]
    warm = [t for t, e in times if isinstance(e, WarmedUp)]
    assert [w - s for w, s in zip(warm, synced, strict=True)] == pytest.approx([0.5] * len(warm))
