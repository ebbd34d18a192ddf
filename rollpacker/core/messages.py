"""How events and commands are made: small records, frozen to the type checker, known by name.

Millions of them are made in a simulation. A frozen dataclass guards every attribute at run time,
which makes building one several times as slow; here the type checker is the guard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def message(cls: type[T]) -> type[T]:
    """A dataclass with keyword-only fields, slots, equality and a hash. Never assign to its
    fields: `dataclasses.replace` makes a changed copy."""
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


new = object.__new__
"""Half of a message, where one is made for every response: `score = new(Score)`, and then
`Score.__init__(score, ...)`. A call of the class takes twice as long, since it packs what it is
given by keyword into a dict and unpacks that again: benchmarks/sim_speed.py."""

COMMANDS: dict[str, type] = {}
"""Every kind of command by name: the bus sees that each has a port, the log is read by them."""

EVENTS: dict[str, type] = {}
"""Every kind of event by name; the log is read by them."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(cls: type[T]) -> type[T]:
    """A message that the core may say."""
    made = COMMANDS[cls.__name__] = message(cls)
    return made


@dataclass_transform(frozen_default=True, kw_only_default=True)
def event(cls: type[T]) -> type[T]:
    """A message that the core may hear; it has a `time_s`."""
    made = EVENTS[cls.__name__] = message(cls)
    return made
