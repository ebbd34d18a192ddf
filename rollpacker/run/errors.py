"""Errors that a run can die of, and the functions that its ports take from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import Response
from rollpacker.rewards.reward import TurnRewards
from rollpacker.trainer.trainer import TokenScores, TrainSample

Decode = Callable[[Sequence[int]], str]
"""Makes text of response tokens, special tokens left out."""


class BuildSamples(Protocol):
    """The algorithm: makes weighted training samples of groups of (response, reward), in the same
    order, and metrics.

    `weights` multiply the losses of the samples. `scores`: what other models say of the tokens, if
    the algorithm asks any. `updates`: which of the step's optimizer steps trains on each group.
    `reward_parts`: each reward's own values; `turn_rewards`: the values of a trajectory's turns.
    `partial`: whether groups of the step are missing; the token weights are then those of the whole
    step but for one common factor.
    """

    def __call__(
        self,
        groups: Sequence[Sequence[tuple[Response, float]]],
        *,
        weights: Sequence[Sequence[float]] | None = None,
        scores: Mapping[SampleId, TokenScores] | None = None,
        partial: bool = False,
        updates: Sequence[int] | None = None,
        reward_parts: Mapping[SampleId, Mapping[str, float | None]] | None = None,
        turn_rewards: Mapping[SampleId, TurnRewards] | None = None,
    ) -> tuple[list[TrainSample], dict[str, float]]: ...


class RunError(ValueError):
    """The run cannot start or go on as asked; the message says what to do."""


class FolderInUse(RunError):
    """Another process is at work in the run's folder."""


class EnginesLost(RuntimeError):
    """The run ended since engines were lost, and the engines made in their places, too."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. Mend that, then go on with --resume")


class HostsLost(RuntimeError):
    """The cluster that the run's processes are on has gone. The message says which part of it."""


@contextlib.contextmanager
def reaching_the_cluster() -> Iterator[None]:
    """A context that raises `HostsLost` if the cluster with the run's devices is out of reach."""
    try:
        yield
    except OSError as error:
        raise HostsLost(
            f"the cluster that the run's devices belong to cannot be reached: {error}. Once it is "
            "there again, the run goes on with --resume"
        ) from error


class RewardsFailed(RunError):
    """The run ended since samples get no verdicts; once that is mended, it can be resumed."""


class DeadlineExceeded(RuntimeError):
    """Something that the run waited for showed no sign of life within its deadline."""

    def __init__(self, what: str, seconds: float, key: str) -> None:
        super().__init__(
            f"no sign of life for {seconds:.0f} s while waiting for {what}. The run can be resumed "
            f"from its last checkpoint; if this wait is normal here, raise {key}"
        )
