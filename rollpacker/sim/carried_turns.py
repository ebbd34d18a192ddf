"""Tokens that trajectories of deferred prompts (put off to a later round) had generated, and how
many of these tokens the next launch of the trajectory can keep.

A message that was drawn before is not decoded again: an engine takes its tokens in, in one pass,
and keeps those before the first that comes out differently (`carry.mismatch`, for each token drawn
and each update). The environment is asked anew, with all its seconds. What follows a token that
comes out differently is decoded; it has the lengths that it had, an approximation.
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
    """The port that obeys `Defer` (put a prompt off to a later round) where trajectories keep their
    tokens. Tokens are counted after the prompt, those of environments' answers included."""

    def __init__(self, workload: Workload, mismatch: float, responses: Responses) -> None:
        assert workload.trajectories is not None
        self.verified = Verified()
        """Counts of tokens of earlier launches that newer weights verified, without tokens of
        environments' answers."""
        self.same: dict[int, int] = {}
        """Number of tokens, by key of a launched sample, that come out as in its earlier launch."""
        self._workload, self._mismatch, self._responses = workload, mismatch, responses
        self._trajectories = workload.trajectories
        self._left: dict[tuple[PromptId, int], tuple[int, int]] = {}
        """By prompt and index of a sample put off to a later round: the number of tokens that it
        had, and the version of the weights that generated these tokens."""
        self._version = 0
        """Version of the weights that the current launches generate with."""

    @classmethod
    def of(cls, machine: Machine, workload: Workload, responses: Responses) -> CarriedTurns | None:
        """The port for a run; None if no tokens are kept, or if samples take no turns."""
        return cls(workload, machine.mismatch, responses) if machine.carries_turns else None

    def routes(self) -> Routes:
        return {Defer: self._defer}

    def launch(self, keys: Iterable[int], version: int) -> None:
        """Begin the trajectories with these keys under weights of this version: draw how many of
        the tokens that each had in an earlier launch come out the same, and keep it in `same`."""
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
        """Remember that a sample whose prompt is put off had `tokens` tokens of these weights."""
        self._left[noise.prompt, noise.index] = tokens, version

    def take_up(self, sample: SampleId, noise: SampleId, version: int) -> int:
        """Number of tokens of a launched sample that come out as in its earlier launch, if any."""
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
        """Number of the policy's own tokens among the first `tokens` of the trajectory."""
        drawn = 0
        for turn in self._trajectories.turns(noise):
            drawn += min(turn.tokens, tokens)
            tokens -= turn.tokens + turn.given
            if tokens <= 0:
                break
        return drawn

    def _place(self, noise: SampleId, drawn: int) -> int:
        """Tokens of the trajectory, those of environments' answers included, that stand before the
        policy's own token number `drawn`, counted from 0."""
        place = 0
        for turn in self._trajectories.turns(noise):
            if drawn < turn.tokens:
                break
            drawn -= turn.tokens
            place += turn.tokens + turn.given
        return place + drawn
