"""Where each trajectory of a round is, for the engines."""

from __future__ import annotations

from typing import NamedTuple

from rollpacker.sim.responses import Responses
from rollpacker.sim.trajectories import Trajectories


class Home(NamedTuple):
    engine: int
    incarnation: int


class Turns:
    """Messages that ended, by key of the sample, and who generated the last one."""

    def __init__(
        self, trajectories: Trajectories, responses: Responses, *, keep_rows: bool
    ) -> None:
        """`keep_rows`: an engine keeps what it has of a sample while its environment answers."""
        self._trajectories = trajectories
        self._responses = responses
        self._keep_rows = keep_rows
        self._ended: dict[int, int] = {}
        self._homes: dict[int, Home] = {}

    def clear(self) -> None:
        """Another round begins."""
        self._ended.clear()
        self._homes.clear()

    def end(self, key: int, home: Home) -> bool:
        """A message has ended in this engine; whether it was cut off."""
        turn = self._ended[key] = self._ended.get(key, 0) + 1
        self._homes[key] = home
        noise = self._responses.noises[key]
        return self._trajectories.turns(noise)[turn - 1].is_cut_off

    def begin(self, key: int) -> int:
        """What the environment gave stands behind what the sample has, and its next message begins.
        Tokens that it has then."""
        responses = self._responses
        turns, turn = self._trajectories.turns(responses.noises[key]), self._ended[key]
        has = responses.lengths[key] + turns[turn - 1].given
        responses.done[key], responses.lengths[key] = has, has + turns[turn].tokens
        return has

    def to_compute(self, key: int, home: Home) -> int | None:
        """Of these, so many this engine has to take in first: those that were given. None: all, and
        the prompt."""
        if not self._keep_rows or self._homes[key] != home:
            return None
        turns = self._trajectories.turns(self._responses.noises[key])
        return turns[self._ended[key] - 1].given
