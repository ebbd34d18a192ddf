"""What deferred trajectories have left, and how much of it their next launch takes up.

A message that was drawn before is not decoded again: an engine takes its tokens in, in one pass,
and keeps those before the first that comes out differently (`carry.mismatch`, for each token drawn
and each update). The environment is asked anew, with all its seconds. What follows a token that
comes out differently is decoded; it has the lengths that it had, an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.sim.workload import Workload


@dataclass(slots=True)
class Verified:
    """Carried tokens that were drawn again in the whole run."""

    num_tokens: int = 0
    num_mismatches: int = 0
    """So many of them came out differently: of a response at most the first."""

    @property
    def mismatch(self) -> float:
        return self.num_mismatches / self.num_tokens if self.num_tokens else 0.0


class CarriedTurns:
    """By place of the sample: tokens from the prompt on, given ones included."""

    def __init__(self, workload: Workload, mismatch: float) -> None:
        assert workload.trajectories is not None
        self.verified = Verified()
        """Given tokens are left out."""
        self._workload, self._mismatch = workload, mismatch
        self._trajectories = workload.trajectories
        self._left: dict[tuple[PromptId, int], tuple[int, int]] = {}
        """Tokens, and the version of the weights that they are draws from."""

    def keep(self, noise: SampleId, tokens: int, version: int) -> None:
        """The prompt is deferred, and of this sample there were so many tokens."""
        self._left[noise.prompt, noise.index] = tokens, version

    def take_up(self, sample: SampleId, noise: SampleId, version: int) -> int:
        """Of a sample that is launched: how many tokens come out as they were."""
        tokens, drawn_by = self._left.pop((noise.prompt, noise.index), (0, version))
        drawn = self._drawn(noise, tokens)
        if not drawn:
            return 0
        rate = 1 - (1 - self._mismatch) ** (version - drawn_by)
        again = SampleId(noise.prompt, noise.index, sample.attempt)
        kept = self._workload.first_mismatch(again, drawn, rate)
        self.verified.num_tokens += min(kept + 1, drawn)
        self.verified.num_mismatches += kept < drawn
        return tokens if kept == drawn else self._place(noise, kept)

    def _drawn(self, noise: SampleId, tokens: int) -> int:
        """Of the first `tokens` of the trajectory, those that the policy drew."""
        drawn = 0
        for turn in self._trajectories.turns(noise):
            drawn += min(turn.tokens, tokens)
            tokens -= turn.tokens + turn.given
            if tokens <= 0:
                break
        return drawn

    def _place(self, noise: SampleId, drawn: int) -> int:
        """Tokens of the trajectory before the drawn one with this number, from 0."""
        place = 0
        for turn in self._trajectories.turns(noise):
            if drawn < turn.tokens:
                break
            drawn -= turn.tokens
            place += turn.tokens + turn.given
        return place + drawn
