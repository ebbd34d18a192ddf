"""The objects that most ports of a run need, in one record."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.bus import Bus
from rollpacker.run.ports.desk import Desk
from rollpacker.run.ports.main_task import MainTask
from rollpacker.run.ports.watch import Watch


@dataclass(frozen=True, slots=True)
class Shared:
    """The bus (brings events to the core), the main task (does slow work), the desk (what is known
    of each sample), and the watch over deadlines."""

    bus: Bus
    main: MainTask
    desk: Desk
    watch: Watch
