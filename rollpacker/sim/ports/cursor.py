"""The dataset cursor: prompts as the workload has them, at once."""

from __future__ import annotations

from rollpacker.bus import Routes
from rollpacker.core.commands import FetchPrompts
from rollpacker.core.events import PromptsFetched
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.workload import Workload


class Cursor:
    """Obeys `FetchPrompts`."""

    def __init__(self, clock: VirtualClock, workload: Workload) -> None:
        self._clock = clock
        self._workload = workload

    def routes(self) -> Routes:
        return {FetchPrompts: self._fetch}

    def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self._workload.take(command.count)
        self._clock.after(
            0.0,
            PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            ),
        )
