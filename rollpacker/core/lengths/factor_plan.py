"""Chooses the factors of tail batching (how many more prompts and samples a short round launches
than it needs) for the lengths that the run has seen (`prompt_factor: auto`).

Larger factors end short rounds earlier and make long rounds more frequent, cost tokens that are
thrown away, and shorten what is trained on. What is best depends on how long the tail is, on how
much the prompt decides of a length, and on what a token costs; a run shows all three.

    seconds of a round = per_step_s * longest response + per_token_s * tokens generated

is fitted to the rounds so far; lengths come from a fitted `LengthModel`. With all samples of a
round at the same position, the shorter response finishes first, so what a race takes on average
follows from order statistics: it is computed, not drawn, and chance has no part in comparing two
pairs of factors. Deferred prompts keep their class and fill the long rounds. Left out: rewards
(races end by generated responses), cascades, the smaller rounds at the end of an epoch, and that
training costs less when responses are shorter.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.commands import RoundKind
from rollpacker.core.lengths.mean_rounds import Law, MeanRound, PromptRace, mean_round
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.portable import mean, total
from rollpacker.core.rounds.tail_batching import times

GRID = (1.0, 1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5)
"""Values that are tried for each factor (launched over needed number) of short rounds: that of
prompts, and that of samples per prompt."""
MIN_GAIN = 0.02
"""Smallest saving, as a share of the step's seconds, for which the numbers of prompts and samples
that short rounds launch are changed."""
SLACK = 0.01
"""Pairs of factors (of prompts, and of samples) with a step within this share of the fastest one's
seconds count as equally fast; of these the pair that shortens trained lengths least is chosen."""
MAX_ROUNDS = 64
"""Maximum number of the last rounds of each kind, and of the last trainings with weight sync, whose
durations are remembered for the fit of step times."""
MIN_ROUNDS = 2
PRIOR_ROUNDS = 1e-3
"""Number of rounds that count as evidence, in the fit of step times, for decoding steps and tokens
each taking half of a round. It decides while the real rounds cannot tell the two apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Model of the seconds of a step: decoding steps, tokens, and a fixed rest."""

    per_step_s: float
    """Seconds of one decoding step of the engine, however many samples it decodes."""
    per_token_s: float
    """Seconds that every generated token adds to a round."""
    fixed_s: float = 0.0
    """Seconds of the rest of a step: training, and sending the new weights to the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Factors (launched over needed numbers) of prompts and of samples per prompt in short rounds,
    and the seconds and lengths that are predicted for these factors."""

    prompt_factor: float
    sample_factor: float
    step_s: float
    """Predicted mean seconds of a step, over steps with short and with long rounds."""
    baseline_step_s: float
    """Predicted mean seconds of a step with both factors 1: nothing is launched beyond the need."""
    length_shift: float
    """Relative change of the mean trained length from the policy's own: their ratio, minus 1."""

    @property
    def factors(self) -> tuple[float, float]:
        return (self.prompt_factor, self.sample_factor)

    @property
    def gain(self) -> float:
        """Share of `baseline_step_s` that this choice saves."""
        return 1.0 - self.step_s / self.baseline_step_s


class FactorPlanner:
    """Chooses the factors (launched over needed numbers) of prompts and of samples per prompt in
    short rounds, by reported durations and a fitted `LengthModel`."""

    def __init__(
        self,
        prompts_per_step: int,
        samples_per_prompt: int,
        *,
        max_length_shift: float | None = 0.35,
        debiased: bool = False,
        grid: Sequence[float] = GRID,
    ) -> None:
        """`max_length_shift`: the mean trained length may be at most this share below the policy's
        own. None, or `debiased` (loss weights undo the shift): no bound."""
        self.prompts_per_step = prompts_per_step
        self.samples_per_prompt = samples_per_prompt
        self.max_length_shift = None if debiased else max_length_shift
        self.grid = tuple(grid)
        self.current: tuple[float, float] | None = None
        """Factors (of prompts, of samples per prompt) chosen last. None: none were chosen yet."""
        self._rounds: dict[str, deque[tuple[int, int, float]]] = {}
        """Last rounds by kind of round, so that frequent kinds do not crowd out rare ones: tokens
        of the longest response, all tokens, seconds."""
        self._fixed: deque[float] = deque(maxlen=MAX_ROUNDS)

    def observe_round(
        self, kind: RoundKind, *, longest_tokens: int, tokens: int, seconds: float
    ) -> None:
        """Records that a round's rollout took `seconds`, that its longest response (finished or
        stopped) has `longest_tokens`, and that all responses together have `tokens`."""
        assert longest_tokens >= 0 and tokens >= 0 and math.isfinite(seconds)
        if longest_tokens and seconds > 0:
            history = self._rounds.setdefault(kind.value, deque(maxlen=MAX_ROUNDS))
            history.append((longest_tokens, tokens, seconds))

    def observe_fixed(self, seconds: float) -> None:
        """Records the seconds of the rest of a step after the rollout: training, weight sync."""
        assert math.isfinite(seconds) and seconds >= 0
        self._fixed.append(seconds)

    @property
    def ready(self) -> bool:
        """Whether at least `MIN_ROUNDS` rounds were observed, so that `choose` may be called."""
        return sum(map(len, self._rounds.values())) >= MIN_ROUNDS

    def step_time(self) -> StepTime:
        """The step times that fit the observed rounds best. Raises `ValueError` without any."""
        rounds = list(itertools.chain.from_iterable(self._rounds.values()))
        per_step_s, per_token_s = fit_round_time(rounds)
        fixed_s = sum(self._fixed) / len(self._fixed) if self._fixed else 0.0
        return StepTime(per_step_s=per_step_s, per_token_s=per_token_s, fixed_s=fixed_s)

    def choose(self, model: LengthModel) -> Choice:
        """Chooses the factors of short rounds from now on. They change only for a saving of at
        least `MIN_GAIN`, or if the present ones shorten lengths more than `max_length_shift`."""
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
        rounds = {kind: list(history) for kind, history in self._rounds.items()}
        saved = SavedPlanner(current=self.current, rounds=rounds, fixed=list(self._fixed))
        return to_plain(saved)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what an earlier planner had observed and chosen, from its `state`."""
        saved = from_plain(SavedPlanner, state)
        self.current = saved.current
        self._rounds = {kind: deque(of, maxlen=MAX_ROUNDS) for kind, of in saved.rounds.items()}
        self._fixed = deque(saved.fixed, maxlen=MAX_ROUNDS)


class SavedPlanner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of a `FactorPlanner` in a checkpoint."""

    current: tuple[float, float] | None
    rounds: dict[str, list[tuple[int, int, float]]]
    fixed: list[float]


