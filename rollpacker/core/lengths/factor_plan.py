"""Choosing the factors of tail batching for the workload at hand (`prompt_factor: auto`).

Larger factors end short rounds earlier and make long rounds more frequent, cost tokens that are
thrown away, and shorten what is trained on. What is best depends on how long the tail is, on how
much of it is the prompt's doing, and on what a token costs; a run shows all three.

    seconds of a round = per_step_s * longest response + per_token_s * tokens generated

is fitted to the rounds so far; lengths come from a fitted `LengthModel`. On a common token clock
(all samples of a round are at the same position, so the shorter response finishes first) a race is
a matter of order statistics: what a round takes on average is computed, not drawn, and the
comparison of two pairs of factors has no noise. Deferred prompts keep their class and fill the long
rounds. Left out: rewards (the race is on generated), cascades, the smaller rounds at the end of an
epoch, and that training costs less when responses are shorter.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollpacker.core.commands import RoundKind
from rollpacker.core.lengths.bins import FloatArray
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.plain import from_plain, to_plain
from rollpacker.core.tail_batching import times

GRID = (1.0, 1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5)
"""Candidates for either factor."""
MIN_GAIN = 0.02
"""A change must save this share of the step."""
SLACK = 0.01
"""Of pairs that are within this share of the fastest, the one with the least length shift wins."""
MAX_ROUNDS = 64
"""Rounds, and fixed parts of steps, remembered."""
MIN_ROUNDS = 2
PRIOR_ROUNDS = 1e-3
"""Weight, in rounds, of the assumption that steps and tokens cost half of a round each: it decides
when the rounds so far cannot tell the two apart."""
POINTS_PER_BIN = 4
"""At which the distribution of the end of a round is evaluated."""
NUM_SDS = 8.0
"""So far from its mean, a binomial count is on the one side for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What a step costs."""

    per_step_s: float
    """Seconds of one decoding step, whatever runs."""
    per_token_s: float
    """Seconds that every generated token adds."""
    fixed_s: float = 0.0
    """Seconds of the rest of the step: training, weight sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A pair of factors and what it is predicted to do."""

    prompt_factor: float
    sample_factor: float
    step_s: float
    """Mean seconds of a step, short and long ones together."""
    step_sd_s: float
    """Standard deviation of a step about the mean of its kind, as far as the longest response makes
    it. See `standard_error_s`."""
    baseline_step_s: float
    """The same with both factors 1."""
    length_shift: float
    """Mean trained length over the policy's own, minus 1."""

    @property
    def factors(self) -> tuple[float, float]:
        return (self.prompt_factor, self.sample_factor)

    @property
    def gain(self) -> float:
        """Share of the baseline's step that is saved."""
        return 1.0 - self.step_s / self.baseline_step_s

    def standard_error_s(self, num_steps: int) -> float:
        """How far the mean of so many measured steps may be from `step_s` by chance alone. It does
        not cover errors of the fitted lengths and times."""
        return self.step_sd_s / math.sqrt(num_steps)


