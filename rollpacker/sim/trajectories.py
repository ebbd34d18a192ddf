"""The trajectories of a scenario with turns, as they are whatever is decided about them.

As with lengths, all is keyed by (seed, prompt, attempt, index) and by the turn. Messages are drawn
as responses are: the message of turn t has the length of a further response to the same prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.sim.turns_spec import TurnsSpec

MAX_KEPT = 50_000
"""Trajectories that are cached, so that none is drawn again at every turn."""
NUM_SEEN = 512
"""Prompts whose first trajectories give the policy's own lengths."""


class Turn(NamedTuple):
    tokens: int
    """Tokens of the message."""
    is_cut_off: bool
    """The message ran into a limit, which ends the trajectory."""
    given: int
    """Tokens of the answer."""
    seconds: float
    """Seconds until the answer is there."""
    is_over: bool
    """The episode is over with this answer."""


AtRank = Callable[[Mapping[float, float], SampleId, int, int], NDArray[np.floating[Any]]]
"""Type of `Workload.at_rank`."""
Message = Callable[[SampleId, int], int]
"""Type of `Workload.message`."""


class Trajectories:
    """The turns of every sample."""

    def __init__(
        self,
        at_rank: AtRank,
        message: Message,
        spec: TurnsSpec,
        max_response_tokens: int,
    ) -> None:
        draw = functools.partial(_draw, at_rank, message, spec, max_response_tokens)
        self.turns = functools.lru_cache(MAX_KEPT)(draw)
        """Turns of a sample up to its last message, by the id that its noise has."""

    def total(self, sample: SampleId) -> int:
        """Tokens of the trajectory, without those that are given after the last message."""
        turns = self.turns(sample)
        return sum(turn.tokens + turn.given for turn in turns) - turns[-1].given

    def own_tokens(self, groups: Sequence[Sequence[SampleId]]) -> int:
        """Tokens of as many first trajectories of these groups' prompts (see
        `Responses.own_tokens`)."""
        return sum(
            self.total(SampleId(group[0].prompt, index, 0))
            for group in groups
            for index in range(len(group))
        )

    def policy_lengths(self, sources: Sequence[str]) -> tuple[float, float]:
        """Mean and 95th percentile of the first trajectories of `NUM_SEEN` prompts, whose sources
        take turns as these do."""
        prompts = (PromptId(sources[row % len(sources)], 0, row) for row in range(NUM_SEEN))
        totals = np.array([self.total(SampleId(prompt, 0, 0)) for prompt in prompts])
        return float(totals.mean()), float(np.percentile(totals, 95))


def _draw(
    at_rank: AtRank, message_of: Message, spec: TurnsSpec, cap: int, sample: SampleId
) -> tuple[Turn, ...]:
    """The turns of a sample. `cap`: tokens at which a message is cut off."""
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
