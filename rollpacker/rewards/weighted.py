"""All rewards of a run together: which rewards judge a sample, and the weighted sum of their
values.

A row is judged by the rewards that name its task and by those that name no tasks. Its value is the
sum of weight x value over those that apply: a reward that returns None does not. If one of them has
no verdict, the sample has none.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.environments.environment import Episode
from rollpacker.rewards.functions.function_reward import RewardFunction
from rollpacker.rewards.functions.returned import MAX_REWARD, shortened
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    RewardConfig,
    RewardError,
    RewardInput,
    RewardPart,
    Scored,
)
from rollpacker.rewards.shared import Shared

logger = logging.getLogger(__name__)

Kind = tuple[int | None, AdaptiveDeadlineConfig | None]
"""How the samples of a task are checked: most checks at a time (None: batches of any size), and the
adaptive time limit of each check (None: the reward's own limit)."""
Verdict = Scored | Failed | None

_AT_MOST_ONE = ("math", "code", "judge", "reasoning_gym")
"""Built-in rewards whose value is at most 1."""

_BY_INFRASTRUCTURE = (Cause.INFRASTRUCTURE, Cause.DEADLINE, Cause.SAMPLE)


@dataclass(frozen=True, slots=True)
class Weighted:
    """One reward of the run, with its entry in the config."""

    part: RewardPart
    config: RewardConfig

    def applies_to(self, task: str | None) -> bool:
        return self.config.tasks is None or task in self.config.tasks

    @property
    def workers(self) -> int | None:
        if self.config.workers != "auto":
            return self.config.workers
        return getattr(self.part, "WORKERS", None)

    @property
    def deadline(self) -> AdaptiveDeadlineConfig | None:
        return self.config.deadline or getattr(self.part, "DEADLINE", None)

    def limit_s(self, timeout_s: float | None) -> float | None:
        """Return the limit to pass to this reward's checks, in seconds: the smaller of `timeout_s`
        and its deadline's `max_s`. None if one is missing: the reward uses its own limit."""
        deadline = self.deadline
        if timeout_s is None or deadline is None:
            return None
        return min(timeout_s, deadline.max_s)


class WeightedReward:
    """The weighted sum of several rewards. Meets the protocol `Reward`."""

    def __init__(self, parts: Sequence[Weighted], shared: Shared) -> None:
        self.names = tuple(one.part.name for one in parts)
        self.shared = shared
        self._parts = tuple(parts)
        tasks = (task for one in parts for task in one.config.tasks or ())
        self._tasks = tuple(dict.fromkeys(tasks))
        self._judges_all = any(one.config.tasks is None for one in parts)

    # -- before the run ---------------------------------------------------------------------

    def check(self, rows: Iterable[tuple[str | None, Mapping[str, Any]]]) -> None:
        """Raise `RewardError` if these rows, pairs of task (None: no task) and columns, cannot be
        judged. Must be called outside of any event loop."""
        rows = list(rows)
        for number, (task, _) in enumerate(rows):
            if not self._is_judged(task):
                raise RewardError(f"row {number}: {self._unnamed(task)}")
        self._look_for_typos({task for task, _ in rows if task is not None})
        for one in self._parts:
            judged = [columns for task, columns in rows if one.applies_to(task)]
            if rows and not judged:
                self._tell_idle(one, len(rows), {task for task, _ in rows})
            one.part.check(judged)

    def _is_judged(self, task: str | None) -> bool:
        return self._judges_all or task in self._tasks

    def _unnamed(self, task: str | None) -> str:
        named = ", ".join(self._tasks)
        if task is None:
            return f"there is no task, and every reward names its tasks ({named}); set task_column."
        close = difflib.get_close_matches(task, self._tasks, n=1, cutoff=0.6)
        hint = f'; did you mean "{close[0]}"?' if close else f"; they name {named}."
        return f"task {task!r} is named by no reward{hint}"

    def _look_for_typos(self, tasks: set[str]) -> None:
        """Warn if a reward names a task that no row has, and that looks like a misspelt one of
        `tasks`, those of the rows. Other tasks without rows may be in data that comes later."""
        for one in self._parts:
            for named in set(one.config.tasks or ()) - tasks:
                close = difflib.get_close_matches(named, tasks - set(self._tasks), n=1, cutoff=0.75)
                if close:
                    logger.warning(
                        "reward %s names the task %s, which no row has; did you mean %s?",
                        one.part.name,
                        named,
                        close[0],
                    )

    def _tell_idle(self, one: Weighted, num_rows: int, tasks: set[str | None]) -> None:
        """Warn that a reward judges none of the rows. That need not be a mistake: the rows of an
        evaluation may have fewer tasks."""
        there = sorted("none" if task is None else repr(task) for task in tasks)
        more = f" and {len(there) - 5} more" if len(there) > 5 else ""
        logger.warning(
            "reward %s judges none of these %d rows: it names the tasks %s, the rows have %s%s",
            one.part.name,
            num_rows,
            ", ".join(map(repr, one.config.tasks or ())),
            ", ".join(there[:5]),
            more,
        )

    def try_out(self, rows: Sequence[RewardInput]) -> list[str]:
        """Let each reward function judge made-up completions of the first row that it applies to.
        Returns warnings for the user. Raises `RewardError` if a function could judge none."""
        firsts = [
            (one.part, next((r for r in rows if one.applies_to(r.task)), None))
            for one in self._parts
        ]
        trials = [
            (part.try_out, row)
            for part, row in firsts
            if row is not None and isinstance(part, RewardFunction)
        ]
        if not trials:
            return []

        async def try_all() -> list[str | None]:
            return await asyncio.gather(*(try_out(row) for try_out, row in trials))

        return [warning for warning in self.shared.run(try_all) if warning is not None]

    def largest(self) -> float | None:
        """The largest value that a sample can get. None: it is not bounded, since a function or a
        reward model may return any number."""
        if any(one.config.function not in _AT_MOST_ONE for one in self._parts):
            return None
        tasks = (*self._tasks, None)
        sums = (
            sum(max(one.config.weight, 0.0) for one in self._parts if one.applies_to(task))
            for task in tasks
        )
        return max(sums)

    def sources(self) -> dict[str, str]:
        """Paths of the files that define the user's own reward functions, by the reward's name."""
        parts = (one.part for one in self._parts)
        return {p.name: p.source for p in parts if isinstance(p, RewardFunction) and p.source}

    def kinds(self) -> dict[str | None, Kind]:
        """The most checks at a time and the adaptive deadline for each task's samples, from all
        rewards that apply to the task. Key None: tasks that no reward names."""
        tasks = (*self._tasks, *((None,) if self._judges_all else ()))
        return {task: self._kind([p for p in self._parts if p.applies_to(task)]) for task in tasks}

    def _kind(self, parts: Sequence[Weighted]) -> Kind:
        bounds = [one.workers for one in parts if one.workers is not None]
        deadlines = [one.deadline for one in parts if one.deadline is not None]
        longest = max(deadlines, key=lambda deadline: deadline.max_s, default=None)
        return min(bounds, default=None), longest

    # -- in the run -------------------------------------------------------------------------

    async def open(self) -> None:
        await asyncio.gather(*(one.part.open() for one in self._parts))

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed]:
        """Judge a batch. Returns one verdict per sample, in the same order."""
        if not samples:
            return []
        if len(self._parts) == 1:  # saves a task for each call
            by_part = [await self._verdicts_of(self._parts[0], samples, timeout_s)]
        else:
            calls = (self._verdicts_of(one, samples, timeout_s) for one in self._parts)
            by_part = await asyncio.gather(*calls)
        return [
            self._combined(sample, verdicts)
            for sample, verdicts in zip(samples, zip(*by_part, strict=True), strict=True)
        ]

    async def _verdicts_of(
        self, one: Weighted, samples: Sequence[RewardInput], timeout_s: float | None
    ) -> list[Verdict]:
        """The verdicts of one reward, one per sample; None for samples that it does not judge."""
        chosen = [sample for sample in samples if one.applies_to(sample.task)]
        if not chosen:
            return [None] * len(samples)
        try:
            verdicts = await one.part.score(chosen, timeout_s=one.limit_s(timeout_s))
            assert len(verdicts) == len(chosen), "one verdict each"
        except Exception as error:  # a reward's own mistake must not end the run
            logger.exception("reward %s failed", one.part.name)
            why = f"{one.part.name} failed: {type(error).__name__}: {shortened(str(error))}"
            verdicts = [Failed(reason=why)] * len(chosen)
        following = iter(verdicts)
        return [next(following) if one.applies_to(s.task) else None for s in samples]

    def _combined(self, sample: RewardInput, verdicts: Sequence[Verdict]) -> Scored | Failed:
        if not self._is_judged(sample.task):
            return Failed(reason=self._unnamed(sample.task), parts=dict.fromkeys(self.names))
        parts = {
            name: verdict.value if isinstance(verdict, Scored) else None
            for name, verdict in zip(self.names, verdicts, strict=True)
        }
        seconds = max((v.seconds for v in verdicts if v and v.seconds is not None), default=None)
        failures = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
        if failures:
            causes = {failure.cause for failure in failures}
            return Failed(
                reason="; ".join(failure.reason for failure in failures),
                parts=parts,
                cause=next(cause for cause in _BY_INFRASTRUCTURE if cause in causes),
                seconds=seconds,
            )
        return self._sum(sample, verdicts, parts, seconds)

    def _sum(
        self,
        sample: RewardInput,
        verdicts: Sequence[Verdict],
        parts: Mapping[str, float | None],
        seconds: float | None,
    ) -> Scored | Failed:
        scored = [verdict for verdict in verdicts if isinstance(verdict, Scored)]
        if not scored:
            asked = [one.part.name for one in self._parts if one.applies_to(sample.task)]
            return Failed(reason=f"no verdict: {', '.join(asked)} returned None", parts=parts)
        value = math.fsum(
            one.config.weight * verdict.value
            for one, verdict in zip(self._parts, verdicts, strict=True)
            if isinstance(verdict, Scored)
        )
        if not abs(value) <= MAX_REWARD:
            why = f"the weighted sum is larger than {MAX_REWARD:g}"
            return Failed(reason=why, parts=parts, seconds=seconds)
        # An answer that one with a deadline found wrong without a check is wrong all the same.
        timed = [
            verdict
            for one, verdict in zip(self._parts, verdicts, strict=True)
            if isinstance(verdict, Scored)
            and (verdict.seconds is not None or one.deadline is not None)
        ]
        return Scored(
            value=value,
            parts=parts,
            turns=() if sample.episode is None else self._turns(sample.episode, verdicts, value),
            seconds=seconds,
            correct=all(_is_correct(verdict) for verdict in timed) if timed else None,
            timed_out=any(verdict.timed_out for verdict in scored),
            metrics=_all(verdict.metrics for verdict in scored),
            extras=_all(verdict.extras for verdict in scored),
        )

    def _turns(
        self, episode: Episode, verdicts: Sequence[Verdict], value: float
    ) -> tuple[float, ...]:
        """The reward of each turn of an episode: what rewards gave to the turn, weighted. What they
        gave to the trajectory as a whole is added to the last turn. The sum is `value`."""
        count = len(episode.num_drawn)
        if count <= 1:
            return (value,) * count
        earned: list[list[float]] = [[] for _ in range(count)]
        for one, verdict in zip(self._parts, verdicts, strict=True):
            if isinstance(verdict, Scored):
                for terms, turn in zip(earned, verdict.turns, strict=False):
                    terms.append(one.config.weight * turn)
                if not verdict.turns:
                    earned[-1].append(one.config.weight * verdict.value)
        return tuple(map(math.fsum, earned))

    def outage(self) -> str | None:
        """Describe the outages of services that the rewards wait for. None: there are none."""
        outages = [outage for one in self._parts if (outage := one.part.outage())]
        return "; ".join(outages) or None

    def broken(self) -> str | None:
        """The reason why rewards give no verdicts any more, in words. None: they still do."""
        parts = (one.part for one in self._parts if isinstance(one.part, RewardFunction))
        return next((why for part in parts if (why := part.broken())), None)

    def metrics(self) -> dict[str, float]:
        """Counts since the start of the run (such as of retries), by names `REWARD/COUNT`."""
        return {
            f"{one.part.name}/{name}": value
            for one in self._parts
            if (metrics := getattr(one.part, "metrics", None)) is not None
            for name, value in metrics().items()
        }

    async def close(self) -> None:
        """End all workers and the sandbox. An error of one is raised when all have ended."""
        closing = (one.part.close() for one in self._parts)
        results = await asyncio.gather(*closing, return_exceptions=True)
        await self.shared.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _all(logged: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for one in logged for name, value in one.items()}


def _is_correct(verdict: Scored) -> bool:
    return verdict.value > 0 if verdict.correct is None else verdict.correct