class FactorPlanner:
    """Tell it of every round and step; ask `choose` now and then."""

    def __init__(
        self,
        prompts_per_step: int,
        samples_per_prompt: int,
        *,
        max_length_shift: float | None = 0.35,
        debiased: bool = False,
        grid: Sequence[float] = GRID,
    ) -> None:
        """`max_length_shift`: the trained mean may be at most this share below the policy's own;
        None, or `debiased` (loss weights undo the shift): no bound."""
        self.prompts_per_step = prompts_per_step
        self.samples_per_prompt = samples_per_prompt
        self.max_length_shift = None if debiased else max_length_shift
        self.grid = tuple(grid)
        self.current: tuple[float, float] | None = None
        """The factors chosen last."""
        self._rounds: dict[str, deque[tuple[int, int, float]]] = {}
        """By kind: tokens of the longest response, all tokens, seconds. Rare kinds are not crowded
        out."""
        self._fixed: deque[float] = deque(maxlen=MAX_ROUNDS)

    def observe_round(
        self, kind: RoundKind, *, longest_tokens: int, tokens: int, seconds: float
    ) -> None:
        """A round's rollout took `seconds`: its longest response (finished or stopped) came to
        `longest_tokens`, all of them together to `tokens`, thrown away ones too."""
        assert longest_tokens >= 0 and tokens >= 0 and math.isfinite(seconds)
        if longest_tokens and seconds > 0:
            history = self._rounds.setdefault(kind.value, deque(maxlen=MAX_ROUNDS))
            history.append((longest_tokens, tokens, seconds))

    def observe_fixed(self, seconds: float) -> None:
        """A step's rest, after the rollout, took so long."""
        assert math.isfinite(seconds) and seconds >= 0
        self._fixed.append(seconds)

    @property
    def ready(self) -> bool:
        """Enough rounds were observed to choose."""
        return sum(map(len, self._rounds.values())) >= MIN_ROUNDS

    def step_time(self) -> StepTime:
        """Fitted to what was observed. Raises `ValueError` before anything was."""
        rounds = list(itertools.chain.from_iterable(self._rounds.values()))
        per_step_s, per_token_s = fit_round_time(rounds)
        fixed_s = sum(self._fixed) / len(self._fixed) if self._fixed else 0.0
        return StepTime(per_step_s=per_step_s, per_token_s=per_token_s, fixed_s=fixed_s)

    def choose(self, model: LengthModel) -> Choice:
        """The factors to use from now on. They change only for a gain of `MIN_GAIN`, or if the
        present ones break the bound on the length shift."""
        now = () if self.current is None else (self.current,)
        choices = predict(
            model,
            self.step_time(),
            prompts_per_step=self.prompts_per_step,
            samples_per_prompt=self.samples_per_prompt,
            pairs=(*now, *itertools.product(self.grid, self.grid)),
        )
        best = fastest(choices, max_length_shift=self.max_length_shift)
        for choice in choices:
            if choice.factors == self.current and _allowed(choice, self.max_length_shift):
                if best.step_s > (1.0 - MIN_GAIN) * choice.step_s:
                    best = choice
                break
        self.current = best.factors
        return best

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return to_plain(_Saved(current=self.current, rounds=self._rounds, fixed=self._fixed))

    def restore(self, state: Mapping[str, Any]) -> None:
        """As it was when `state` was taken."""
        saved = from_plain(_Saved, state)
        self.current = saved.current
        self._rounds = {kind: deque(of, maxlen=MAX_ROUNDS) for kind, of in saved.rounds.items()}
        self._fixed = deque(saved.fixed, maxlen=MAX_ROUNDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A planner in a checkpoint."""

    current: tuple[float, float] | None
    rounds: dict[str, deque[tuple[int, int, float]]]
    fixed: deque[float]


def fastest(choices: Sequence[Choice], *, max_length_shift: float | None = None) -> Choice:
    """The best of those within the bound: of those that are about as fast as the fastest, the one
    that shifts the lengths least; then the smallest factors. Raises `ValueError` if none is."""
    allowed = [choice for choice in choices if _allowed(choice, max_length_shift)]
    if not allowed:
        raise ValueError(f"no pair of factors keeps the length shift within {max_length_shift}")
    limit = (1.0 + SLACK) * min(choice.step_s for choice in allowed)
    close = [choice for choice in allowed if choice.step_s <= limit]
    return min(close, key=lambda choice: (-choice.length_shift, choice.factors))


def _allowed(choice: Choice, max_length_shift: float | None) -> bool:
    return max_length_shift is None or choice.length_shift >= -max_length_shift


def fit_round_time(rounds: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """(per_step_s, per_token_s), neither negative, from (longest response, all tokens, seconds) of
    rounds: least squares of the relative errors. Raises `ValueError` without any round."""
    if not rounds:
        raise ValueError("no round to fit the time of decoding to")
    data = np.array(rounds, dtype=np.float64)
    scale = data[:, :2].mean(axis=0) / data[:, 2].mean()
    scale = np.where(scale > 0, scale, 1.0)
    # In these units both unknowns are shares of a mean round.
    rows = data[:, :2] / data[:, 2:] / scale
    normal = rows.T @ rows + PRIOR_ROUNDS * np.eye(2)
    right = rows.sum(axis=0) + PRIOR_ROUNDS * 0.5
    shares = np.linalg.solve(normal, right)
    if shares.min() < 0:
        keep = int(shares.argmax())
        shares = np.zeros(2)
        shares[keep] = right[keep] / normal[keep, keep]
    per_step_s, per_token_s = shares / scale
    return float(per_step_s), float(per_token_s)


# -- the prediction ------------------------------------------------------------------


def predict(
    model: LengthModel,
    time: StepTime,
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    pairs: Sequence[tuple[float, float]] = tuple(itertools.product(GRID, GRID)),
) -> list[Choice]:
    """What each (prompt_factor, sample_factor) would do, in the order of `pairs`. A pair that
    launches the same numbers as one before it is left out.

    Raises `ValueError` for a factor below 1.
    """
    if min(itertools.chain.from_iterable(pairs)) < 1:
        raise ValueError("a factor cannot be less than 1")
    launched: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in pairs:
        counts = (times(pair[0], prompts_per_step), times(pair[1], samples_per_prompt))
        launched.setdefault(counts, pair)
    law = _Law(model, prompts_per_step, samples_per_prompt)
    races = {num_samples: _Race.of(law, num_samples) for _, num_samples in launched}
    races.setdefault(samples_per_prompt, _Race.of(law, samples_per_prompt))
    whole = _mean_round(law, races[samples_per_prompt], law.class_weights, prompts_per_step)
    baseline_s = whole.seconds(time) + time.fixed_s
    choices = []
    for (num_prompts, num_samples), pair in launched.items():
        short = _mean_round(law, races[num_samples], law.class_weights, num_prompts)
        long_share = (num_prompts - prompts_per_step) / num_prompts
        long = whole  # counts for nothing if nothing is deferred
        if long_share:
            long = _mean_round(law, races[samples_per_prompt], short.deferred, prompts_per_step)
        shares = np.array([1 - long_share, long_share])
        kept = shares @ [short.kept_mean, long.kept_mean]
        seconds = shares @ [short.seconds(time), long.seconds(time)]
        variance = shares @ [short.longest_sd**2, long.longest_sd**2]
        choices.append(
            Choice(
                prompt_factor=pair[0],
                sample_factor=pair[1],
                step_s=float(seconds) + time.fixed_s,
                step_sd_s=time.per_step_s * math.sqrt(variance),
                baseline_step_s=baseline_s,
                length_shift=float(kept) / whole.kept_mean - 1.0,
            )
        )
    return choices


class _Law:
    """A length model on X + 1 points, from 0 to the cap. Lengths are uniform inside a bin; as if
    they were no whole numbers, which makes them half a token shorter on average."""

    def __init__(self, model: LengthModel, prompts_needed: int, samples_needed: int) -> None:
        self.prompts_needed = prompts_needed
        self.samples_needed = samples_needed
        self.class_weights: FloatArray = model.class_weights / model.class_weights.sum()
        densities = model.class_densities / model.class_densities.sum(axis=1, keepdims=True)
        ends = np.append(model.starts - 1, model.cap)
        at_ends = np.hstack([np.zeros((len(densities), 1)), np.cumsum(densities, axis=1)])
        inside = np.arange(1, POINTS_PER_BIN + 1) / POINTS_PER_BIN
        points = (ends[:-1, np.newaxis] + np.diff(ends)[:, np.newaxis] * inside).ravel()
        self.points: FloatArray = np.append(0.0, points)
        """(X + 1,)"""
        rows = [np.interp(self.points, ends, row) for row in at_ends]
        self.below: FloatArray = np.minimum(np.array(rows), 1.0)
        """(M, X + 1) share of a class's responses that end by a point."""

    def integral(self, values: FloatArray) -> float:
        """Of `values` (X + 1,) over the points."""
        return float((values[1:] + values[:-1]) @ np.diff(self.points) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Race:
    """One prompt of each class with R samples, of which R0 are needed."""

    num_samples: int
    done: FloatArray
    """(M, X + 1) chance that the prompt is done by a point."""
    running: FloatArray
    """(M, X + 1) samples that run at a point, 0 once the prompt is done, on average."""
    kept: FloatArray
    """(M, X) sum of the lengths kept, on average, of a prompt that gets done in an interval."""

    @classmethod
    def of(cls, law: _Law, num_samples: int) -> _Race:
        below, needed = law.below, law.samples_needed
        done, _, at_most_others = _binomial(num_samples, needed, below)
        middles = (law.points[1:] + law.points[:-1]) / 2
        ended = np.diff(below, axis=1)
        moments = np.cumsum(ended * middles, axis=1) - ended * middles / 2
        shares = below[:, :-1] + ended / 2
        means = moments / np.maximum(shares, 1e-300)  # of the responses that ended before
        return cls(
            num_samples=num_samples,
            done=done,
            running=num_samples * (1 - below) * at_most_others,
            kept=(needed - 1) * means + middles,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeanRound:
    """What a round comes to on average."""

    longest: float
    """Position at which the last response finishes."""
    longest_sd: float
    num_tokens: float
    kept_mean: float
    """Mean length of the responses trained on."""
    deferred: FloatArray
    """(M,) shares of the classes among deferred prompts; all 0 if none is."""

    def seconds(self, time: StepTime) -> float:
        return time.per_step_s * self.longest + time.per_token_s * self.num_tokens


def _mean_round(law: _Law, race: _Race, class_weights: FloatArray, num_prompts: int) -> _MeanRound:
    """Prompts with classes drawn by `class_weights` (M,) race until P0 are done."""
    done = class_weights @ race.done
    over, winners, open_to_others = _binomial(num_prompts, law.prompts_needed, done)
    going_on = 1.0 - over
    longest = law.integral(going_on)
    variance = law.integral(2 * law.points * going_on) - longest**2
    running = law.integral((class_weights @ race.running) * open_to_others)
    # Inside an interval the classes' shares of what gets done are taken as constant.
    newly_done = np.diff(done)
    wins = np.diff(winners) / num_prompts / np.where(newly_done > 0, newly_done, np.inf)
    won_in = class_weights[:, np.newaxis] * np.diff(race.done, axis=1) * wins
    deferred = np.maximum(class_weights - won_in.sum(axis=1), 0.0)
    is_deferring = num_prompts > law.prompts_needed
    return _MeanRound(
        longest=longest + 0.5,
        longest_sd=math.sqrt(max(variance, 0.0)),
        num_tokens=num_prompts * (running + 0.5 * race.num_samples),
        kept_mean=float((won_in * race.kept).sum() / won_in.sum()) / law.samples_needed + 0.5,
        deferred=deferred / deferred.sum() if is_deferring else np.zeros_like(deferred),
    )


def _binomial(
    num: int, needed: int, chance: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For `num` independent trials, each a success with `chance` (...), elementwise:
    the chance of at least `needed` successes, the mean of min(successes, `needed`), and the chance
    of fewer than `needed` among `num` - 1 of the trials."""
    chance = np.clip(chance, 0.0, 1.0)
    mean = num * chance
    doubt = NUM_SDS * (np.sqrt(mean * (1 - chance)) + 1)
    enough = np.where(mean > needed, 1.0, 0.0)
    counted = np.minimum(mean, needed)
    exactly = np.zeros_like(chance)
    unsure = (np.abs(mean - needed) <= doubt) & (chance > 0) & (chance < 1)
    p = chance[unsure]
    successes = np.arange(needed, num + 1)[:, np.newaxis]
    log_factorial = np.append(0.0, np.cumsum(np.log(np.arange(1, num + 1))))
    ways = log_factorial[num] - log_factorial[successes] - log_factorial[num - successes]
    shares = np.exp(ways + successes * np.log(p) + (num - successes) * np.log1p(-p))
    enough[unsure] = shares.sum(axis=0)
    counted[unsure] = num * p - ((successes - needed) * shares).sum(axis=0)
    exactly[unsure] = shares[0]
    enough[chance >= 1] = 1.0
    exactly[chance >= 1] = float(num == needed)
    others_enough = enough - exactly * needed / num
    return enough, counted, np.clip(1.0 - others_enough, 0.0, 1.0)
