"""The entries of an event log and their form as lines of JSON.

A `Record` holds an event, the commands that the core gave in answer, and what the answer cost;
these are what a replay repeats. `Session` and `Note` say what happened around the events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from rollpacker.codec import Omitted, from_plain, to_plain
from rollpacker.core.commands import Command
from rollpacker.core.events import Event
from rollpacker.core.messages import COMMANDS, EVENTS

POOL_SWITCH = "switch"
"""Name of the `Note` with the seconds that engines or trainer took to leave the devices ("park") to
another job, where jobs share pools of devices. `Entered` has the seconds of waking up again."""
CALLBACK_SECONDS = "timing_s/callbacks"
"""Metric of the `Note` on an evaluation: seconds of the program's callbacks at its end."""
EVALUATION_ROLLOUT = "timing_s/testing_gen"
"""Metric of the `Note` on an evaluation: seconds for which the evaluation held the rollout pool,
while responses were generated and environments answered."""


class LogError(ValueError):
    """Raised for a line that is not an entry of an event log."""


class Session(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry for a process that began or resumed the run: the first line, and one per resume."""

    started_at: str
    """Wall-clock time at which the process began or resumed the run, ISO 8601, UTC."""
    time_s: float
    """Seconds on the run's own clock at which this session begins."""
    step: int
    """Number of steps committed before this session."""
    job: Mapping[str, Any]
    """`JobConfig` as a plain mapping, so that a log replays without its config file."""
    slots: int | None = None
    """Maximum number of samples decoded at once, over all engines. None: no limit was set, or the
    log is older than this field."""
    marks: tuple[str, ...] = ()
    """Warnings that hold for all results of this session: "unsandboxed" if model-written code ran
    without isolation. Empty: there are none."""
    data_ended: Omitted[bool | None] = None
    """Whether the dataset has no more prompts, in a resumed run whose number of epochs may have
    changed. None: as the checkpoint says."""


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Entry of an event, the commands that answer it, and the core's seconds (`cost_s`)."""

    time_s: float
    event: Event
    commands: tuple[Command, ...]
    cost_s: float


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry for a span of time that no event reports; `time_s` is its end. Its name is "startup",
    "evaluation", "switch", or "gradients" (work on `StartGradients`, with its number of groups)."""

    time_s: float
    name: str
    seconds: float
    step: int
    metrics: Mapping[str, int | float] = msgspec.field(default_factory=dict)


Entry = Session | Record | Note


class Observer(Protocol):
    """Interface of what watches a run, such as display, metrics or trace. Entries come in log
    order, and `feed` must return quickly."""

    def feed(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


def encode(entry: Entry) -> str:
    """Writes the entry as one line of JSON, without the newline."""
    if isinstance(entry, Record):
        event = to_plain(entry.event)
        del event["time_s"]
        line: dict[str, Any] = {"t": round(entry.time_s, 6), "event": type(entry.event).__name__}
        line.update(event)
        if entry.commands:
            line["commands"] = [
                {"command": type(command).__name__, **to_plain(command)}
                for command in entry.commands
            ]
        line["cost_s"] = round(entry.cost_s, 7)
    else:
        line = to_plain(entry)
        time_s = round(line.pop("time_s"), 6)
        if isinstance(entry, Note):
            line["seconds"] = round(entry.seconds, 6)
            line = {"t": time_s, "note": line.pop("name"), **line}
        else:
            line = {"session": line.pop("started_at"), "t": time_s, **line}
    return json.dumps(line, separators=(",", ":"), ensure_ascii=True)


def decode(line: str) -> Entry:
    """Reads the entry that `encode` wrote as this line. Raises `LogError` for any other line."""
    try:
        raw = json.loads(line)
        time_s = raw.pop("t")
        if "session" in raw:
            session = {"started_at": raw.pop("session"), "time_s": time_s, **raw}
            return from_plain(Session, session)
        if "note" in raw:
            return from_plain(Note, {"name": raw.pop("note"), "time_s": time_s, **raw})
        cost_s = raw.pop("cost_s")
        commands: list[Command] = [
            from_plain(COMMANDS[plain.pop("command")], plain) for plain in raw.pop("commands", ())
        ]
        raw["time_s"] = time_s
        event: Event = from_plain(EVENTS[raw.pop("event")], raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LogError(f"not a line of an event log ({type(error).__name__}: {error})") from error
    return Record(time_s=time_s, event=event, commands=tuple(commands), cost_s=cost_s)
