"""Dynamic sampling: a group whose samples all got the same reward teaches nothing, so the step
leaves it out and looks for others.

The step's rounds are gathered until it has its number of groups, or a bound is met; a refill is a
race of fresh prompts. Nothing that is left out comes back: it never fills the long queue. After
DAPO (arXiv 2503.14476), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollpacker.core.ids import SampleId

NO_SIGNAL = "no signal: all its rewards are equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingConfig:
    """Train on groups with signal only (`rollout.dynamic_sampling`)."""

    enabled: bool = False
    max_refills: int = 3
    """Further rounds that a step may take to replace groups; then it goes on with fewer, and says
    so. There is none while an epoch's or the run's last prompts are worked off."""

    def __post_init__(self) -> None:
        if self.max_refills < 0:
            raise ValueError(f"max_refills must not be negative, not {self.max_refills}")


class StepGroups:
    """What the rounds of one step have brought so far."""

    def __init__(self, target: int) -> None:
        self.target = target
        """Groups that the step should train on."""
        self.groups: list[tuple[SampleId, ...]] = []
        self.lengths: list[int] = []
        """Tokens of each of their samples, in order."""
        self.num_refills = 0
        self.streamed: tuple[int, str] = (0, "")
        """Samples whose gradients have begun, and why those of the last round have not."""

    @property
    def missing(self) -> int:
        return self.target - len(self.groups)

    def add(self, groups: Iterable[tuple[SampleId, ...]], lengths: Iterable[int]) -> None:
        self.groups += groups
        self.lengths += lengths

    def note_streamed(self, num_samples: int, why_not: str) -> None:
        """What was streamed of one more round."""
        self.streamed = (self.streamed[0] + num_samples, why_not)
