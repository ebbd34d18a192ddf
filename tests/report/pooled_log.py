"""A run's log as it would be if the run had shared its pools: the same events, later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from rollpacker.core.commands import Enter, Leave
from rollpacker.core.events import Entered
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.pooled_job import PooledJob
from rollpacker.core.records import Entry, Record, Session
from tests.sim.test_simulation import scenario, simulation_of


def with_waits(entries: Sequence[Entry], wait: Callable[[int], tuple[float, float]]) -> list[Entry]:
    """`wait` gives the seconds from each `Enter` to its `Entered`, and how many of them are the
    switch. Whatever comes after is later by that. The core itself says where the waits are, and
    has to say the same as before besides."""
    shared: list[Entry] = []
    job: PooledJob | None = None
    late_s, num = 0.0, 0
    for entry in entries:
        moved = structs.replace(entry, time_s=entry.time_s + late_s)
        if isinstance(moved, Session):
            config = replace(JobConfig.from_plain(moved.job), shares_pools=True)
            if job is None:
                job = PooledJob(config)
            else:
                restored = PooledJob.restore(config, job.state(), data_ended=moved.data_ended)
                assert isinstance(restored, PooledJob)
                job = restored
            shared.append(structs.replace(moved, job=config.to_plain()))
            continue
        if not isinstance(moved, Record):
            shared.append(moved)
            continue
        assert job is not None
        event = structs.replace(moved.event, time_s=moved.time_s)
        commands = tuple(job.handle(event))
        answered = [one for one in commands if not isinstance(one, Enter | Leave)]
        shared.append(structs.replace(moved, event=event, commands=commands))
        while job.entering is not None:
            wait_s, switch_s = wait(num)
            num, late_s = num + 1, late_s + wait_s
            entered = Entered(time_s=entry.time_s + late_s, pool=job.entering, switch_s=switch_s)
            commands = tuple(job.handle(entered))
            answered += [one for one in commands if not isinstance(one, Enter | Leave)]
            shared.append(
                Record(time_s=entered.time_s, event=entered, commands=commands, cost_s=0.0)
            )
        assert answered == list(entry.commands), "alone it says something else"
    assert num, "nobody waited"
    return shared


def simulated(folder: Path, *overrides: str, steps: int = 12) -> list[Entry]:
    """The log of a simulated run that had its pools for itself."""
    made = scenario(folder, *overrides)
    records: list[Entry] = []
    simulation = simulation_of(made, observe=records.append)
    simulation.run(steps)
    job = simulation.job.config.to_plain()
    return [Session(started_at="2026-01-01", time_s=0.0, step=0, job=job), *records]