def fastest(choices: Sequence[Choice], *, max_length_shift: float | None = None) -> Choice:
    """The best choice whose lengths are shortened by no more than `max_length_shift` (None: by any
    share). Among those about as fast as the fastest it is the one that shortens lengths least, then
    the one with the smallest factors. Raises `ValueError` if no choice is within the bound."""
    allowed = [choice for choice in choices if _allowed(choice, max_length_shift)]
    if not allowed:
        raise ValueError(f"no pair of factors keeps the length shift within {max_length_shift}")
    limit = (1.0 + SLACK) * min(choice.step_s for choice in allowed)
    close = [choice for choice in allowed if choice.step_s <= limit]
    return min(close, key=lambda choice: (-choice.length_shift, choice.factors))


def _allowed(choice: Choice, max_length_shift: float | None) -> bool:
    return max_length_shift is None or -choice.length_shift <= max_length_shift


def fit_round_time(rounds: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """(per_step_s, per_token_s), neither negative, fitted to rounds (longest response, all tokens,
    seconds) by least squares of the relative errors. Raises `ValueError` without any round."""
    if not rounds:
        raise ValueError("no round to fit the time of decoding to")
    data = np.array(rounds, dtype=np.float64)
    scale = mean(data[:, :2], 0) / mean(data[:, 2])
    scale = np.where(scale > 0, scale, 1.0)
    # In these units both unknowns are shares of a mean round.
    rows = data[:, :2] / data[:, 2:] / scale
    normal = total(rows[:, :, np.newaxis] * rows[:, np.newaxis], 0) + PRIOR_ROUNDS * np.eye(2)
    right = total(rows, 0) + PRIOR_ROUNDS * 0.5
    (a, b), (_, c) = normal.tolist()
    shares = np.array([c * right[0] - b * right[1], a * right[1] - b * right[0]]) / (a * c - b * b)
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
    """Predicts step times and lengths for each (prompt_factor, sample_factor) in `pairs`. A pair
    with the numbers of an earlier one is left out. Raises `ValueError` for a factor below 1."""
    if min(itertools.chain.from_iterable(pairs)) < 1:
        raise ValueError("a factor cannot be less than 1")
    launched: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in pairs:
        counts = (times(pair[0], prompts_per_step), times(pair[1], samples_per_prompt))
        launched.setdefault(counts, pair)
    law = Law(model, prompts_per_step, samples_per_prompt)
    races = {num_samples: PromptRace.of(law, num_samples) for _, num_samples in launched}
    races.setdefault(samples_per_prompt, PromptRace.of(law, samples_per_prompt))
    whole = mean_round(law, races[samples_per_prompt], law.class_weights, prompts_per_step)
    baseline_s = _seconds(whole, time) + time.fixed_s
    choices = []
    for (num_prompts, num_samples), pair in launched.items():
        short = mean_round(law, races[num_samples], law.class_weights, num_prompts)
        long_share = (num_prompts - prompts_per_step) / num_prompts
        long = whole  # counts for nothing if nothing is deferred
        if long_share:
            long = mean_round(law, races[samples_per_prompt], short.deferred, prompts_per_step)
        short_share = 1 - long_share
        kept = short_share * short.kept_mean + long_share * long.kept_mean
        seconds = short_share * _seconds(short, time) + long_share * _seconds(long, time)
        choices.append(
            Choice(
                prompt_factor=pair[0],
                sample_factor=pair[1],
                step_s=seconds + time.fixed_s,
                baseline_step_s=baseline_s,
                length_shift=kept / whole.kept_mean - 1.0,
            )
        )
    return choices


def _seconds(round_: MeanRound, time: StepTime) -> float:
    return time.per_step_s * round_.longest + time.per_token_s * round_.num_tokens
