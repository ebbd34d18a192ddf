"""The choice of the factors, against races run sample by sample."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.commands import RoundKind
from rollpacker.core.lengths.bins import bin_starts
from rollpacker.core.lengths.factor_plan import (
    Choice,
    FactorPlanner,
    StepTime,
    fastest,
    fit_round_time,
    predict,
)
from rollpacker.core.lengths.mean_rounds import Law, PromptRace, binomial, mean_round
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.rounds.tail_batching import times

CAP = 16_384
LAUNCH_BOUND = StepTime(per_step_s=0.014, per_token_s=1e-5)
"""A step costs nearly the same whatever runs."""


def model_of(
    medians: list[float], sigma: float, *, weights: list[float] | None = None, cap: int = CAP
) -> LengthModel:
    """Log-normal classes, what lies beyond the cap put on it."""
    starts = bin_starts(cap)
    edges = np.append(starts, np.inf)
    edges[0] = 1e-9

    def below(median: float) -> list[float]:
        logs = (np.log(edges[:-1]) - math.log(median)) / (sigma * math.sqrt(2.0))
        return [*(0.5 * (1 + math.erf(x)) for x in logs), 1.0]

    return of_densities(np.array([np.diff(below(m)) for m in medians]), weights, cap=cap)


def of_densities(densities, weights=None, *, cap: int = CAP) -> LengthModel:
    starts = bin_starts(cap)
    shares = np.full(len(densities), 1 / len(densities)) if weights is None else np.array(weights)
    widths = np.diff(np.append(starts, cap + 1))
    return LengthModel(
        cap=cap,
        centres=starts + (widths - 1) / 2,
        class_weights=shares,
        class_densities=np.asarray(densities, dtype=np.float64),
        stray_density=densities[0],
        stray_rate=0.0,
        num_prompts=1000,
        longest=cap,
        objective=0.0,
        num_iterations=1,
    )


HEAVY = model_of([450, 600, 800], 1.1)
HARD = model_of([500, 3000], 0.9, weights=[0.9, 0.1])
ALL_CAPPED = of_densities([[0.0] * (bin_starts(CAP).size - 1) + [1.0]])


def predicted(model, pair, prompts=16, samples=4, time=LAUNCH_BOUND) -> Choice:
    (choice,) = predict(
        model, time, prompts_per_step=prompts, samples_per_prompt=samples, pairs=[pair]
    )
    return choice


def planner_for(model=None, *, time=LAUNCH_BOUND, prompts=16, samples=4, **changes):
    """A planner that has observed rounds which took exactly `time`."""
    planner = FactorPlanner(prompts, samples, **changes)
    for steps, tokens in ((1000, 90_000), (2000, 110_000), (16_000, 60_000)):
        seconds = time.per_step_s * steps + time.per_token_s * tokens
        planner.observe_round(RoundKind.SHORT, longest_tokens=steps, tokens=tokens, seconds=seconds)
    planner.observe_fixed(time.fixed_s)
    return planner


# -- against brute force ---------------------------------------------------------------


class Run:
    """Tail batching over many steps, one sample after the other: a queue of deferred prompts, and
    races in which the next sample to finish is the shortest one still running."""

    def __init__(self, model: LengthModel, prompts: int, samples: int, pair, seed: int) -> None:
        self.model = model
        self.prompts, self.samples = prompts, samples
        self.launched = (times(pair[0], prompts), times(pair[1], samples))
        self.rng = np.random.default_rng(seed)
        self.queue: list[int] = []
        self.trained: list[int] = []
        self.rounds: list[tuple[int, int]] = []
        """(steps, tokens)"""

    def lengths(self, cls: int, count: int) -> list[int]:
        starts = np.append(self.model.starts, self.model.cap + 1)
        bins = self.rng.choice(len(starts) - 1, size=count, p=self.model.class_densities[cls])
        return [int(self.rng.integers(starts[b], starts[b + 1])) for b in bins]

    def step(self) -> None:
        if len(self.queue) >= self.prompts:
            batch, self.queue = self.queue[: self.prompts], self.queue[self.prompts :]
            self.race(batch, self.samples, all_of_them=True)
        else:
            weights = self.model.class_weights
            fresh = [int(c) for c in self.rng.choice(weights.size, self.launched[0], p=weights)]
            self.race(fresh, self.launched[1], all_of_them=False)

    def race(self, classes: list[int], num_samples: int, *, all_of_them: bool) -> None:
        samples = {
            (p, i): length
            for p, cls in enumerate(classes)
            for i, length in enumerate(self.lengths(cls, num_samples))
        }
        order = sorted(samples, key=lambda key: (samples[key], key))
        finished: dict[int, list[int]] = {p: [] for p in range(len(classes))}
        stopped_at: dict[int, int] = {}
        end = num_tokens = 0
        for prompt, index in order:
            length = samples[prompt, index]
            if prompt in stopped_at:
                num_tokens += stopped_at[prompt]
            elif len(stopped_at) == self.prompts:
                num_tokens += end
            else:
                num_tokens += length
                finished[prompt].append(length)
                if len(finished[prompt]) == self.samples:
                    stopped_at[prompt] = end = length
        for prompt in stopped_at:
            self.trained += finished[prompt]
        deferred = [cls for p, cls in enumerate(classes) if p not in stopped_at]
        assert not (all_of_them and deferred)
        self.queue += deferred
        self.rounds.append((end, num_tokens))


@pytest.mark.parametrize("model", [HEAVY, HARD], ids=["heavy", "hard"])
@pytest.mark.parametrize("pair", [(1.0, 1.0), (1.25, 1.25), (1.5, 1.0), (1.0, 1.5), (1.125, 1.25)])
def test_predictions_agree_with_a_race_run_sample_by_sample(model, pair):
    time = StepTime(per_step_s=0.014, per_token_s=1e-4, fixed_s=3.0)
    run = Run(model, 16, 4, pair, seed=1)
    for _ in range(250):
        run.step()
    seconds = [0.014 * steps + 1e-4 * tokens + 3.0 for steps, tokens in run.rounds]
    choice = predicted(model, pair, time=time)
    noise = np.std(seconds) / math.sqrt(len(seconds))
    assert abs(choice.step_s - np.mean(seconds)) < 0.01 * choice.step_s + 2 * noise
    own = float(model.density @ model.centres)
    # The own mean is exact, the run's trained mean is not.
    noise = 2 * np.std(run.trained) / math.sqrt(len(run.trained)) / own
    assert choice.length_shift == pytest.approx(np.mean(run.trained) / own - 1, abs=0.02 + noise)


@pytest.mark.parametrize("model", [HEAVY, HARD, ALL_CAPPED], ids=["heavy", "hard", "capped"])
@pytest.mark.parametrize("counts", [(16, 4), (20, 5), (24, 4), (16, 6), (17, 5)])
def test_the_parts_of_a_round_agree_with_many_races(model, counts):
    num_prompts, num_samples = counts
    law = Law(model, 16, 4)
    found = mean_round(law, PromptRace.of(law, num_samples), law.class_weights, num_prompts)
    rng = np.random.default_rng(0)
    num_rounds = 4000
    starts = np.append(model.starts, model.cap + 1)
    classes = rng.choice(model.class_weights.size, (num_rounds, num_prompts), p=model.class_weights)
    bins = np.empty((num_rounds, num_prompts, num_samples), dtype=np.int64)
    for index, density in enumerate(model.class_densities):
        chosen = classes == index
        bins[chosen] = rng.choice(density.size, (int(chosen.sum()), num_samples), p=density)
    lengths = np.sort(rng.integers(starts[bins], starts[bins + 1]), axis=-1)
    done = lengths[..., 3]
    # Ties are broken at random.
    order = np.argsort(done + rng.random(done.shape), axis=1)
    end = np.take_along_axis(done, order[:, 15:16], axis=1)
    stops = np.minimum(done, end)[..., np.newaxis]
    won = np.zeros(done.shape, dtype=bool)
    np.put_along_axis(won, order[:, :16], True, axis=1)
    assert found.longest == pytest.approx(end.mean(), rel=0.02)
    assert found.num_tokens * num_rounds == pytest.approx(
        np.minimum(lengths, stops).sum(), rel=0.01
    )
    assert found.kept_mean == pytest.approx(lengths[won][:, :4].mean(), rel=0.01)
    if num_prompts > 16:
        shares = np.bincount(classes[~won], minlength=model.class_weights.size) / (~won).sum()
        np.testing.assert_allclose(found.deferred, shares, atol=0.02)


@given(st.integers(1, 40), st.data())
@settings(max_examples=50)
def test_the_binomial_parts(num, data):
    needed = data.draw(st.integers(1, num))
    chances = np.array(data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=4)))
    enough, counted, others = binomial(num, needed, chances)
    for index, p in enumerate(chances):
        shares = [math.comb(num, k) * p**k * (1 - p) ** (num - k) for k in range(num + 1)]
        fewer = [math.comb(num - 1, k) * p**k * (1 - p) ** (num - 1 - k) for k in range(needed)]
        assert enough[index] == pytest.approx(sum(shares[needed:]), abs=1e-9)
        exact = sum(min(k, needed) * share for k, share in enumerate(shares))
        assert counted[index] == pytest.approx(exact, abs=1e-9)
        assert others[index] == pytest.approx(sum(fewer[: min(needed, num)]), abs=1e-9)


# -- what is chosen --------------------------------------------------------------------


def test_equal_lengths_need_no_tail_batching():
    planner = planner_for()
    choice = planner.choose(ALL_CAPPED)
    assert choice.factors == (1.0, 1.0)
    assert choice.gain == 0.0
    assert choice.length_shift == 0.0


@pytest.mark.parametrize("model", [HEAVY, HARD], ids=["heavy", "hard"])
def test_heavy_tails_are_raced(model):
    choice = planner_for(max_length_shift=None).choose(model)
    assert min(choice.factors) > 1
    assert choice.gain > 0.3
    assert choice.length_shift < -0.2


def test_tokens_that_cost_all_the_time_are_not_thrown_away():
    choice = planner_for(time=StepTime(per_step_s=0.0, per_token_s=1e-3)).choose(HEAVY)
    assert choice.sample_factor == 1.0


@pytest.mark.parametrize("bound", [0.0, 0.05, 0.15, 0.3, 0.45])
def test_the_bound_on_the_shift_is_kept(bound):
    choice = planner_for(max_length_shift=bound).choose(HEAVY)
    assert choice.length_shift >= -bound
    if bound == 0.0:
        assert choice.factors == (1.0, 1.0)


def test_a_looser_bound_is_never_slower_and_weights_lift_it():
    bounds = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6)
    steps = [planner_for(max_length_shift=bound).choose(HEAVY).step_s for bound in bounds]
    assert all(b <= 1.01 * a for a, b in itertools.pairwise(steps))
    debiased = planner_for(max_length_shift=0.0, debiased=True).choose(HEAVY)
    assert debiased == planner_for(max_length_shift=None).choose(HEAVY)


def test_of_two_that_are_as_fast_the_one_that_shifts_less():
    def choice(factor, step_s, shift):
        return Choice(
            prompt_factor=factor,
            sample_factor=1.0,
            step_s=step_s,
            baseline_step_s=10.0,
            length_shift=shift,
        )

    choices = [choice(1.0, 9.0, 0.0), choice(1.25, 5.0, -0.3), choice(1.5, 5.04, -0.2)]
    assert fastest(choices).prompt_factor == 1.5
    assert fastest(choices, max_length_shift=0.1).prompt_factor == 1.0
    with pytest.raises(ValueError, match="within"):
        fastest(choices[1:], max_length_shift=0.1)


def test_it_stays_unless_the_gain_is_worth_it():
    time = StepTime(per_step_s=0.014, per_token_s=1e-5, fixed_s=200.0)
    planner = planner_for(time=time, max_length_shift=None, prompts=128, samples=8)
    best = planner.choose(HEAVY)
    choices = predict(HEAVY, planner.step_time(), prompts_per_step=128, samples_per_prompt=8)
    others = [choice for choice in choices if choice.factors != best.factors]
    near = [choice for choice in others if best.step_s > 0.98 * choice.step_s]
    far = [choice for choice in others if best.step_s <= 0.98 * choice.step_s]
    assert near and far
    for choice in near:
        planner.current = choice.factors
        assert planner.choose(HEAVY) == choice
    for choice in far[:5]:
        planner.current = choice.factors
        assert planner.choose(HEAVY) == best


def test_factors_that_launch_the_same_are_no_change():
    planner = planner_for(max_length_shift=None, grid=(1.0, 1.5))
    assert planner.choose(HEAVY).factors == (1.0, 1.5)
    planner.current = (1.0, 1.45)  # 6 samples, as with 1.5
    assert planner.choose(HEAVY).factors == (1.0, 1.45)


def test_factors_that_break_the_bound_are_left():
    planner = planner_for(max_length_shift=0.15)
    planner.current = (1.5, 1.5)
    assert planner.choose(HEAVY).length_shift >= -0.15


def test_pairs_that_launch_the_same_count_once():
    choices = predict(HEAVY, LAUNCH_BOUND, prompts_per_step=4, samples_per_prompt=2)
    assert len({choice.factors for choice in choices}) == len(choices) == 3 * 2
    assert {c.prompt_factor for c in choices} == {1.0, 1.0625, 1.375}
    with pytest.raises(ValueError, match="less than 1"):
        predicted(HEAVY, (0.9, 1.0))


# -- the time of a round ---------------------------------------------------------------


@given(
    st.floats(0, 0.05), st.floats(0, 1e-3), st.lists(st.integers(100, 9000), min_size=6, max_size=9)
)
@settings(max_examples=50)
def test_exact_times_are_found(per_step_s, per_token_s, steps):
    rounds = []
    for index, count in enumerate(steps):
        tokens = 30_000 + 20_000 * (index % 3)
        rounds.append((count, tokens, per_step_s * count + per_token_s * tokens + 1e-9))
    fitted = fit_round_time(rounds)
    for count, tokens, seconds in rounds:
        found = fitted[0] * count + fitted[1] * tokens
        assert found == pytest.approx(seconds, rel=0.01, abs=1e-8)
    assert min(fitted) >= 0


def test_times_are_never_negative():
    assert fit_round_time([(1000, 5000, 10.0), (1000, 50_000, 9.0)])[1] == 0.0
    assert fit_round_time([(1000, 5000, 1.0), (9000, 5000, 0.9)])[0] == 0.0


def test_rounds_that_are_all_alike_share_the_time_out():
    """Nothing tells the two costs apart: half each, and together what was seen."""
    per_step_s, per_token_s = fit_round_time([(1000, 50_000, 20.0)] * 5)
    assert per_step_s * 1000 == pytest.approx(10.0, rel=1e-3)
    assert per_token_s * 50_000 == pytest.approx(10.0, rel=1e-3)


def test_the_planner_knows_when_it_is_ready():
    planner = FactorPlanner(16, 4)
    assert not planner.ready
    with pytest.raises(ValueError, match="no round"):
        planner.choose(HEAVY)
    for _ in range(2):
        planner.observe_round(RoundKind.LONG, longest_tokens=100, tokens=1000, seconds=1.0)
    assert planner.ready


def test_rare_kinds_are_not_crowded_out():
    planner = FactorPlanner(16, 4)
    planner.observe_round(RoundKind.LONG, longest_tokens=9000, tokens=90_000, seconds=90.0)
    for _ in range(1000):
        planner.observe_round(RoundKind.SHORT, longest_tokens=1000, tokens=90_000, seconds=10.0)
    time = planner.step_time()
    assert time.per_step_s == pytest.approx(0.01, rel=0.02)
    assert len(planner.state()["rounds"]["short"]) < 100


# -- state -----------------------------------------------------------------------------


def test_a_restored_planner_chooses_alike():
    planner = planner_for(time=StepTime(per_step_s=0.01, per_token_s=1e-5, fixed_s=2.5))
    planner.choose(HEAVY)
    other = FactorPlanner(16, 4)
    other.restore(json.loads(json.dumps(planner.state())))
    assert other.state() == planner.state()
    assert other.choose(HARD) == planner.choose(HARD)
