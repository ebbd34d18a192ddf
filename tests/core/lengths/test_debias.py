"""Debias weights: what they achieve on simulated races, and that a restart does not show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from rollpacker.core.ids import PromptId
from rollpacker.core.lengths.bins import bin_starts
from rollpacker.core.lengths.counts import PromptLengths
from rollpacker.core.lengths.debias import Debias
from rollpacker.core.lengths.fit import fit_length_model
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.lengths.weights import (
    MIN_EFFECTIVE,
    density_weights,
    effective_sample_size,
    moment_weights,
)
from rollpacker.core.lengths.window import MAX_PROMPTS_PER_STEP, WARM_ITERATIONS, LengthWindow

CAP = 4096
SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    prompt: PromptId
    finished: list[int]
    stopped: list[int]


def run(
    seed: int, num_steps: int, *, rho: float = 0.1, size: int = SIZE
) -> Iterator[tuple[list[Launch], list[int]]]:
    """Steps of tail batching (1.25, 1.25) with 8 samples: launches, and what is trained on."""
    rng = np.random.default_rng(seed)
    deferred: list[tuple[PromptId, float]] = []
    num_started = 0
    for _ in range(num_steps):
        if len(deferred) >= size:
            long = [
                Launch(prompt=prompt, finished=lengths(rng, score, rho, 8), stopped=[])
                for prompt, score in deferred[:size]
            ]
            del deferred[:size]
            yield long, [n for launch in long for n in launch.finished]
            continue
        scores = rng.standard_normal(size * 5 // 4)
        rows = [sorted(lengths(rng, score, rho, 10)) for score in scores]
        order = sorted(range(len(rows)), key=lambda i: (rows[i][7], i))
        end = rows[order[size - 1]][7]
        done = set(order[:size])
        launches, trained = [], []
        for i, row in enumerate(rows):
            prompt = PromptId("train", 0, num_started)
            num_started += 1
            stop = row[7] if i in done else end
            kept = row[:8] if i in done else [n for n in row if n <= end][:7]
            stopped = [stop] * (10 - len(kept))
            launches.append(Launch(prompt=prompt, finished=kept, stopped=stopped))
            if i in done:
                trained += kept
            else:
                deferred.append((prompt, scores[i]))
        yield launches, trained


def lengths(rng: np.random.Generator, score: float, rho: float, num: int) -> list[int]:
    scores = math.sqrt(rho) * score + math.sqrt(1 - rho) * rng.standard_normal(num)
    return np.clip(np.round(np.exp(math.log(200) + scores)), 1, CAP).astype(int).tolist()


def own_mean(rho: float = 0.1) -> float:
    rng = np.random.default_rng(99)
    return float(np.mean([lengths(rng, rng.standard_normal(), rho, 2) for _ in range(40_000)]))


def feed(
    debias: Debias | LengthWindow, steps: Iterator[tuple[list[Launch], list[int]]]
) -> list[int]:
    trained: list[int] = []
    for launches, kept in steps:
        for launch in launches:
            debias.observe(launch.prompt, launch.finished, launch.stopped)
        if isinstance(debias, Debias):
            debias.step(kept)
        else:
            debias.close_step(kept)
        trained += kept
    return trained


# -- what the weights achieve --------------------------------------------------------------


def test_the_weighted_samples_are_as_long_as_the_policys_own():
    debias = Debias(cap=CAP)
    trained = np.array(feed(debias, run(1, 50)))
    weights = np.array(debias.weigh(trained.tolist()))
    truth = own_mean()
    assert trained.mean() < 0.75 * truth
    assert weights @ trained / len(trained) == pytest.approx(truth, rel=0.06)
    assert weights.mean() == pytest.approx(1.0, abs=1e-9)
    assert effective_sample_size(weights) >= 0.65
    metrics = debias.metrics()
    assert metrics["length/trained_mean"] == pytest.approx(trained.mean())
    assert metrics["length/weighted_mean"] == pytest.approx(weights @ trained / len(trained))
    assert metrics["length/policy_mean"] == pytest.approx(truth, rel=0.06)
    assert metrics["length/shift"] == pytest.approx(
        trained.mean() / metrics["length/policy_mean"] - 1
    )
    assert 0.1 < metrics["length/tail_trained_share"] < 0.7
    assert metrics["length/within_prompt_correlation"] == pytest.approx(0.1, abs=0.06)
    assert metrics["debias/effective_sample_size"] == pytest.approx(effective_sample_size(weights))
    assert metrics["debias/max_weight"] == pytest.approx(weights.max())
    assert metrics["debias/clip_share"] == 0.0


def test_over_its_window_weights_have_mean_one_in_every_step():
    debias = Debias(cap=CAP, window_steps=7)
    trained: list[list[int]] = []
    seen = 0
    for launches, kept in run(2, 20):
        for launch in launches:
            debias.observe(launch.prompt, launch.finished, launch.stopped)
        before = debias.weigh(kept)
        weights = debias.step(kept)
        trained.append(kept)
        if weights is None:
            continue
        seen += 1
        window = [n for step in trained[-7:] for n in step]
        assert np.mean(debias.weigh(window)) == pytest.approx(1.0, abs=1e-9)
        assert before is None or weights == before  # those of the steps before
    assert seen >= 15


def test_nothing_is_said_before_the_first_long_round():
    debias = Debias(cap=CAP)
    answers = []
    for launches, kept in run(3, 6):
        for launch in launches:
            debias.observe(launch.prompt, launch.finished, launch.stopped)
        answers.append(debias.step(kept))
        if len(answers) < 5:
            assert set(debias.metrics()) == {"length/trained_mean"}
    assert answers[:4] == [None] * 4  # four short rounds; the fifth is the long one
    assert answers[4] is not None
    assert len(answers[4]) == 8 * SIZE
    assert "length/policy_mean" in debias.metrics()


def test_a_window_alone_only_estimates():
    debias = LengthWindow(cap=CAP)
    feed(debias, run(1, 20))
    debias.close_step([5])
    metrics = debias.metrics()
    assert metrics["length/policy_mean"] > metrics["length/trained_mean"]
    assert not any(name.startswith("debias/") for name in metrics)
    assert "length/weighted_mean" not in metrics


def test_without_a_race_the_weights_are_one():
    debias = Debias(cap=CAP)
    rng = np.random.default_rng(4)
    trained = []
    for step in range(20):
        rows = [lengths(rng, rng.standard_normal(), 0.1, 8) for _ in range(SIZE)]
        for i, row in enumerate(rows):
            debias.observe(PromptId("train", step, i), row, [])
        trained += [n for row in rows for n in row]
        debias.step([n for row in rows for n in row])
    weights = debias.weigh(trained)
    assert weights is not None
    assert np.mean(np.abs(np.array(weights) - 1)) < 0.02
    assert debias.metrics()["length/shift"] == pytest.approx(0.0, abs=0.02)


# -- the weights as functions --------------------------------------------------------------


def model_with(density: list[float], cap: int) -> LengthModel:
    model = fit_length_model([PromptLengths(finished=(1,))], cap=cap, num_classes=1)
    assert len(density) == model.starts.size
    rows = np.tile(density, (2, 1))
    return LengthModel.from_plain({**model.to_plain(), "class_densities": rows.tolist()})


def test_the_density_ratio_by_hand():
    model = model_with([0.25, 0.25, 0.25, 0.25], cap=4)
    weights = density_weights(model, np.array([50, 25, 0, 25]))
    # Own over trained is 1/2, 1, unknown, 1; the mean over the trained samples is 3/4.
    assert weights == pytest.approx([2 / 3, 4 / 3, 4 / 3, 4 / 3])


def test_no_weight_is_above_the_bound_and_the_mean_stays_one():
    model = model_with([0.1, 0.1, 0.1, 0.7], cap=4)
    counts = np.array([90.0, 5.0, 4.0, 1.0])
    assert density_weights(model, counts, max_weight=100)[3] == pytest.approx(70 / 1)
    for weigh in (density_weights, moment_weights):
        weights = weigh(model, counts, max_weight=5)
        assert weights.max() <= 5 + 1e-9
        assert weights @ counts / counts.sum() == pytest.approx(1.0)
        assert weights.min() > 0
        assert weigh(model, counts, max_weight=1) == pytest.approx(1.0)


def test_moment_weights_trade_the_ratio_for_effective_samples():
    """Tails trained on at a ninth of their share: the density ratio alone has too few effective
    samples. The own mean is met exactly even so."""
    starts = np.arange(1, 33)
    own = np.exp(-starts / 8.0) + 0.004
    own /= own.sum()
    model = model_with(own.tolist(), cap=bin_cap(32))
    counts = np.where(np.arange(32) < 16, own, own / 9) * 10_000
    own_mean = float(own @ model.centres)
    ratio = density_weights(model, counts)
    assert effective_sample_size(ratio, counts) < MIN_EFFECTIVE
    weights = moment_weights(model, counts)
    assert effective_sample_size(weights, counts) >= MIN_EFFECTIVE
    share = counts / counts.sum()
    assert share @ (weights * model.centres) == pytest.approx(own_mean, rel=1e-3)
    assert share @ weights == pytest.approx(1.0)
    assert weights.min() > 0


def bin_cap(num_bins: int) -> int:
    """The cap with so many bins."""
    return next(cap for cap in range(2, 10_000) if bin_starts(cap).size == num_bins)


def test_effective_sample_size_by_hand():
    assert effective_sample_size(np.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([1.0, 0.0])) == pytest.approx(0.5)
    assert effective_sample_size(np.array([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_sample_size(np.array([3.0, 1.0]), np.array([1.0, 3.0])) == pytest.approx(
        36 / (4 * 12)
    )


# -- restarts ------------------------------------------------------------------------------


def test_a_restart_at_any_moment_changes_no_bit():
    steps = list(run(5, 22))
    whole = Debias(cap=CAP, window_steps=8)
    broken = Debias(cap=CAP, window_steps=8)
    for launches, kept in steps:
        for number, launch in enumerate(launches):
            whole.observe(launch.prompt, launch.finished, launch.stopped)
            broken.observe(launch.prompt, launch.finished, launch.stopped)
            if number == 11:
                broken = restarted(broken)
        assert whole.step(kept) == broken.step(kept)
        broken = restarted(broken)
        assert whole.metrics() == broken.metrics()
    assert whole.state() == broken.state()


def restarted(debias: Debias, cap: int | None = CAP) -> Debias:
    state = json.loads(json.dumps(debias.state()))
    again = Debias(cap=cap, window_steps=debias.window.window_steps)
    again.restore(state)
    return again


def test_a_checkpoint_with_another_cap_is_refused():
    debias = Debias(cap=CAP)
    with pytest.raises(ValueError, match="capped at 4096 tokens, those of this run at 100"):
        Debias(cap=100).restore(debias.state())


def test_under_a_larger_cap_lengths_are_learned_anew_without_the_prompts_of_before():
    """Those of them that still come are the long ones: nothing of theirs may be taken in."""
    debias = Debias(cap=CAP)
    feed(debias, run(1, 12))
    assert debias.weigh([10]) is not None
    again = Debias(cap=2 * CAP)
    again.restore(json.loads(json.dumps(debias.state())))
    assert again.weigh([10]) is None and again.window.model is None
    for prompt in {launch.prompt for launches, _ in run(1, 12) for launch in launches}:
        again.observe(prompt, [2 * CAP], [])
    assert again.window.saved().new == []
    fresh = PromptId("train", 9, 9)
    again.observe(fresh, [2 * CAP], [])
    assert [one.prompt for one in again.window.saved().new] == [fresh]


def test_weights_may_go_on_from_a_window_without_any():
    first = LengthWindow(cap=CAP)
    feed(first, run(1, 12))
    second = Debias(cap=CAP)
    second.restore(first.state())
    assert second.weigh([10]) is None
    assert second.step([10, 400]) is not None


# -- the window ----------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_steps():
    debias = Debias(cap=CAP, window_steps=5)
    sizes = []
    for launches, kept in run(6, 60):
        for launch in launches:
            debias.observe(launch.prompt, launch.finished, launch.stopped)
        debias.step(kept)
        sizes.append(len(json.dumps(debias.state())))
    assert max(sizes[40:]) < 1.05 * max(sizes[20:40])


def test_only_the_window_counts():
    """A policy that was ten times as brief until the window began."""
    debias = LengthWindow(cap=CAP, window_steps=10)
    for launches, kept in run(7, 10):
        for launch in launches:
            short = ([n // 10 for n in part] for part in (launch.finished, launch.stopped))
            debias.observe(PromptId(launch.prompt.source, 9, launch.prompt.row), *short)
        debias.close_step([n // 10 for n in kept])
    before = debias.metrics()
    feed(debias, run(8, 20))
    after = debias.metrics()
    fresh = LengthWindow(cap=CAP, window_steps=10)
    feed(fresh, run(8, 20))
    assert before["length/trained_mean"] < 0.2 * after["length/trained_mean"]
    assert after["length/trained_mean"] == fresh.metrics()["length/trained_mean"]
    assert after["length/policy_mean"] == pytest.approx(
        fresh.metrics()["length/policy_mean"], rel=0.05
    )


def test_launches_of_a_prompt_belong_together():
    """Once as two launches, in two steps, and once as one: the same data."""
    apart, together = (LengthWindow(cap=64, window_steps=3) for _ in range(2))
    for i in range(40):
        prompt = PromptId("train", 0, i)
        apart.observe(prompt, [3, 4], [5])
        together.observe(prompt, [3, 4, 9, 12], [5])
    apart.close_step([1])
    for i in range(40):
        apart.observe(PromptId("train", 0, i), [9, 12], [])
    apart.close_step([1])
    together.close_step([1])
    model_apart, model_together = apart.model, together.model
    assert model_apart is not None and model_together is not None
    assert model_apart.density == pytest.approx(model_together.density, abs=1e-3)


def test_what_comes_late_of_a_forgotten_prompt_is_ignored():
    """Prompts come back because they are long: alone they would look like the policy's own."""
    debias = LengthWindow(cap=64, window_steps=2)
    for i in range(40):
        debias.observe(PromptId("train", 0, i), [3, 4, 5], [])
    debias.close_step([3])
    for step in range(2):
        for i in range(40):
            debias.observe(PromptId("train", 1 + step, i), [3, 4, 5], [])
        debias.close_step([3])
    for i in range(40):
        debias.observe(PromptId("train", 0, i), [60, 61, 62], [])
    debias.close_step([60])
    assert debias.model is not None
    assert debias.model.mean() == pytest.approx(4, abs=0.2)


