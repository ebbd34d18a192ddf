"""Progress of each trajectory of a round: its number of messages, and its latest engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rollpacker.sim.carried_turns import CarriedTurns
from rollpacker.sim.machine import Machine
from rollpacker.sim.responses import Responses
from rollpacker.sim.trajectories import Trajectories
from rollpacker.sim.workload import Workload


class Home(NamedTuple):
    engine: int
    incarnation: int


class Turns:
    """For each sample of a round of generation, by key: how many of its messages have ended, which
    engine generated the last one, and how many tokens come before the current one."""

    def __init__(
        self,
        trajectories: Trajectories,
        responses: Responses,
        *,
        keep_rows: bool,
        carried: CarriedTurns | None = None,
    ) -> None:
        """`keep_rows`: whether an engine keeps a sample's cache while the environment answers, to
        go on with. `carried`: tokens of trajectories put off to a later round; None: not kept."""
        self._trajectories = trajectories
        self._responses = responses
        self._keep_rows = keep_rows
        self._carried = carried
        self._ended: dict[int, int] = {}
        self._homes: dict[int, Home] = {}
        self._starts: dict[int, int] = {}
        """Number of the trajectory's tokens before its current message, by the sample's key."""

    @classmethod
    def of(
        cls,
        machine: Machine,
        workload: Workload,
        responses: Responses,
        carried: CarriedTurns | None,
    ) -> Turns | None:
        """Make the object for a run. Returns None if the run's samples are single responses."""
        trajectories = workload.trajectories
        if trajectories is None:
            return None
        return cls(trajectories, responses, keep_rows=machine.keep_rows, carried=carried)

    def clear(self) -> None:
        """Forget all trajectories, since another round of generation begins."""
        self._ended.clear()
        self._homes.clear()
        self._starts.clear()

    def launch(self, keys: Iterable[int], version: int) -> dict[int, int]:
        """Begin the first message of these samples under weights of this version. Returns, by key,
        how many tokens of it are kept from an earlier launch; samples without any are missing."""
        if self._carried is not None:
            self._carried.launch(keys, version)
        found = {}
        for key in keys:
            if left := self._take_up(key, 0):
                found[key] = left
        return found

    def start(self, key: int) -> int:
        """Number of the trajectory's tokens before the sample's current message."""
        return self._starts[key]

    def end(self, key: int, home: Home) -> bool:
        """Count a message of the sample that the engine `home` has ended. Returns whether the
        message was cut off by a limit of tokens."""
        turn = self._ended[key] = self._ended.get(key, 0) + 1
        self._homes[key] = home
        noise = self._responses.noises[key]
        return self._trajectories.turns(noise)[turn - 1].is_cut_off

    def begin(self, key: int) -> int:
        """Begin the sample's next message, after the environment's answer. Returns how many tokens
        of the trajectory need not be generated, kept tokens of the new message included."""
        responses = self._responses
        turns, turn = self._trajectories.turns(responses.noises[key]), self._ended[key]
        has = responses.lengths[key] + turns[turn - 1].given
        responses.lengths[key] = has + turns[turn].tokens
        return has + self._take_up(key, has)

    def to_compute(self, key: int, home: Home) -> int | None:
        """Number of tokens that the engine `home` must compute before it generates the sample's
        message: those of the environment's answer and those kept of the message. None: the prompt
        and the whole trajectory, since the engine does not have the sample in its cache."""
        if not self._keep_rows or self._homes[key] != home:
            return None
        turns = self._trajectories.turns(self._responses.noises[key])
        left = self._responses.done[key] - self._starts[key]
        return turns[self._ended[key] - 1].given + left

    def _take_up(self, key: int, start: int) -> int:
        """Begin a message of the sample, which follows the first `start` tokens of its trajectory.
        Returns how many tokens of the message are kept from an earlier launch."""
        responses = self._responses
        self._starts[key] = start
        same = 0 if self._carried is None else self._carried.same[key]
        done = min(max(same, start), responses.lengths[key])
        responses.done[key] = done
        return done - start
