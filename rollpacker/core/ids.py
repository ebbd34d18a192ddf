"""The names of prompts and samples.

Ids are small tuples: hashable, ordered, and printed in one stable form, so that a log of one run
can be compared with the log of another byte by byte.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

PoolName = Literal["rollout", "train"]
"""Devices of a phase, which several jobs may share."""


class PromptId(NamedTuple):
    """One dataset row in one epoch. Two rows with the same text are two prompts."""

    source: str
    epoch: int
    row: int

    def __str__(self) -> str:
        return f"{self.source}/{self.epoch}/{self.row}"

    @classmethod
    def parse(cls, text: str) -> PromptId:
        source, epoch, row = text.rsplit("/", 2)
        return cls(source, int(epoch), int(row))


class SampleId(NamedTuple):
    """One response to a prompt.

    `attempt` counts how often the prompt was launched before (0 in its first round, 1 in the long
    round that takes it up again), `index` counts the responses inside the attempt.
    """

    prompt: PromptId
    index: int  # type: ignore[assignment]
    attempt: int

    def __str__(self) -> str:
        return f"{self.prompt}#{self.attempt}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        prompt, _, tail = text.rpartition("#")
        attempt, _, index = tail.partition(".")
        return cls(PromptId.parse(prompt), int(index), int(attempt))
