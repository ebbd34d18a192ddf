"""Feed an event log back to the core: the same commands, or the first difference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollpacker.core.job import Job, JobConfig, Phase
from rollpacker.core.records import Entry, LogError, Record, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    num_events: int
    num_steps: int
    difference: str | None
    """The first event whose commands differ, in words; None if there is none."""


def replay(entries: Iterable[Entry]) -> Replay:
    """Run the core over the log. Raises `LogError` if the log does not begin with a session."""
    job: Job | None = None
    num_events = 0
    for entry in entries:
        if isinstance(entry, Session):
            config = JobConfig.from_plain(entry.job)
            if job is None:
                job = Job(config)
            elif job.phase is Phase.COMMITTING:
                job = Job.restore(config, job.state())
            else:
                raise LogError(f"a session begins in phase {job.phase}, not at a commit")
        elif isinstance(entry, Record):
            if job is None:
                raise LogError("the log does not begin with a session")
            num_events += 1
            try:
                commands = tuple(job.handle(entry.event))
            except AssertionError as error:  # what cannot happen in a run: the log was changed
                return Replay(
                    num_events=num_events,
                    num_steps=job.step,
                    difference=_refused(num_events, entry, error),
                )
            if commands != entry.commands:
                return Replay(
                    num_events=num_events,
                    num_steps=job.step,
                    difference=_describe(num_events, entry, commands),
                )
    if job is None:
        raise LogError("the log is empty")
    return Replay(num_events=num_events, num_steps=job.step, difference=None)


def _refused(number: int, record: Record, error: AssertionError) -> str:
    return (
        f"event {number} at {record.time_s:.3f} s, {record.event}\n"
        f"  the core refuses it: {type(error).__name__}: {error}"
    )


def _describe(number: int, record: Record, commands: tuple[object, ...]) -> str:
    def listed(things: tuple[object, ...]) -> str:
        return "\n".join(f"    {thing}" for thing in things) or "    (nothing)"

    return (
        f"event {number} at {record.time_s:.3f} s, {record.event}\n"
        f"  recorded:\n{listed(record.commands)}\n  replayed:\n{listed(commands)}"
    )
