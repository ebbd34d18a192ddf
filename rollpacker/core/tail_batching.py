"""The settings of tail batching: how much more a race launches than it needs.

    factor     a race launches                           its config
    eta_p      ceil(eta_p * prompts needed) prompts      `prompt_factor`
    eta_r      ceil(eta_r * R0) samples of each          `sample_factor`

Short rounds race at the factors of `TailBatchingConfig`, or at those that the run chooses ("auto");
every tier of deferred prompts has its own. docs/tail-batching.md has the whole picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

DebiasMethod = Literal["none", "density", "moments"]
Race = Literal["generated", "scored"]
Factor = float | Literal["auto"]


class Factors(NamedTuple):
    """How many times of what it needs a race launches."""

    prompts: float
    """eta_p"""
    samples: float
    """eta_r"""

    def num_prompts(self, needed: int) -> int:
        """Prompts that a race for so many groups launches."""
        return times(self.prompts, needed)

    def num_samples(self, samples_per_prompt: int) -> int:
        """Samples that it launches of each prompt."""
        return times(self.samples, samples_per_prompt)


AUTO_START = Factors(1.25, 1.125)
"""Factors of the first rounds with "auto", until the run's own lengths are known."""
NO_RACE = Factors(1.0, 1.0)
"""Nothing is launched beyond what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A further race for deferred prompts (`tail_batching.tiers`)."""

    prompt_factor: float = 1.25
    sample_factor: float = 1.25

    def __post_init__(self) -> None:
        _check_factor("prompt_factor", self.prompt_factor)
        _check_factor("sample_factor", self.sample_factor)

    @property
    def factors(self) -> Factors:
        return Factors(self.prompt_factor, self.sample_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailBatchingConfig:
    """Over-start, keep the first to finish, gather the stragglers (`tail_batching.*`)."""

    enabled: bool = True
    prompt_factor: Factor = 1.25
    """eta_p: a short round launches ceil(prompt_factor * P0) prompts. "auto": chosen for the run's
    own lengths, and anew as they change; then sample_factor is "auto" too. The choice goes by
    measured seconds, so such a run does not repeat bit by bit."""
    sample_factor: Factor = 1.25
    """eta_r: ... with ceil(sample_factor * R0) samples each."""
    tiers: tuple[Tier, ...] = ()
    """Further races: what the short round defers races again at these factors, and only what fails
    in the last race waits for a long round. Fewer long rounds; pays where length is luck."""
    race: Race = "generated"
    """What counts as finishing first. "scored" is what the published code does: a slow reward can
    then push a prompt into a long round, and runs are no longer repeatable bit by bit."""
    balance_sources: bool = False
    """Each source of prompts (`PromptId.source`) keeps its share of what a race trains on, so that
    a source with slow rewards or long answers is not raced out of the batch."""
    debias: DebiasMethod = "none"
    """Weigh each sample's loss so that training sees the policy's own lengths, not only those that
    won a race. "density": ratio of the two densities; "moments": the smallest weights that match
    the distribution's shape."""
    max_length_shift: float = 0.35
    """With "auto": trained responses may be at most this much shorter, on average, than the
    policy's own (0.35 is 35 %). With debias it bounds nothing: the weights undo the shift."""
    flush_each_epoch: bool = True
    """Empty the long queue at the end of every epoch, not only at the end of the run."""

    def __post_init__(self) -> None:
        for name in ("prompt_factor", "sample_factor"):
            value = getattr(self, name)
            if value != "auto":
                _check_factor(name, value)
        if "auto" in (self.prompt_factor, self.sample_factor):
            if self.prompt_factor != self.sample_factor:
                raise ValueError("prompt_factor and sample_factor must both be auto, or neither")
            if self.tiers or self.race == "scored":
                raise ValueError('prompt_factor=auto goes with race="generated" and no tiers')
        if not 0 < self.max_length_shift <= 1:
            raise ValueError(
                f"max_length_shift must lie between 0 and 1, not {self.max_length_shift}"
            )

    @property
    def chooses(self) -> bool:
        """The factors are chosen while the run goes on."""
        return self.enabled and self.prompt_factor == "auto"

    @property
    def factors(self) -> Factors:
        """Factors of the short rounds; where the run chooses them, those that it begins with, and
        `Learned.factors` has those in force."""
        if not self.enabled:
            return NO_RACE
        if self.prompt_factor == "auto" or self.sample_factor == "auto":
            return AUTO_START
        return Factors(self.prompt_factor, self.sample_factor)


def _check_factor(name: str, value: float) -> None:
    if not (math.isfinite(value) and 1 <= value <= 16):
        raise ValueError(f"{name} must lie between 1 and 16, not {value}")


def times(factor: float, count: int) -> int:
    """factor * count rounded up, but 1.1 * 10 is 11 and not 12."""
    return math.ceil(factor * count - 1e-9)
