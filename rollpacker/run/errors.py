"""Errors that end a run, and types of functions that its parts are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import Response
from rollpacker.rewards.reward import TurnRewards
from rollpacker.trainer.trainer import TokenScores, TrainSample

Decode = Callable[[Sequence[int]], str]
"""Turns response tokens into text, special tokens left out."""


class BuildSamples(Protocol):
    """Type of the function that applies the algorithm: groups of (response, reward) become training
    samples with advantages, in the same order, and metrics. `weights` multiply the samples' losses.
    `scores`: log-probs and values by other models; None if the algorithm asks none. `updates`: for
    each group the number of the optimizer step that trains on it. `reward_parts`: each reward's own
    values; `turn_rewards`: rewards of single turns. `partial`: whether these are only some of the
    step's groups, so that weights of tokens are provisional (they depend on the total)."""

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
    """Engines were lost, and so were the engines made in their places, so that the run ended."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. Mend that, then go on with --resume")


class HostsLost(RuntimeError):
    """The ray cluster of the run's processes, or the scheduler of its shared devices, has gone. The
    message says which."""


@contextlib.contextmanager
def reaching_the_cluster() -> Iterator[None]:
    """A context in which an `OSError` becomes `HostsLost`: the cluster cannot be reached."""
    try:
        yield
    except OSError as error:
        raise HostsLost(
            f"the cluster that the run's devices belong to cannot be reached: {error}. Once it is "
            "there again, the run goes on with --resume"
        ) from error


class RewardsFailed(RunError):
    """The run ended since the rewards give no verdicts. It can be resumed once they work again."""


class DeadlineExceeded(RuntimeError):
    """Something that the run waited for made no progress before its deadline."""

    def __init__(self, what: str, seconds: float, key: str) -> None:
        super().__init__(
            f"no sign of life for {seconds:.0f} s while waiting for {what}. The run can be resumed "
            f"from its last checkpoint; if this wait is normal here, raise {key}"
        )
