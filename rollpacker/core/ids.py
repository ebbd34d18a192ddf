"""The names of prompts and samples.

Ids are small frozen records: hashable, ordered, and printed in one stable form, so that the logs of
two runs can be compared byte by byte. An id keeps its hash once computed, since every event of a
sample looks its id up in several tables.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PoolName = Literal["rollout", "train"]
"""Name of a pool of devices, which jobs may share: for generating (rollout) or training."""


class PromptId(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False, array_like=True):
    """Names one row of the dataset in one epoch. Two rows with the same text are two prompts.
    `source` names the row's task where rewards are chosen by task, else the data it comes from."""

    source: str
    epoch: int
    row: int

    def __str__(self) -> str:
        return f"{self.source}/{self.epoch}/{self.row}"

    @classmethod
    def parse(cls, text: str) -> PromptId:
        source, epoch, row = text.rsplit("/", 2)
        return cls(source, int(epoch), int(row))


class SampleId(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False, array_like=True):
    """Names one response to a prompt. `attempt` counts how often the prompt was launched before (0
    in its first round); `index` counts the responses of an attempt."""

    prompt: PromptId
    index: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.prompt}#{self.attempt}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        prompt, _, tail = text.rpartition("#")
        attempt, _, index = tail.partition(".")
        return cls(PromptId.parse(prompt), int(index), int(attempt))
