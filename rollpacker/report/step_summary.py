"""The numbers of a committed step that metrics, display and summary show."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollpacker.core.commands import RoundKind
from rollpacker.core.events import SampleScored
from rollpacker.report.carrying import CarryCounts, step_carrying
from rollpacker.report.checks import KindChecks, step_checks
from rollpacker.report.episodes import StepEpisodes
from rollpacker.report.step_history import End, SampleHistory, StepHistory
from rollpacker.report.time_book import POOL_CAUSES, ROLLOUT_CAUSES, STEP_CAUSES


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """Numbers of prompts in a step, by what became of them."""

    launched: int
    trained: int
    deferred: int
    dropped: Mapping[str, int]
    """Number of dropped prompts, by the reason for which they were dropped."""
    dropped_after: Mapping[str, str]
    """For each reason for dropping prompts whose samples failed too often, an example: why a sample
    of the first such prompt failed."""
    long_queue: int
    """Number of prompts that are put off to a later round when the step is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCounts:
    """Numbers of samples in a step, by what became of them."""

    launched: int
    generated: int
    trained: int
    aborted: int
    failed: int
    no_verdict: Mapping[str, int]
    """Number of finished samples without a verdict, by reason."""
    streamed: int
    """Number of samples whose gradients were begun before the round was over."""
    not_streamed: str
    """Why no gradients were computed before the round was over. Empty if some were, or if the
    setting for it is off."""
    peak_live: int
    """Largest number of the step's samples that were being generated at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Numbers of response tokens in a step."""

    generated: int
    """Tokens that the step's launches generated, those of aborted samples included, without tokens
    of earlier launches."""
    trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of the step's trained samples. A value is None if no trained sample has a reward."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_std_ratio: float | None
    """Share of the trained groups (samples of one prompt) whose rewards are all the same, so that
    nothing is learned from them."""
    parts: Mapping[str, float]
    """Mean value of each reward function by its name, over the samples that it judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Statistics of the lengths of some responses, in tokens."""

    num: int
    mean: float
    median: float
    max: int
    clip_ratio: float
    """Share of the responses that ended at the length limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of a step's responses, in tokens."""

    trained: LengthStats | None
    finished: LengthStats | None
    """Statistics of all completed responses, trained on or not. None: there were none."""
    bias: Mapping[str, float]
    """Metrics `length/...` and `debias/...`: how trained lengths differ from the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The numbers of one committed step. A ratio or a mean of no values is None."""

    step: int
    kind: RoundKind | None
    version: int
    """Version of the weights that generated the step's samples."""
    end_s: float
    seconds: Mapping[str, float]
    """Seconds by cause, which add up to the time since the step before was committed."""
    prompts: PromptCounts
    samples: SampleCounts
    tokens: TokenCounts
    rewards: Rewards
    lengths: Lengths
    carry: CarryCounts
    checks: Mapping[str, KindChecks]
    """Counts of checks by kind, which is the data source of the checked prompts."""
    episodes: StepEpisodes
    """Counts of episodes (conversations of samples with environments); empty if there are none."""
    marks: tuple[str, ...]
    """Warnings on how to read these numbers, such as "unsandboxed"."""
    trainer: Mapping[str, float]
    """Metrics of the optimizer step, by name."""
    logged: Mapping[str, float]
    """Numbers that callbacks logged, by name. After a resume also the counts of samples and tokens
    that it kept of an interrupted round."""

    @property
    def step_s(self) -> float:
        """The step's seconds, without evaluation, callbacks, startup and `waited_s`."""
        return sum(self.seconds[cause] for cause in STEP_CAUSES)

    @property
    def waited_s(self) -> float:
        """Seconds of waits for, and of switches to, pools of devices that other jobs use too."""
        return sum(self.seconds[cause] for cause in POOL_CAUSES)

    @property
    def rollout_s(self) -> float:
        return sum(self.seconds[cause] for cause in ROLLOUT_CAUSES)


