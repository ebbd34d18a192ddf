"""The simulated environments of trajectories: each environment answers after the seconds drawn for
its turn. The scheduling core limits how many answer at once (`core/checks/acting.py`), so an `Act`
command begins at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from rollpacker.bus import Routes
from rollpacker.core.commands import Act, CancelAct, Conclude
from rollpacker.core.events import Acted, Event
from rollpacker.core.ids import SampleId
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.responses import Responses
from rollpacker.sim.trajectories import Trajectories


class _Answer:
    """An environment's answer that is still to come, as an event, and its time in seconds."""

    __slots__ = ("event", "next_finish")

    def __init__(self, event: Acted, when_s: float) -> None:
        self.event = event
        self.next_finish = when_s


class Environments:
    """Carries out commands to ask environments for answers (`Act`), to cancel that (`CancelAct`),
    and to end trajectories (`Conclude`)."""

    def __init__(
        self,
        clock: VirtualClock,
        responses: Responses,
        trajectories: Trajectories,
        concluded: Callable[[], None],
    ) -> None:
        """`concluded` is a function that is called whenever a trajectory is over."""
        self.hangs: Callable[[SampleId, int], bool] = lambda sample, turn: False
        """Function that returns whether the environment never answers this turn (from 1)."""
        self._clock = clock
        self._responses = responses
        self._trajectories = trajectories
        self._concluded = concluded
        self._asked: dict[SampleId, _Answer] = {}
        """Answers still to be given, by the sample that awaits them."""

    def routes(self) -> Routes:
        return {Act: self._act, CancelAct: self._cancel, Conclude: self._conclude}

    def _act(self, command: Act) -> None:
        sample, turn = command.sample, command.turn
        turns = self._trajectories.turns(self._responses.noises[self._responses.keys[sample]])
        answer = turns[turn - 1]
        # An episode that is played again answers all its turns once more.
        again = sum(before.seconds for before in turns[: turn - 1]) if command.retry else 0.0
        seconds = math.inf if self.hangs(sample, turn) else answer.seconds
        limit_s = command.timeout_s
        assert limit_s is not None
        if seconds > limit_s:
            acted = Acted(time_s=0.0, sample=sample, turn=turn, seconds=limit_s, cause="deadline")
        else:
            acted = Acted(
                time_s=0.0,
                sample=sample,
                turn=turn,
                num_tokens=answer.given,
                is_over=answer.is_over,
                seconds=seconds,
            )
        when_s = self._clock.time_s + again + min(seconds, limit_s)
        self._asked[sample] = coming = _Answer(acted, when_s)
        self._clock.expect(coming, partial(self._say, coming))

    def _say(self, coming: _Answer) -> Event:
        coming.next_finish = math.inf
        del self._asked[coming.event.sample]
        return coming.event

    def _cancel(self, command: CancelAct) -> None:
        for sample in command.samples:
            coming = self._asked.pop(sample, None)
            if coming is not None:
                coming.next_finish = math.inf  # it does not come
                turn = coming.event.turn
                cancelled = Acted(time_s=0.0, sample=sample, turn=turn, cause="cancelled")
                self._clock.after(0.0, cancelled)

    def _conclude(self, command: Conclude) -> None:
        self._concluded()
