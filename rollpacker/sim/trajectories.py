"""The trajectories (samples with several turns) of a scenario, which no decision of a system
changes. The random numbers of a turn depend only on (seed, prompt, attempt, index), the sample's
id, and on the turn. Turn t's message is as long as a further response to the same prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.sim.turns_spec import TurnsSpec

MAX_KEPT = 50_000
"""Most trajectories that are cached, so that they are not drawn again at every turn."""
NUM_SEEN = 512
"""Number of prompts whose trajectories give the policy's mean length and percentile."""


class Turn(NamedTuple):
    tokens: int
    """Number of tokens of the model's message in this turn."""
    is_cut_off: bool
    """Whether the message ran into a token limit, which ends the trajectory."""
    given: int
    """Number of tokens of the environment's answer to the message."""
    seconds: float
    """Seconds that the environment takes for its answer."""
    is_over: bool
    """Whether the environment ends the trajectory with this turn's answer."""


AtRank = Callable[[Mapping[float, float], SampleId, int, int], NDArray[np.floating[Any]]]
"""Type of `Workload.at_rank`, which draws values from a law: (values by quantile, sample, number of
the law, which tells its random numbers from other laws', how many values)."""
Message = Callable[[SampleId, int], int]
"""Type of `Workload.message`, which returns the tokens of a sample's message in a turn."""


class Trajectories:
    """Draws the turns (message and environment's answer) of every sample."""

    def __init__(
        self,
        at_rank: AtRank,
        message: Message,
        spec: TurnsSpec,
        max_response_tokens: int,
    ) -> None:
        draw = functools.partial(_draw, at_rank, message, spec, max_response_tokens)
        self.turns = functools.lru_cache(MAX_KEPT)(draw)
        """Function that returns a sample's turns. They depend on its id only, and are drawn again
        if they are no longer kept."""

    def total(self, sample: SampleId) -> int:
        """Number of tokens of a sample's trajectory, without the answer to its last message."""
        turns = self.turns(sample)
        return sum(turn.tokens + turn.given for turn in turns) - turns[-1].given

    def own_tokens(self, groups: Sequence[Sequence[SampleId]]) -> int:
        """Sum of the tokens that these groups (samples of one prompt each) would have if each
        prompt were launched for the first time, with as many trajectories as its group has."""
        return sum(
            self.total(SampleId(group[0].prompt, index, 0))
            for group in groups
            for index in range(len(group))
        )

    def policy_lengths(self, sources: Sequence[str]) -> tuple[float, float]:
        """Mean and 95th percentile of the tokens of a trajectory, over one of each of `NUM_SEEN`
        prompts. Their sources (reward stages) are `sources`, repeated in this order."""
        prompts = (PromptId(sources[row % len(sources)], 0, row) for row in range(NUM_SEEN))
        totals = np.array([self.total(SampleId(prompt, 0, 0)) for prompt in prompts])
        return float(totals.mean()), float(np.percentile(totals, 95))


def _draw(
    at_rank: AtRank, message_of: Message, spec: TurnsSpec, cap: int, sample: SampleId
) -> tuple[Turn, ...]:
    """Draws a sample's turns by the scenario's `spec`, with messages of at most `cap` tokens."""
    num = int(at_rank(spec.messages_quantiles, sample, 0, 1)[0])
    most = num if spec.max_turns is None else min(num, spec.max_turns)
    given = at_rank(spec.given_tokens_quantiles, sample, 1, most)
    seconds = at_rank(spec.seconds_quantiles, sample, 2, most)
    turns: list[Turn] = []
    tokens = 0
    for turn in range(most):
        message = message_of(sample, turn)
        room = spec.max_tokens - tokens
        is_cut_off = message >= min(cap, room)
        message = min(message, room)
        answer = Turn(
            tokens=message,
            is_cut_off=is_cut_off,
            given=int(given[turn]),
            seconds=round(float(seconds[turn]), 6),
            is_over=turn + 1 == num,
        )
        turns.append(answer)
        tokens += message + answer.given
        if is_cut_off or tokens >= spec.max_tokens:
            break
    return tuple(turns)
