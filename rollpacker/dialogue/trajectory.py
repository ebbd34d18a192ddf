"""The protocol of dialogues as tokens, and the record that crosses it: a trajectory, the tokens of
a dialogue in order, as they were drawn and given. Light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from rollpacker.spans import Spans

Message = Mapping[str, Any]
"""As chat templates take it: see `environments.environment`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent tokens of one origin."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    """One per token of what the model drew. None: the tokens were given to it."""

    def __post_init__(self) -> None:
        assert self.log_probs is None or len(self.log_probs) == len(self.tokens)

    @property
    def is_sampled(self) -> bool:
        return self.log_probs is not None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What came after the prompt: sampled, given, sampled, ... It begins with a sampled segment,
    and never has two of a kind in a row; its last may be a given one while it goes on."""

    prompt: tuple[int, ...]
    segments: tuple[Segment, ...] = ()

    def and_then(self, segment: Segment) -> Trajectory:
        """With what came next; empty segments leave no trace."""
        if not segment.tokens:
            return self
        if self.segments and self.segments[-1].is_sampled == segment.is_sampled:
            last = self.segments[-1]
            log_probs = None
            if last.log_probs is not None and segment.log_probs is not None:
                log_probs = last.log_probs + segment.log_probs
            joined = Segment(last.tokens + segment.tokens, log_probs)
            return Trajectory(self.prompt, (*self.segments[:-1], joined))
        return Trajectory(self.prompt, (*self.segments, segment))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that came after the prompt."""
        return tuple(chain.from_iterable([one.tokens for one in self.segments]))

    @property
    def mask(self) -> tuple[bool, ...]:
        """Of each token after the prompt: whether the model drew it, so that it is trained on."""
        return tuple(one.is_sampled for one in self.segments for _ in one.tokens)

    @property
    def log_probs(self) -> tuple[float, ...]:
        """One per token after the prompt: zero where it was given."""
        return tuple(
            value for one in self.segments for value in (one.log_probs or (0.0,) * len(one.tokens))
        )

    @property
    def given(self) -> Spans:
        """The stretches of `tokens` that the model did not draw."""
        spans, start = [], 0
        for one in self.segments:
            if not one.is_sampled:
                spans.append((start, start + len(one.tokens)))
            start += len(one.tokens)
        return tuple(spans)

    @property
    def num_sampled(self) -> int:
        return sum(len(one.tokens) for one in self.segments if one.is_sampled)

    @property
    def turns(self) -> Iterator[Segment]:
        """What the model drew, turn by turn."""
        return (one for one in self.segments if one.is_sampled)


class Dialogue(Protocol):
    """What a model's chat template makes of messages, and the messages that it makes of tokens."""

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens up to and with the generation prompt. Raises `ValueError` if the template
        refuses the messages."""
        ...

    def appended(self, messages: Sequence[Message], sampled: Sequence[int]) -> tuple[int, ...]:
        """What is given to the model behind a turn of these `sampled` tokens. Raises `ValueError`
        if the template refuses the messages."""
        ...

    def message(self, sampled: Sequence[int], turn: int) -> dict[str, Any]:
        """The assistant's message of a turn's tokens, which may end anywhere. Never raises."""
        ...
