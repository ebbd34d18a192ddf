"""Tokens guessed, and verified in one decode step: drafts from siblings and from a response's own
text, or speculation as a property of the engine. Exact, so that they change nothing but the time of
a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollpacker.core.commands import RoundKind
from rollpacker.sim.scenario_checks import at_least_one, check_known


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Chance and depth of guessed tokens (`rollout.drafts.*`)."""

    acceptance: float = 0.41
    """Chance that a guessed token is the one that comes out. 0.41 makes 1.70 tokens a step of deep
    drafts, as published for drafts from the own text alone; 0.57 the 2.32 of drafts from five
    siblings (Seer, arXiv 2511.14617)."""
    max_depth: int = 4
    """Tokens guessed for a sequence at most."""
    max_positions: int = 64
    """Tokens guessed in one step of an engine at most: with more sequences, drafts are shorter."""
    overhead: float = 0.1
    """A step that verifies drafts takes longer by this share."""

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise ValueError(
                f"acceptance must be at least 0 and less than 1, not {self.acceptance}"
            )
        if not 0 <= self.overhead < 10:
            raise ValueError(f"overhead must be at least 0 and less than 10, not {self.overhead}")
        for name in ("max_depth", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def tokens_per_step(self, num_running: int) -> float:
        """Tokens that each of so many sequences gains in a step, on average."""
        depth = min(self.max_depth, self.max_positions // num_running)
        tokens = chance = 1.0
        for _ in range(depth):
            chance *= self.acceptance
            tokens += chance
        return tokens

    def speedup(self, num_running: int) -> float:
        """How many times faster decoding is with this number of sequences. Never below 1: where
        drafts would slow decoding down, none are made."""
        if not num_running:
            return 1.0
        return max(1.0, self.tokens_per_step(num_running) / (1 + self.overhead))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as a property of the engine (`rollout.speculation.*`)."""

    speedup: float
    """Decode steps are this much faster ..."""
    max_live: int
    """... while an engine runs at most so many sequences ..."""
    kinds: tuple[str, ...] = ("long", "flush")
    """... in these kinds of round."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speedup) and self.speedup >= 1):
            raise ValueError(f"speedup must be at least 1, not {self.speedup}")
        at_least_one(self, "max_live")
        for kind in self.kinds:
            check_known("kinds", kind, [known.value for known in RoundKind])
