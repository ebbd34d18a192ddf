"""Base classes of events and commands, which are frozen records known by name.

Millions of them are made in a simulation, so they are structs of msgspec, which take a tenth of the
time of a frozen dataclass. Each is encoded with the name of its class, so that bytes say of which
kind a message is.
"""

from __future__ import annotations

from typing import Any

import msgspec

COMMANDS: dict[str, type[Any]] = {}
"""Class of every kind of command, by its name. Reading a log looks the classes up here, and the bus
checks that it has a port (a method that carries out the command) for each."""

EVENTS: dict[str, type[Any]] = {}
"""Class of every kind of event, by its name. Reading a log looks the classes up here."""


class BaseCommand(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True, forbid_unknown_fields=True
):
    """Base of the commands that the core (the scheduling code) may give. Each kind is a subclass
    with `frozen=True, kw_only=True`. The garbage collector skips messages: they hold ids, numbers
    and texts, and no reference cycles. `msgspec.structs.replace` makes a changed copy."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        COMMANDS[cls.__name__] = cls


class BaseEvent(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True, forbid_unknown_fields=True
):
    """Base of the events that the core (the scheduling code) may receive; `time_s` is seconds since
    the run began. Each kind is a subclass, made like those of `BaseCommand`."""

    time_s: float

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        EVENTS[cls.__name__] = cls
