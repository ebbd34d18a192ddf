"""Results of a plan: long-run step times, comparisons of settings, and reasons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.plan_ideas import Base, Candidate, Idea
from rollpacker.sim.result import StepResult, SystemResult

MIN_GAIN = 0.005
"""Share of a step's time that an idea must save to be part of a plan's best setting."""
PAYS_GAIN = 0.02
"""Share of a step's time that tail batching must save to be called worth having."""
NOISE_ERRORS = 3.0
"""Number of standard errors that a gain must exceed to count as more than noise."""


def round_shares(tail: TailBatchingConfig, prompts_per_step: int) -> dict[str, float] | None:
    """Mapping from each kind of round (one batch of generation) to its share of all rounds in the
    long run; None if the settings `tail` let a short round's number of prompts change in a run.
    Short rounds put off a known number of prompts, which make up the later rounds."""
    if not tail.enabled:
        return {"plain": 1.0}
    if tail.chooses:
        return None
    if tail.pooled:
        return {"short": 1.0}
    launched = tail.factors.num_prompts(prompts_per_step)
    counts = {"short": 1.0, "cascade": 0.0}
    deferred = float(launched - prompts_per_step)
    for tier in tail.tiers:
        launched = tier.factors.num_prompts(prompts_per_step)
        races = deferred / launched
        counts["cascade"] += races
        deferred = races * (launched - prompts_per_step)
    counts["long"] = deferred / prompts_per_step
    total = sum(counts.values())
    return {kind: count / total for kind, count in counts.items() if count > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What is measured in one simulation, to compare its settings with others."""

    cost_s: float
    """Seconds of a step as a long-run mean, or, on pools shared by jobs, seconds of holding all
    nodes at the cost of the step (`PoolPrices.busy_s`). Settings are compared by this number."""
    step_s: float
    """Seconds of a step, as a long-run mean over steps."""
    shift: float
    """Length shift: mean length of trained responses divided by that of the policy's own responses,
    minus 1, as a long-run mean."""
    kinds_s: Mapping[str, float]
    """Mapping from a kind of round to the mean seconds, as in `cost_s`, of steps of this kind."""
    tokens: float
    """Number of response tokens that a step trains on, as a long-run mean."""


def total_s(step: StepResult) -> float:
    """Seconds of a whole step, waits included."""
    return step.total_s


def measure(
    result: SystemResult,
    shares: Mapping[str, float] | None,
    *,
    num_warm: int = 0,
    paired: bool = False,
    cost_s: Callable[[StepResult], float] = total_s,
) -> Measure:
    """Returns a simulation's means over steps. `shares` gives each kind of round its weight; plain
    means are taken if it is None or lists other kinds than occurred. `cost_s` returns a step's
    seconds by which settings are compared.

    `paired`: the first `num_warm` steps do not count, and trained lengths are compared with the
    mean of all responses to the same prompts, instead of the policy's mean.
    """
    by_kind: dict[str, list[StepResult]] = {}
    for step in result.steps[num_warm if paired else 0 :]:
        by_kind.setdefault(step.kind, []).append(step)
    num_steps = sum(map(len, by_kind.values()))
    shift = result.paired_shift if paired else result.length_shift
    if shares is None or shares.keys() != by_kind.keys():
        shares = {kind: len(steps) / num_steps for kind, steps in by_kind.items()}
    elif not paired:
        shift = _trained_length(by_kind, shares) / result.policy_length_mean - 1

    def long_run(value: Callable[[StepResult], float]) -> float:
        return sum(
            share * statistics.fmean(map(value, by_kind[kind])) for kind, share in shares.items()
        )

    return Measure(
        cost_s=long_run(cost_s),
        step_s=long_run(total_s),
        shift=shift,
        kinds_s={kind: statistics.fmean(map(cost_s, steps)) for kind, steps in by_kind.items()},
        tokens=long_run(lambda step: step.tokens_trained),
    )


def _trained_length(
    by_kind: Mapping[str, Sequence[StepResult]], shares: Mapping[str, float]
) -> float:
    """Mean tokens of a trained response, weighting the steps of each kind of round by its share."""
    return sum(
        share
        * sum(step.tokens_trained for step in by_kind[kind])
        / sum(step.num_trained for step in by_kind[kind])
        for kind, share in shares.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Measure):
    """A candidate, simulated on several seeds and compared with the current settings on the same
    seeds. The fields of `Measure` are means over the seeds."""

    candidate: Candidate
    saved_s: float
    """Seconds by which the current settings' `cost_s` is larger than this candidate's."""
    saved_error_s: float
    """Standard error of `saved_s` over the seeds, in seconds; nan with one seed."""
    shift_error: float
    """Standard error of the difference between this `shift` and that of the current settings, over
    the seeds; 0 with one seed."""

    @property
    def tokens_per_s(self) -> float:
        """Response tokens trained on per second of `cost_s`; nan if that is 0."""
        return self.tokens / self.cost_s if self.cost_s else math.nan

    @property
    def is_clear(self) -> bool:
        """Whether this setting saves more than the share `MIN_GAIN`, and more than noise may."""
        return self.saved_s > max(NOISE_ERRORS * self.saved_error_s, MIN_GAIN * self.cost_s)


def finding(
    candidate: Candidate, measures: Sequence[Measure], against: Sequence[Measure]
) -> Finding:
    """Compares a candidate's `measures` with `against`, the current settings', seed by seed."""
    saved = [other.cost_s - own.cost_s for own, other in zip(measures, against, strict=True)]
    shifted = [other.shift - own.shift for own, other in zip(measures, against, strict=True)]
    is_known = len(saved) > 1
    kinds = {kind for m in measures for kind in m.kinds_s}
    return Finding(
        candidate=candidate,
        cost_s=statistics.fmean(m.cost_s for m in measures),
        step_s=statistics.fmean(m.step_s for m in measures),
        saved_s=statistics.fmean(saved),
        saved_error_s=_standard_error(saved) if is_known else math.nan,
        shift=statistics.fmean(m.shift for m in measures),
        shift_error=_standard_error(shifted) if is_known else 0.0,
        kinds_s={
            kind: statistics.fmean(m.kinds_s[kind] for m in measures if kind in m.kinds_s)
            for kind in sorted(kinds)
        },
        tokens=statistics.fmean(m.tokens for m in measures),
    )


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def choose(
    now: Finding, kept: Sequence[Finding], *, current_keeps: bool, trust: float | None
) -> tuple[Finding, Finding | None]:
    """Returns two findings (results of settings). The first is the setting to use: the best of
    `kept` (fastest first, all with allowed lengths), or `now`, the current one, if `current_keeps`
    allowed lengths and none is clearly faster. The second is the fastest of `kept` that is refused
    because it gains no more trained tokens per second than the share `trust`, or None."""
    if not kept or not current_keeps:
        return (kept[0] if kept else now), None
    if trust is None:
        return (kept[0] if kept[0].is_clear else now), None
    clear = [found for found in kept if found.is_clear]
    least = (1 + trust) * now.tokens_per_s
    best = next((found for found in clear if found.tokens_per_s > least), now)
    return best, clear[0] if clear and best is now else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bound on how far the mean length of trained responses may be from the policy's own."""

    most: float | None
    """Share by which trained responses may be shorter than the policy's own; None: any share."""
    both_ways: bool
    """Whether `most` also bounds by how much trained responses may be longer."""

    def keeps(self, shift: float, error: float = 0.0, slack: float = 0.0) -> bool:
        """Whether a length shift (as `Measure.shift`) lies within the bound after `error`, its
        standard error, is subtracted, or outside by at most `slack`."""
        if self.most is None:
            return True
        if self.both_ways and shift - error > self.most + slack:
            return False
        return shift - error >= -self.most - slack


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What one idea contributes to a plan's best setting."""

    idea: Idea
    left_out_s: float
    """Seconds per step that are lost if the best setting is used without this idea."""
    left_out_error_s: float
    """Standard error of `left_out_s`, in seconds."""
    left_out_shift: float
    """Length shift (as `Measure.shift`) of the best setting without this idea."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The outcome of a search for better settings."""

    base: Base
    """The system that settings were searched for."""
    current: Finding
    best: Finding
    """The setting to use: `current` unless another one with allowed lengths is clearly faster."""
    ranked: tuple[Finding, ...]
    """The finalists whose trained lengths are near enough to the policy's own, fastest first."""
    too_short: tuple[Finding, ...]
    """The finalists whose trained lengths are farther from the policy's own than is allowed."""
    reasons: tuple[Reason, ...]
    """What each idea of the best setting contributes to it."""
    rejected: tuple[tuple[Idea, float], ...]
    """Ideas that the best setting lacks, with the share of a step's time that each alone saves."""
    oracle: Finding | None
    """Result of the oracle, a scheduler that knows all lengths beforehand; None: not simulated."""
    max_shift: float | None
    """Share by which trained responses may be shorter than the policy's own, or longer too if
    settings only change the order of training. None: any; `tail_batching.debias` undoes it."""
    untailed: Finding | None = None
    """Result of the best setting with tail batching turned off; None: not simulated."""
    refused: Finding | None = None
    """A setting with a clearly shorter step that was refused, because its trained tokens per second
    gain no more than the share `Base.trust`. None: there was none."""
    num_seeds: int
    num_steps: int
    """Number of steps that each final simulation had."""
    num_simulated: int
    """Number of steps that all simulations had together."""

    @property
    def has_tail_batching(self) -> bool:
        """Whether the best setting uses tail batching."""
        return self.base.tail_of(self.best.candidate).enabled

    @property
    def pays(self) -> bool:
        """Whether the best setting uses tail batching, and this saves more than the share
        `PAYS_GAIN` of a step's time (any saving will do if `untailed` is None)."""
        best, without = self.best, self.untailed
        if without is None or not self.has_tail_batching:
            return self.has_tail_batching
        return without.cost_s - best.cost_s > PAYS_GAIN * without.cost_s

    @property
    def stays(self) -> bool:
        return self.best.candidate == self.current.candidate

    @property
    def current_keeps(self) -> bool:
        """Whether trained lengths are near enough to the policy's own with the current settings, as
        measured or else as simulated."""
        bound = Bound(most=self.max_shift, both_ways=self.base.order_only)
        measured = self.base.measured_shift
        return bound.keeps(self.current.shift if measured is None else measured)

    @property
    def given_up(self) -> str | None:
        """A sentence on what the best setting loses by turning off `tail_batching.complement` (it
        keeps lengths of continued responses unbiased). None: it does not turn that off."""
        if self.best.candidate.changes.get("tail_batching.complement") is not False:
            return None
        return (
            "tail_batching.complement=false gives up what the default promises, the lengths of the "
            "policy: a response that was cut off may end before that place under newer weights, "
            "so that training gets shorter responses the more the policy moves."
        )

    def to_plain(self) -> dict[str, Any]:
        """The plan as plain values, as `rollpacker plan --json` prints it."""
        prices = self.base.prices
        return {
            "current": self._plain(self.current),
            "best": self._plain(self.best),
            **({} if prices is None else {"shared_pools": prices.to_plain()}),
            "stays": self.stays,
            "gives_up": self.given_up,
            "tail_batching_pays": self.pays,
            "mismatch": self.base.mismatch,
            "ranked": [self._plain(finding) for finding in self.ranked],
            "beyond_bound": [self._plain(finding) for finding in self.too_short],
            "oracle": None if self.oracle is None else self._plain(self.oracle),
            "reasons": [
                {
                    "name": reason.idea.name,
                    "changes": dict(reason.idea.changes),
                    "left_out_s": reason.left_out_s,
                    "left_out_error_s": _finite(reason.left_out_error_s),
                    "left_out_shift": reason.left_out_shift,
                }
                for reason in self.reasons
            ],
            "rejected": [
                {"name": idea.name, "saved_share_alone": saved} for idea, saved in self.rejected
            ],
            "max_shift": self.max_shift,
            "seeds": self.num_seeds,
            "steps": self.num_steps,
            "simulated_steps": self.num_simulated,
        }

    def _plain(self, finding: Finding) -> dict[str, Any]:
        shared: dict[str, float] = {}
        prices = self.base.prices
        if prices is not None:
            shared = {
                "busy_s": finding.cost_s,
                "price_per_1k_prompts": prices.price_of_1k_prompts(finding.cost_s),
            }
        return {
            "name": finding.candidate.name,
            "changes": finding.candidate.changes,
            "step_s": finding.step_s,
            **shared,
            "saved_s": finding.saved_s,
            "saved_error_s": _finite(finding.saved_error_s),
            "trained_tokens_per_s": _finite(finding.tokens_per_s),
            "length_shift": finding.shift,
            "rounds_s": dict(finding.kinds_s),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
