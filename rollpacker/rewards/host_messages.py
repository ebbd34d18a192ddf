"""The messages between a run and a reward host. Imports nothing heavy.

    down   SETUP RewardSetup     which rewards
           CALL Check            samples to judge; ANSWER Judged is the answer
    up     READY bool            whether nothing isolates programs there
           BEAT Status           every `beat_s`
           LOGGED LogLine        a line of its log

The kinds of messages are those of all processes (`workers/kinds.py`).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollpacker.codec import Codec, Kind, by_field
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.rewards.reward import Cause, Failed, Progress, RewardConfig, RewardInput, Scored
from rollpacker.sandbox.sandbox import SandboxConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSetup:
    """The rewards that a host is to make, and where to find the modules that they import."""

    rewards: tuple[RewardConfig, ...]
    sandbox: SandboxConfig
    beat_s: float
    log_level: int
    folder: str
    """The run's working folder. A host without such a folder works elsewhere."""
    paths: tuple[str, ...]
    """Folders in which the run's process finds modules (its `sys.path`)."""


@dataclass(frozen=True, slots=True)
class Check:
    """A request to judge samples. `timeout_s` limits each check of a sample by a reward, in
    seconds; None: only the rewards' own limits apply."""

    samples: tuple[RewardInput, ...]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a host's rewards: what `Reward.outage`, `broken` and `metrics` return."""

    outage: str | None = None
    broken: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    verdicts: tuple[Scored | Failed, ...]
    status: Status


class LogLine(NamedTuple):
    level: int
    logger: str
    text: str


@functools.cache
def codec() -> Codec:
    """The codec of these messages, used by both processes."""
    by_fields = [by_field(one) for one in (RewardSetup, RewardConfig, Scored, Failed, Judged)]
    by_hand = [Kind(Cause, str, Cause), Kind(Check, _check_to_plain, _check_from_plain)]
    return Codec([*by_fields, *by_hand, AdaptiveDeadlineConfig, SandboxConfig, Status, LogLine])


def _check_to_plain(check: Check) -> list[Any]:
    """Turn a check into plain values. A row is written once for all samples of its prompt."""
    rows: dict[tuple[int, ...], int] = {}
    sent: list[Any] = []
    samples: list[Any] = []
    for one in check.samples:
        key = (id(one.prompt), id(one.columns), id(one.messages), id(one.task))
        if key not in rows:
            rows[key] = len(sent)
            sent.append((one.prompt, one.columns, one.messages, one.task))
        tokens = array("i", one.completion_tokens).tobytes()
        progress = tuple(one.progress)
        samples.append((rows[key], one.completion, tokens, one.finish_reason, progress))
    return [check.timeout_s, sent, samples]


def _check_from_plain(plain: list[Any]) -> Check:
    timeout_s, rows, samples = plain
    found = []
    for row, completion, tokens, finish_reason, progress in samples:
        prompt, columns, messages, task = rows[row]
        numbers = array("i")
        numbers.frombytes(tokens)
        found.append(
            RewardInput(
                prompt=prompt,
                completion=completion,
                completion_tokens=tuple(numbers),
                finish_reason=finish_reason,
                columns=columns,
                task=task,
                messages=messages,
                progress=Progress(*progress),
            )
        )
    return Check(tuple(found), timeout_s)
