"""Tokens that trajectories of deferred prompts (put off to a later round) had generated, and how
many of these tokens a trajectory can keep when it is launched (given to an engine) again.

A message that was generated before is not decoded again: an engine reads its tokens in one pass,
and keeps those before the first that comes out differently (with chance `carry.mismatch` for each
token and weight update). The environment is asked anew, which takes all its seconds again. Tokens
after the first that differs are decoded; as an approximation, messages and answers keep their
lengths.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollpacker.bus import Routes
from rollpacker.core.commands import Defer
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.portable import power
from rollpacker.sim.machine import Machine
from rollpacker.sim.responses import Responses, Verified
from rollpacker.sim.workload import Workload


class CarriedTurns:
    """Remembers the tokens of trajectories when the scheduling core puts their prompts off to a
    later round (command `Defer`), for when they are launched again. Tokens are counted after the
    prompt and include environments' answers."""

    def __init__(self, workload: Workload, mismatch: float, responses: Responses) -> None:
        assert workload.trajectories is not None
        self.verified = Verified()
        """Counts of tokens of earlier launches, checked and found different under newer weights."""
        self.same: dict[int, int] = {}
        """By a sample's key (its number in the simulation): how many earlier tokens it keeps."""
        self._workload, self._mismatch, self._responses = workload, mismatch, responses
        self._trajectories = workload.trajectories
        self._left: dict[tuple[PromptId, int], tuple[int, int]] = {}
        """Mapping from (prompt, sample index), for samples put off to a later round, to the number
        of tokens generated so far and the version of the weights that generated them."""
        self._version = 0
        """Version of the weights that the last call of `launch` named."""

    @classmethod
    def of(cls, machine: Machine, workload: Workload, responses: Responses) -> CarriedTurns | None:
        """Make the object for a run; None if the run keeps no tokens of deferred trajectories."""
        return cls(workload, machine.mismatch, responses) if machine.carries_turns else None

    def routes(self) -> Routes:
        return {Defer: self._defer}

    def launch(self, keys: Iterable[int], version: int) -> None:
        """Begin the trajectories with these keys: draw how many tokens of each one's earlier launch
        come out the same under weights of this version, and store the number in `same`."""
        samples, noises, self._version = self._responses.samples, self._responses.noises, version
        for key in keys:
            self.same[key] = self.take_up(samples[key], noises[key], version)

    def _defer(self, command: Defer) -> None:
        prompts, responses = set(command.prompts), self._responses
        for key, sample in enumerate(responses.samples):
            if sample.prompt in prompts:
                tokens = responses.reached.get(key, responses.lengths[key])
                tokens = max(tokens, self.same[key])
                self.keep(responses.noises[key], tokens, self._version)

    def keep(self, noise: SampleId, tokens: int, version: int) -> None:
        """Remember how many tokens a deferred prompt's sample had, and the version of the weights
        that generated them. The id `noise` seeds the random numbers of the sample's turns."""
        self._left[noise.prompt, noise.index] = tokens, version

    def take_up(self, sample: SampleId, noise: SampleId, version: int) -> int:
        """Remove what `keep` stored for the sample `noise`, and return how many of its tokens stay
        the same under weights of this version; 0 if nothing was. `sample` is the new launch."""
        tokens, drawn_by = self._left.pop((noise.prompt, noise.index), (0, version))
        drawn = self._drawn(noise, tokens) if tokens else 0
        if not drawn:
            return 0
        rate = 1 - power(1 - self._mismatch, version - drawn_by)
        again = SampleId(noise.prompt, noise.index, sample.attempt)
        kept = self._workload.first_mismatch(again, drawn, rate)
        self.verified.num_tokens += min(kept + 1, drawn)
        self.verified.num_mismatches += kept < drawn
        return tokens if kept == drawn else self._place(noise, kept)

    def _drawn(self, noise: SampleId, tokens: int) -> int:
        """Number of tokens that the policy generated among the first `tokens` of a trajectory; the
        rest are environments' answers. The id `noise` seeds the trajectory's random numbers."""
        drawn = 0
        for turn in self._trajectories.turns(noise):
            drawn += min(turn.tokens, tokens)
            tokens -= turn.tokens + turn.given
            if tokens <= 0:
                break
        return drawn

    def _place(self, noise: SampleId, drawn: int) -> int:
        """Number of tokens, environments' answers included, before the policy's token number
        `drawn` (counted from 0), in the trajectory whose random numbers the id `noise` seeds."""
        place = 0
        for turn in self._trajectories.turns(noise):
            if drawn < turn.tokens:
                break
            drawn -= turn.tokens
            place += turn.tokens + turn.given
        return place + drawn