def test_ids_of_forgotten_prompts_are_forgotten_after_another_window():
    debias = LengthWindow(cap=64, window_steps=2)
    for step in range(8):
        for i in range(40):
            debias.observe(PromptId("train", step, i), [3, 4, 5], [])
        debias.close_step([3])
    for i in range(40):
        debias.observe(PromptId("train", 0, i), [60, 61, 62], [])
    debias.close_step([60])
    assert debias.model is not None
    assert debias.model.mean() == pytest.approx((4 + 61) / 2, rel=0.05)


def test_refits_go_on_from_the_last_fit():
    debias = LengthWindow(cap=CAP)
    feed(debias, run(1, 30))
    assert debias.model is not None
    assert 1 <= debias.model.num_iterations <= WARM_ITERATIONS


def test_of_a_large_step_a_part_is_watched():
    debias = LengthWindow(cap=64)
    num = 3 * MAX_PROMPTS_PER_STEP
    for i in range(num):
        debias.observe(PromptId("train", 0, i), [3, 4, 5], [])
    debias.close_step([3])
    for i in range(num):
        debias.observe(PromptId("train", 0, i), [6], [])
    debias.close_step([6])
    model = debias.model
    assert model is not None
    assert model.num_prompts == MAX_PROMPTS_PER_STEP
    assert model.mean() == pytest.approx(4.5, abs=0.1)


