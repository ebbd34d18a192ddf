"""Mean outcome of a race (a round that keeps the first to finish), by order statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollpacker.core.lengths.bins import FloatArray
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.portable import (
    exps,
    interpolated,
    log1ps,
    logs,
    mixed,
    total,
    total_of,
)

POINTS_PER_BIN = 4
"""Number of points per bin of length at which the chance that the round is over is computed."""
NUM_SDS = 8.0
"""Standard deviations from the mean beyond which a binomial count is taken as impossible."""


class Law:
    """A `LengthModel` evaluated at X + 1 points of length, from 0 to the cap. Lengths are taken as
    uniform inside a bin and continuous, which makes them half a token shorter on average."""

    def __init__(self, model: LengthModel, prompts_needed: int, samples_needed: int) -> None:
        self.prompts_needed = prompts_needed
        self.samples_needed = samples_needed
        self.class_weights: FloatArray = model.class_weights / total_of(model.class_weights)
        densities = model.class_densities / total(model.class_densities)[:, np.newaxis]
        ends = np.append(model.starts - 1, model.cap).astype(np.float64)
        at_ends = np.hstack([np.zeros((len(densities), 1)), np.cumsum(densities, axis=1)])
        inside = np.arange(1, POINTS_PER_BIN + 1) / POINTS_PER_BIN
        points = (ends[:-1, np.newaxis] + np.diff(ends)[:, np.newaxis] * inside).ravel()
        self.points: FloatArray = np.append(0.0, points)
        """(X + 1,) lengths in tokens at which the model is evaluated: the "points"."""
        rows = [interpolated(self.points, ends, row) for row in at_ends]
        self.below: FloatArray = np.minimum(np.array(rows), 1.0)
        """(M, X + 1) share of each class's responses that are no longer than each point."""

    def integral(self, values: FloatArray) -> float:
        """Integral from 0 to the cap of a function with these `values` (X + 1,) at the points."""
        return total_of((values[1:] + values[:-1]) * np.diff(self.points)) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRace:
    """Race among the samples of one prompt: of `num_samples` samples the first R0 to finish are
    kept. Arrays have a row for each of M classes of prompts."""

    num_samples: int
    done: FloatArray
    """(M, X + 1) chance that a prompt has its R0 samples by each point of length."""
    running: FloatArray
    """(M, X + 1) mean number of samples running at each point; 0 once the prompt has its R0."""
    kept: FloatArray
    """(M, X) mean sum of a prompt's R0 kept lengths if it is done between a point and the next."""

    @classmethod
    def of(cls, law: Law, num_samples: int) -> PromptRace:
        below, needed = law.below, law.samples_needed
        done, _, at_most_others = binomial(num_samples, needed, below)
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
class MeanRound:
    """Mean outcome of a round; lengths are in tokens."""

    longest: float
    """Mean length of the round's longest response, at which the round is over."""
    num_tokens: float
    kept_mean: float
    """Mean length of the responses that are trained on."""
    deferred: FloatArray
    """(M,) classes of the prompts put off to a later round, as shares; all 0 if none is put off."""


def mean_round(
    law: Law, race: PromptRace, class_weights: FloatArray, num_prompts: int
) -> MeanRound:
    """Computes the mean outcome of a round of `num_prompts` prompts that is over once
    `law.prompts_needed` of them have all samples. `class_weights` (M,): probability of each class
    for a prompt. `race`: what happens inside a prompt."""
    done = mixed(class_weights, race.done)
    over, winners, open_to_others = binomial(num_prompts, law.prompts_needed, done)
    longest = law.integral(1.0 - over)
    running = law.integral(mixed(class_weights, race.running) * open_to_others)
    # Inside an interval the classes' shares of what gets done are taken as constant.
    newly_done = np.diff(done)
    wins = np.diff(winners) / num_prompts / np.where(newly_done > 0, newly_done, np.inf)
    won_in = class_weights[:, np.newaxis] * np.diff(race.done, axis=1) * wins
    deferred = np.maximum(class_weights - total(won_in), 0.0)
    is_deferring = num_prompts > law.prompts_needed
    return MeanRound(
        longest=longest + 0.5,
        num_tokens=num_prompts * (running + 0.5 * race.num_samples),
        kept_mean=total_of(won_in * race.kept) / total_of(won_in) / law.samples_needed + 0.5,
        deferred=deferred / total_of(deferred) if is_deferring else np.zeros_like(deferred),
    )


def binomial(
    num: int, needed: int, chance: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For `num` independent trials, each a success with probability `chance` (an array): the chance
    of at least `needed` successes, the mean of min(successes, `needed`), and the chance of fewer
    than `needed` successes among `num` - 1 trials."""
    chance = np.clip(chance, 0.0, 1.0)
    mean = num * chance
    doubt = NUM_SDS * (np.sqrt(mean * (1 - chance)) + 1)
    enough = np.where(mean > needed, 1.0, 0.0)
    counted = np.minimum(mean, needed)
    exactly = np.zeros_like(chance)
    unsure = (np.abs(mean - needed) <= doubt) & (chance > 0) & (chance < 1)
    p = chance[unsure]
    successes = np.arange(needed, num + 1)[:, np.newaxis]
    log_factorial = np.append(0.0, np.cumsum(logs(np.arange(1.0, num + 1))))
    ways = log_factorial[num] - log_factorial[successes] - log_factorial[num - successes]
    shares = exps(ways + successes * logs(p) + (num - successes) * log1ps(-p))
    enough[unsure] = total(shares, 0)
    counted[unsure] = num * p - total((successes - needed) * shares, 0)
    exactly[unsure] = shares[0]
    enough[chance >= 1] = 1.0
    exactly[chance >= 1] = float(num == needed)
    others_enough = enough - exactly * needed / num
    return enough, counted, np.clip(1.0 - others_enough, 0.0, 1.0)
