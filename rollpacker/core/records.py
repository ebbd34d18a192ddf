"""The event log's entries and their one-line JSON form.

A log is a history: what happened, what the core answered, when, and what the answer cost. `Record`
is the part that replays; `Session` and `Note` say what happened around it.
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
"""Name of a note of a run that shares its pools: a part parked. How long waking up takes, `Entered`
says."""
CALLBACK_SECONDS = "timing_s/callbacks"
"""A metric of an evaluation's note: so many of its seconds were the program's own callbacks, which
came last."""
EVALUATION_ROLLOUT = "timing_s/testing_gen"
"""A metric of an evaluation's note: so many of its seconds it held the rollout pool: it generated,
and environments answered."""


class LogError(ValueError):
    """A line is not an event log's."""


class Session(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process took the run up. The first line of a log, and again at every resume."""

    started_at: str
    """Wall-clock time, ISO 8601, UTC."""
    time_s: float
    """Where the run's own clock goes on."""
    step: int
    """Steps committed before."""
    job: Mapping[str, Any]
    """`JobConfig` as a plain mapping, so that a log replays without its config file."""
    slots: int | None = None
    """Samples that the engine decodes at the same time at most; None: no limit was set, or the log
    is older than this field."""
    marks: tuple[str, ...] = ()
    """Marks with which every number of this session must be read: "unsandboxed" if model-written
    code ran without isolation."""
    data_ended: Omitted[bool | None] = None
    """Of a resumed run: whether the data has ended now. It may have ended before and go on, since
    the run was given more epochs. None: as the checkpoint says; so in older logs."""


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event, the commands that the core gave in answer, and the controller's seconds for
    both."""

    time_s: float
    event: Event
    commands: tuple[Command, ...]
    cost_s: float


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A span that the core does not know of; `time_s` is its end. "startup", "evaluation", and
    "gradients" of `StartGradients` commands, whose number of groups is among its metrics."""

    time_s: float
    name: str
    seconds: float
    step: int
    metrics: Mapping[str, int | float] = msgspec.field(default_factory=dict)


Entry = Session | Record | Note


class Observer(Protocol):
    """Whoever watches a run: display, metrics, trace. Fed in log order; must be quick."""

    def feed(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


def encode(entry: Entry) -> str:
    """One line of JSON, without the newline."""
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
    """The entry that `encode` wrote. Raises `LogError` for anything else."""
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