def test_without_a_cap_the_longest_response_sets_the_bins():
    """A power of two above it stands in for the cap."""
    free, bound = Debias(cap=None), Debias(cap=2 * CAP)
    for debias in (free, bound):
        debias.observe(PromptId("train", 8, 0), [CAP], [])
        feed(debias, run(9, 12))
    assert free.metrics() == bound.metrics()


def test_without_a_cap_longer_responses_may_come():
    debias = Debias(cap=None)
    trained = feed(debias, run(9, 12))
    before = debias.metrics()
    debias.observe(PromptId("train", 8, 0), [50_000], [])
    debias.step([50_000])
    debias = restarted(debias, cap=None)
    trained += [50_000, *feed(debias, run(10, 5))]
    after = debias.metrics()
    assert after["length/trained_mean"] == pytest.approx(np.mean(trained))
    assert after["length/policy_mean"] > before["length/policy_mean"]
    assert np.mean(debias.weigh(trained)) == pytest.approx(1.0)


# -- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_steps": 0}, "window_steps must be at least 1"),
        ({"max_weight": 0.5}, "max_weight must be at least 1"),
        ({"max_weight": float("nan")}, "max_weight must be at least 1"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Debias(**{"cap": CAP, **options})


@pytest.mark.parametrize(("finished", "stopped"), [([CAP + 1], []), ([-1], []), ([5], [CAP + 1])])
def test_impossible_lengths_are_refused(finished, stopped):
    debias = LengthWindow(cap=CAP)
    with pytest.raises(ValueError, match="outside 0 to the cap of 4096"):
        debias.observe(PromptId("train", 0, 0), finished, stopped)
    debias.close_step([])
    assert debias.metrics() == {}


def test_a_step_in_which_nothing_was_complete():
    debias = Debias(cap=CAP)
    debias.observe(PromptId("train", 0, 0), [], [10, 10])
    assert debias.step([]) is None
    feed(debias, run(1, 6))
    assert debias.step([]) == []


def test_weights_of_nothing_are_refused():
    model = model_with([0.25, 0.25, 0.25, 0.25], cap=4)
    for weigh in (density_weights, moment_weights):
        with pytest.raises(ValueError, match="no trained samples"):
            weigh(model, np.zeros(4))
        with pytest.raises(ValueError, match="max_weight"):
            weigh(model, np.ones(4), max_weight=0.0)
    with pytest.raises(ValueError, match="no sample"):
        effective_sample_size(np.zeros(3))
