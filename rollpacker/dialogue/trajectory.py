"""The protocol of dialogues as tokens, and the record that crosses it: a trajectory, the tokens of
a dialogue in order, as they were drawn and given. Light."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollpacker.spans import Rewritten, Spans, rows_in

Message = Mapping[str, Any]
"""A message as chat templates take it: see `environments.environment`."""


class TooLong(Exception):
    """A text surely has more tokens than there is room for; nobody has encoded it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent tokens of one origin."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] | None = None
    """Log-probability of each token that the model drew. None: the tokens were given to it."""

    def __post_init__(self) -> None:
        assert self.log_probs is None or len(self.log_probs) == len(self.tokens)

    @property
    def is_sampled(self) -> bool:
        return self.log_probs is not None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A prompt and the segments behind it: sampled, given, sampled, ... The first segment is
    sampled, and no two of a kind follow each other, unless the later one is behind another prompt.
    The last may be a given one while the dialogue goes on."""

    prompt: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    rewritten: Rewritten = ()
    """Places in `tokens` where the model saw a prompt that was written anew."""

    def and_then(self, segment: Segment) -> Trajectory:
        """The trajectory with one more segment. An empty segment changes nothing."""
        if not segment.tokens:
            return self
        last = self.segments[-1] if self.segments and not self._begins_anew else None
        if last is not None and last.is_sampled == segment.is_sampled:
            log_probs = None
            if last.log_probs is not None and segment.log_probs is not None:
                log_probs = last.log_probs + segment.log_probs
            joined = Segment(last.tokens + segment.tokens, log_probs)
            return Trajectory(self.prompt, (*self.segments[:-1], joined), self.rewritten)
        return Trajectory(self.prompt, (*self.segments, segment), self.rewritten)

    def prompted(self, prompt: tuple[int, ...], given: Sequence[int] = ()) -> Trajectory:
        """The trajectory with the whole prompt of the next turn. If the prompt begins with all that
        there is, token by token, the rest of it was given. Else it takes the place of what came
        before, and what is drawn next is a row of its own; `given` are then the tokens in between
        for those who read the trajectory from its beginning to its end."""
        if not self.segments:
            return Trajectory(prompt)
        seen = self.context
        if prompt[: len(seen)] == seen:
            return self.and_then(Segment(prompt[len(seen) :]))
        grown = self.and_then(Segment(tuple(given)))
        return replace(grown, rewritten=(*grown.rewritten, (len(grown.tokens), prompt)))

    def ended(self) -> Trajectory:
        """The trajectory without the given tokens behind its last turn."""
        segments = self.segments
        while segments and not segments[-1].is_sampled:
            segments = segments[:-1]
        whole = replace(self, segments=segments)
        count = len(whole.tokens)
        return replace(whole, rewritten=tuple(one for one in self.rewritten if one[0] < count))

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens that the model sees before its next one."""
        if not self.rewritten:
            return self._behind(self.prompt)
        first, prompt = self.rewritten[-1]
        return prompt + self.tokens[first:]

    @property
    def num_context(self) -> int:
        """Number of tokens of `context`."""
        first, prompt = self.rewritten[-1] if self.rewritten else (0, self.prompt)
        return len(prompt) - first + sum([len(one.tokens) for one in self.segments])

    @property
    def _begins_anew(self) -> bool:
        return bool(self.rewritten) and self.rewritten[-1][0] == len(self.tokens)

    @property
    def rows(self) -> list[Trajectory]:
        """The parts that are trained on as one row each: the turns behind one prompt, without the
        given tokens behind the last of them."""
        placed, count = [], 0
        for one in self.segments:
            placed.append((count, one))
            count += len(one.tokens)
        return [
            Trajectory(context, tuple(one for start, one in placed if first <= start < behind))
            for context, first, behind in rows_in(self.prompt, count, self.given, self.rewritten)
        ]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens behind the prompt."""
        return self._behind(())

    @property
    def log_probs(self) -> tuple[float, ...]:
        """Log-probabilities of all tokens that the model drew."""
        found: list[float] = []
        for one in self.turns:
            found += one.log_probs or ()
        return tuple(found)

    def _behind(self, before: tuple[int, ...]) -> tuple[int, ...]:
        found = [*before]
        for one in self.segments:  # in whole stretches: each turn has all that came before it
            found += one.tokens
        return tuple(found)

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
        """The tokens that the model drew, turn by turn."""
        return (one for one in self.segments if one.is_sampled)


class Dialogue(Protocol):
    """A model's chat template: it makes tokens of messages, and messages of tokens."""

    def prompt(self, messages: Sequence[Message], *, most: int | None = None) -> tuple[int, ...]:
        """The tokens up to and with the generation prompt. Raises `ValueError` if the template
        refuses the messages, and `TooLong` rather than encode what surely has more than `most`
        tokens."""
        ...

    def appended(
        self, messages: Sequence[Message], sampled: Sequence[int], *, most: int | None = None
    ) -> tuple[int, ...]:
        """The tokens that the model is given behind a turn of these `sampled` tokens. Raises as
        `prompt` does."""
        ...

    def message(self, sampled: Sequence[int], turn: int) -> dict[str, Any]:
        """The assistant's message of a turn's tokens, which may end anywhere. Never raises."""
        ...

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Dialogue:
        """A dialogue with the same template in which the model is told of these tools. Raises
        `ValueError` if the template cannot show them."""
        ...

    def rewritten(self) -> str | None:
        """The way in which the template rewrites what came before, in a sentence. None: dialogues
        only grow."""
        ...
