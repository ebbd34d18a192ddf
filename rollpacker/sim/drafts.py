"""Tokens that are guessed and then verified in one decode step (speculative decoding). `Drafts` are
guessed from other responses to the prompt or from the response's own text; `Speculation` is a given
speed-up of the engine. Both change only the time of a step, not the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.bounds import check_at_least, check_within
from rollpacker.core.commands import RoundKind
from rollpacker.sim.scenario_checks import check_known


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Tokens guessed in a decode step, and chance that one is right (`rollout.drafts.*`)."""

    acceptance: float = 0.41
    """Chance that a guessed token is right. Published for long guesses (Seer, arXiv 2511.14617):
    1.70 tokens per step from a response's own text, which is a chance of 0.41, and 2.32 with five
    other responses to the prompt, which is 0.57."""
    max_depth: int = 4
    """Most tokens guessed for one sequence in a decode step."""
    max_positions: int = 64
    """Most tokens guessed in one step of an engine: with many sequences, fewer for each."""
    overhead: float = 0.1
    """Share by which a decode step takes longer when it verifies guessed tokens."""

    def __post_init__(self) -> None:
        check_within(self, "[0, 1)", "acceptance")
        check_within(self, "[0, 10)", "overhead")
        check_at_least(self, 1, "max_depth", "max_positions")

    def tokens_per_step(self, num_running: int) -> float:
        """Mean tokens of a sequence in a step of `num_running` ones: 1, and more with guesses."""
        depth = min(self.max_depth, self.max_positions // num_running)
        tokens = chance = 1.0
        for _ in range(depth):
            chance *= self.acceptance
            tokens += chance
        return tokens

    def speedup(self, num_running: int) -> float:
        """Factor by which decoding is faster with `num_running` sequences. At least 1: where
        guesses would slow decoding down, no tokens are guessed."""
        if not num_running:
            return 1.0
        return max(1.0, self.tokens_per_step(num_running) / (1 + self.overhead))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as a given speed-up of an engine (`rollout.speculation.*`)."""

    speedup: float
    """Factor, at least 1, by which decode steps are faster with speculation."""
    max_live: int
    """Most running sequences of an engine at which speculation still makes its steps faster."""
    kinds: tuple[str, ...] = ("long", "flush")
    """Kinds of round (`RoundKind`) in which speculation makes decode steps faster."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "speedup", "max_live")
        for kind in self.kinds:
            check_known("kinds", kind, [known.value for known in RoundKind])
