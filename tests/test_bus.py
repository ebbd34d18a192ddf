"""The bus: one order, one time, every command at the one port that obeys it."""

from __future__ import annotations

import threading
from typing import Any, get_args

import pytest

from rollpacker.bus import Bus, Recorded, Routes
from rollpacker.core.commands import Command, Commit, Drop, FetchPrompts, Launch
from rollpacker.core.events import Event, PromptsFetched, RunStarted, StopRequested
from rollpacker.core.ids import PromptId
from rollpacker.core.job.job import Job, JobConfig, ProtocolError
from rollpacker.core.records import Entry, Note, Record

COMMANDS = get_args(Command)


class TickingClock:
    """A second more whenever it is looked at for a stamp."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def stamp(self) -> float:
        self.time_s += 1.0
        return self.time_s


class Fetching:
    """Answers while it obeys, which has its turn after what is at hand."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.launched: list[Launch] = []

    def routes(self) -> Routes:
        return {FetchPrompts: self.fetch, Launch: self.launched.append}

    def fetch(self, command: FetchPrompts) -> None:
        prompts = tuple(PromptId("train", 0, row) for row in range(command.count))
        self.bus.take(PromptsFetched(time_s=0.0, prompts=prompts, epoch_ended=False))


def others(*kinds: type) -> Recorded:
    return Recorded(*(kind for kind in COMMANDS if kind not in kinds))


def new_bus(log: list[Entry]) -> Bus:
    config = JobConfig(prompts_per_step=2, samples_per_prompt=2, max_steps=1)
    return Bus(Job(config), TickingClock(), sinks=[log.append])


def test_every_kind_of_command_has_exactly_one_port() -> None:
    bus = new_bus([])
    with pytest.raises(AssertionError, match="no port obeys Drop, Commit"):
        bus.connect(others(Commit, Drop))
    with pytest.raises(AssertionError, match="two ports obey Commit"):
        bus.connect(Recorded(*COMMANDS), Recorded(Commit))
    bus.connect(others(Commit), Recorded(Commit))
    with pytest.raises(AssertionError, match="no port obeys"):
        Bus(bus.job, bus.clock, [Recorded(Commit)])


def test_a_port_may_answer_while_it_obeys() -> None:
    log: list[Entry] = []
    bus = new_bus(log)
    fetching = Fetching(bus)
    bus.connect(fetching, others(FetchPrompts, Launch))
    bus.take(RunStarted(time_s=0.0))
    assert len(fetching.launched) == 1
    events = [type(entry.event) for entry in log if isinstance(entry, Record)]
    assert events == [RunStarted, PromptsFetched]  # in the order in which the core heard them


def test_the_log_has_the_stamps_that_the_core_saw() -> None:
    seen: list[float] = []
    log: list[Entry] = []
    bus = new_bus(log)
    bus.connect(Recorded(*COMMANDS))
    handle = bus.job.handle

    def watched(event: Event) -> list[Command]:
        seen.append(event.time_s)
        return handle(event)

    bus.job.handle = watched  # type: ignore[method-assign]
    bus.take(RunStarted(time_s=99.0))
    bus.note("evaluation", 0.5, 0, {"eval/reward": 1.0})
    bus.take(StopRequested(time_s=99.0))
    records = [entry for entry in log if isinstance(entry, Record)]
    assert [entry.time_s for entry in records] == [entry.event.time_s for entry in records] == seen
    assert seen == [1.0, 2.0]
    assert log[1] == Note(
        time_s=1.0, name="evaluation", seconds=0.5, step=0, metrics={"eval/reward": 1.0}
    )


def test_what_the_core_refuses_is_in_the_log() -> None:
    log: list[Entry] = []
    bus = new_bus(log)
    bus.connect(Recorded(*COMMANDS))
    bus.take(RunStarted(time_s=0.0))
    with pytest.raises(ProtocolError):
        bus.take(RunStarted(time_s=0.0))
    last = log[-1]
    assert isinstance(last, Record) and isinstance(last.event, RunStarted) and not last.commands


def test_events_of_many_threads_come_one_at_a_time() -> None:
    log: list[Entry] = []
    bus = new_bus(log)
    bus.connect(Recorded(*COMMANDS))
    inside = 0
    handle = bus.job.handle

    def alone(event: Event) -> Any:
        nonlocal inside
        inside += 1
        assert inside == 1
        answer = handle(event)
        inside -= 1
        return answer

    bus.job.handle = alone  # type: ignore[method-assign]

    def many() -> None:
        for _ in range(200):
            bus.take(StopRequested(time_s=0.0))

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = [entry.time_s for entry in log if isinstance(entry, Record)]
    assert times == sorted(times) and len(set(times)) == len(times) == 800
