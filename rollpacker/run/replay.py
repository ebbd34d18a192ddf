"""Feeds an event log to the core again, and finds the first event that is answered otherwise.

This does not use a bus: no command is carried out, timed or logged, and a bus with ports and clock
that only repeat the log would be longer than the loop below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from msgspec.structs import replace

from rollpacker.core.commands import Command, TrainOn
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.job.pooled_job import make_job, restore_job
from rollpacker.core.records import Entry, LogError, Record, Session

WEIGHT_TOLERANCE = 1e-6
"""Relative tolerance of loss weights, which a numerical fit computes. Its last digits depended on
the processor when older logs were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    num_events: int
    num_steps: int
    difference: str | None
    """The first event for which the core's commands differ from those in the log, in words. None if
    there is no difference."""


def replay(entries: Iterable[Entry]) -> Replay:
    """Feed the log to a new core. Returns how many events and steps it has, and the first
    difference. Raises `LogError` if the log does not begin with a `Session` (the entry with which
    a process begins), or has a later one amid a step."""
    job: Job | None = None
    num_events = 0
    for entry in entries:
        if isinstance(entry, Session):
            config = JobConfig.from_plain(entry.job)
            if job is None:
                job = make_job(config)
            elif job.phase is Phase.COMMITTING:
                job = restore_job(config, job.state(), data_ended=entry.data_ended)
            else:
                raise LogError(f"a session begins in phase {job.phase}, not at a commit")
        elif isinstance(entry, Record):
            if job is None:
                raise LogError("the log does not begin with a session")
            num_events += 1
            difference = _difference(job, entry)
            if difference is not None:
                where = f"event {num_events} at {entry.time_s:.3f} s, {entry.event}\n"
                return Replay(
                    num_events=num_events, num_steps=job.step, difference=where + difference
                )
    if job is None:
        raise LogError("the log is empty")
    return Replay(num_events=num_events, num_steps=job.step, difference=None)


def _difference(job: Job, record: Record) -> str | None:
    """Returns how the core's commands differ from the recorded ones, in words. None if they are
    equal."""
    try:
        commands = tuple(job.handle(record.event))
    except AssertionError as error:  # what cannot happen in a run: the log was changed
        return f"  the core refuses it: {type(error).__name__}: {error}"
    if equal_commands(commands, record.commands):
        return None
    recorded, replayed = (
        "\n".join(f"    {one}" for one in those) or "    (nothing)"
        for those in (record.commands, commands)
    )
    return f"  recorded:\n{recorded}\n  replayed:\n{replayed}"


def equal_commands(commands: Sequence[Command], recorded: Sequence[Command]) -> bool:
    """Whether commands equal the recorded ones, except for the last digits of loss weights."""
    return len(commands) == len(recorded) and all(map(_equal, commands, recorded))


def _equal(command: Command, recorded: Command) -> bool:
    if command == recorded:
        return True
    if not isinstance(command, TrainOn) or not isinstance(recorded, TrainOn):
        return False
    if command.weights is None or recorded.weights is None:
        return False
    if replace(command, weights=None) != replace(recorded, weights=None):
        return False
    if list(map(len, command.weights)) != list(map(len, recorded.weights)):
        return False
    pairs = zip(chain(*command.weights), chain(*recorded.weights), strict=True)
    return all(math.isclose(one, other, rel_tol=WEIGHT_TOLERANCE) for one, other in pairs)
