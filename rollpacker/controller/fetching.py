"""The dataset's port: `FetchPrompts` in, `PromptsFetched` out."""

from __future__ import annotations

from functools import partial

from rollpacker.bus import Bus, Routes
from rollpacker.controller.main_task import MainTask
from rollpacker.core.commands import FetchPrompts
from rollpacker.core.events import PromptsFetched
from rollpacker.data.base import Cursor


class Fetching:
    """Takes prompts from the cursor, on the main task."""

    def __init__(self, bus: Bus, main: MainTask, cursor: Cursor) -> None:
        self._bus, self._main, self._cursor = bus, main, cursor

    def routes(self) -> Routes:
        return {FetchPrompts: lambda command: self._main.later(partial(self._fetch, command))}

    async def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self._cursor.take(command.count)
        self._bus.take(
            PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            )
        )
