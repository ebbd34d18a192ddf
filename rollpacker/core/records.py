"""The event log's entries and their one-line JSON form.

A log is a history: what happened, what the core answered, when, and what the answer cost. `Record`
is the part that replays; `Session` and `Note` say what happened around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from rollpacker.core import commands as commands_module
from rollpacker.core import events as events_module
from rollpacker.core.commands import Command, RoundKind
from rollpacker.core.events import Event
from rollpacker.core.ids import PromptId, SampleId


class LogError(ValueError):
    """A line is not an event log's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
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
    """What every number of this session must be read with: "unsandboxed" if model-written code ran
    without isolation."""
    data_ended: bool | None = None
    """Of a resumed run: whether the data has ended now. It may have ended before and go on, since
    the run was given more epochs. None: as the checkpoint says; so in older logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One event, the commands that the core gave in answer, and the controller's seconds for
    both."""

    time_s: float
    event: Event
    commands: tuple[Command, ...]
    cost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A span that the core does not know of; `time_s` is its end. "startup", "evaluation", and
    "gradients" of `StartGradients` commands, whose number of groups is among its metrics."""

    time_s: float
    name: str
    seconds: float
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


Entry = Session | Record | Note


class Observer(Protocol):
    """Whoever watches a run: display, metrics, trace. Fed in log order; must be quick."""

    def feed(self, entry: Entry) -> None: ...

    def close(self) -> None: ...


def encode(entry: Entry) -> str:
    """One line of JSON, without the newline."""
    if isinstance(entry, Record):
        line: dict[str, Any] = {"t": round(entry.time_s, 6)}
        line.update(_plain(entry.event, "event", skip_time=True))
        if entry.commands:
            line["commands"] = [_plain(command, "command") for command in entry.commands]
        line["cost_s"] = round(entry.cost_s, 7)
    elif isinstance(entry, Note):
        line = {
            "t": round(entry.time_s, 6),
            "note": entry.name,
            "seconds": round(entry.seconds, 6),
            "step": entry.step,
            "metrics": dict(entry.metrics),
        }
    else:
        line = {
            "session": entry.started_at,
            "t": round(entry.time_s, 6),
            "step": entry.step,
            "job": dict(entry.job),
            "slots": entry.slots,
            "marks": list(entry.marks),
        }
        if entry.data_ended is not None:
            line["data_ended"] = entry.data_ended
    return json.dumps(line, separators=(",", ":"), ensure_ascii=True)


def decode(line: str) -> Entry:
    """The entry that `encode` wrote. Raises `LogError` for anything else."""
    try:
        raw = json.loads(line)
        if "session" in raw:
            return Session(
                started_at=raw["session"],
                time_s=raw["t"],
                step=raw["step"],
                job=raw["job"],
                slots=raw.get("slots"),
                marks=tuple(raw.get("marks", ())),
                data_ended=raw.get("data_ended"),
            )
        if "note" in raw:
            return Note(
                time_s=raw["t"],
                name=raw["note"],
                seconds=raw["seconds"],
                step=raw["step"],
                metrics=raw["metrics"],
            )
        time_s, cost_s = raw.pop("t"), raw.pop("cost_s")
        commands = tuple(_restore(c, "command", _COMMANDS) for c in raw.pop("commands", ()))
        event = _restore({**raw, "time_s": time_s}, "event", _EVENTS)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LogError(f"not a line of an event log ({type(error).__name__}: {error})") from error
    return Record(time_s=time_s, event=event, commands=commands, cost_s=cost_s)


def _strings(values: Any) -> list[str]:
    return [str(value) for value in values]


_TO_PLAIN: dict[str, Callable[[Any], Any]] = {
    "sample": str,
    "prompt": str,
    "samples": _strings,
    "prompts": _strings,
    "groups": lambda groups: [_strings(group) for group in groups],
    "parts": dict,
    "metrics": dict,
}
_FROM_PLAIN: dict[str, Callable[[Any], Any]] = {
    "sample": SampleId.parse,
    "prompt": PromptId.parse,
    "samples": lambda texts: tuple(SampleId.parse(text) for text in texts),
    "prompts": lambda texts: tuple(PromptId.parse(text) for text in texts),
    "groups": lambda groups: tuple(
        tuple(SampleId.parse(text) for text in group) for group in groups
    ),
    "weights": lambda groups: None if groups is None else tuple(map(tuple, groups)),
    "devices": tuple,
    "kind": RoundKind,
}
_EVENTS: dict[str, type] = {cls.__name__: cls for cls in events_module.Event.__args__}
_COMMANDS: dict[str, type] = {cls.__name__: cls for cls in commands_module.Command.__args__}
_FIELDS: dict[type, tuple[tuple[str, Callable[[Any], Any] | None], ...]] = {
    cls: tuple((f.name, _TO_PLAIN.get(f.name)) for f in fields(cls))
    for cls in (*_EVENTS.values(), *_COMMANDS.values())
}


def _plain(thing: Event | Command, label: str, *, skip_time: bool = False) -> dict[str, Any]:
    plain: dict[str, Any] = {label: type(thing).__name__}
    for name, convert in _FIELDS[type(thing)]:
        if skip_time and name == "time_s":
            continue
        value = getattr(thing, name)
        plain[name] = value if convert is None else convert(value)
    return plain


def _restore(raw: dict[str, Any], label: str, classes: Mapping[str, type]) -> Any:
    values = dict(raw)
    cls = classes[values.pop(label)]
    return cls(**{k: _FROM_PLAIN[k](v) if k in _FROM_PLAIN else v for k, v in values.items()})
