"""An algorithm from outside of the package, which `algorithm.function` names. Light: no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol

from rollpacker.algo.row import Row
from rollpacker.imports import load_function

if TYPE_CHECKING:
    from torch import Tensor

    from rollpacker.algo.config import AlgorithmConfig


class AdvantageFunction(Protocol):
    """From the rewards of a step to its advantages."""

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        lengths: Sequence[int],
        *,
        config: AlgorithmConfig,
    ) -> Tensor:
        """`rewards` [N] (float64, on the CPU), `group_ids` [N] (integers, the same for samples of
        one prompt) and `lengths`, the N samples' response tokens. Gives one advantage per sample
        [N], or one per response token, sample after sample."""
        ...


class LossFunction(Protocol):
    """From log-probs and advantages to the loss of each token."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        sample_ids: Tensor,
        *,
        config: AlgorithmConfig,
    ) -> Tensor:
        """All are [K], the response tokens of some whole samples; `sample_ids` (integers) says
        whose each is. Gives [K], differentiable in `log_probs`. How tokens add up to one number
        is said by `algorithm.loss_aggregation`; nothing may depend on which other samples are in
        the call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Everything that is left out is as in the package."""

    row: Row = field(default_factory=Row)
    """The values of the switches that the config leaves at null. They also say what a run must
    know: an advantage that compares the step's samples needs normalize_mean="batch", which keeps it
    from being streamed; one that can do with a single sample per prompt needs "none"."""
    advantages: AdvantageFunction | None = None
    """Instead of what normalize_mean and normalize_std make of rewards."""
    loss: LossFunction | None = None
    """Instead of the objective. Mismatch correction, KL penalty and entropy bonus come on top."""


@cache
def own_algorithm(function: str) -> Algorithm:
    """What the function of this name returns. Raises `ValueError` if it returns no `Algorithm`."""
    make: Callable[[], object] = load_function(function)
    made = make()
    if not isinstance(made, Algorithm):
        raise ValueError(
            f'"{function}" must return a rollpacker.algo.Algorithm, not a {type(made).__name__}'
        )
    return made
