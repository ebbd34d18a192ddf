"""The dataset's port: `FetchPrompts` in, `PromptsFetched` out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollpacker.bus import Bus, Routes
from rollpacker.core.commands import FetchPrompts
from rollpacker.core.events import PromptsFetched
from rollpacker.data.dataset import Cursor
from rollpacker.run.main_task import MainTask


@dataclass(frozen=True, slots=True)
class Fetching:
    """Takes prompts from the cursor, on the main task."""

    bus: Bus
    main: MainTask
    cursor: Cursor

    def routes(self) -> Routes:
        return {FetchPrompts: lambda command: self.main.later(partial(self._fetch, command))}

    async def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self.cursor.take(command.count)
        self.bus.take(
            PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            )
        )