def summarize_step(
    step: StepHistory, seconds: Mapping[str, float], length_bias: Mapping[str, float]
) -> StepSummary:
    """The summary of a committed step. `seconds` are the seconds by cause since the step before was
    committed, `length_bias` the metrics of `LengthBias`."""
    samples = list(step.samples.values())
    finished = [sample for sample in samples if sample.is_finished]
    stopped = [sample for sample in samples if sample.end is End.STOPPED]
    trained = step.trained_samples()
    prompts = {sample.prompt for round_ in step.rounds for sample in round_.samples}
    return StepSummary(
        step=step.step,
        kind=step.kind,
        version=step.version,
        end_s=step.end_s,
        seconds=seconds,
        prompts=PromptCounts(
            launched=len(prompts),
            trained=len(step.groups),
            deferred=len(step.prompts.deferred),
            dropped=dict(step.prompts.dropped),
            dropped_after=dict(step.prompts.dropped_after),
            long_queue=step.prompts.long_queue,
        ),
        samples=SampleCounts(
            launched=step.num_launched,
            generated=len(finished),
            trained=sum(map(len, step.groups)),
            aborted=len(stopped),
            failed=sum(sample.end is End.FAILED for sample in samples),
            no_verdict=_no_verdict(step, finished),
            streamed=step.num_streamed,
            not_streamed="" if step.train_on is None else step.train_on.not_streamed,
            peak_live=step.peak_live,
        ),
        tokens=TokenCounts(
            generated=sum(sample.num_generated for sample in samples),
            trained=sum(sample.num_tokens for sample in trained),
        ),
        rewards=_rewards(step),
        lengths=Lengths(
            trained=_length_stats(trained),
            finished=_length_stats(finished),
            bias=length_bias,
        ),
        carry=step_carrying(step),
        checks=step_checks(step.checks),
        episodes=step.episodes,
        marks=() if step.session is None else step.session.marks,
        trainer=step.trainer,
        logged=_logged(step),
    )


def _logged(step: StepHistory) -> dict[str, float]:
    logged: dict[str, float] = {}
    for note in step.notes:
        for name, value in note.metrics.items():
            if note.name == "callbacks":
                logged[name] = value
            elif note.name == "salvaged":
                logged[name] = logged.get(name, 0.0) + value
    return logged


def _rewards(step: StepHistory) -> Rewards:
    groups, verdicts = [], []
    for group in step.groups:
        known = [step.samples[sample].verdict for sample in group if sample in step.samples]
        judged = [verdict.event for verdict in known if verdict is not None]
        verdicts += judged
        groups.append([event.value for event in judged if event.value is not None])
    groups = [group for group in groups if group]
    flat = [value for group in groups for value in group]
    return Rewards(
        mean=statistics.fmean(flat) if flat else None,
        std=_std(flat) if flat else None,
        min=min(flat, default=None),
        max=max(flat, default=None),
        zero_std_ratio=_zero_std_ratio(groups),
        parts=_part_means(verdicts),
    )


def _no_verdict(step: StepHistory, finished: Sequence[SampleHistory]) -> dict[str, int]:
    """Number of finished samples without a verdict, by reason. Samples of prompts put off to a
    later round are left out, since it is chance whether their verdicts come in this round."""
    reasons: Counter[str] = Counter()
    for sample in finished:
        if sample.verdict is None or sample.sample.prompt in step.prompts.deferred:
            continue
        event = sample.verdict.event
        if event.value is None and event.cause != "cancelled":
            reasons[event.reason or "no reason given"] += 1
    return dict(sorted(reasons.items()))


def _std(values: Sequence[float]) -> float:
    """Standard deviation of a population; `statistics.pstdev` is a hundred times slower."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _zero_std_ratio(groups: Sequence[Sequence[float]]) -> float | None:
    if not groups:
        return None
    return sum(min(group) == max(group) for group in groups) / len(groups)


def _part_means(verdicts: Sequence[SampleScored]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)}


def _length_stats(samples: Sequence[SampleHistory]) -> LengthStats | None:
    if not samples:
        return None
    lengths = [sample.num_tokens for sample in samples]
    return LengthStats(
        num=len(lengths),
        mean=statistics.fmean(lengths),
        median=statistics.median(lengths),
        max=max(lengths),
        clip_ratio=sum(sample.end is End.AT_LIMIT for sample in samples) / len(samples),
    )
