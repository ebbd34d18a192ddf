"""The latent-class fit against laws that are known, and against Kaplan-Meier where that holds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.lengths.bins import bin_starts
from rollpacker.core.lengths.counts import PromptLengths
from rollpacker.core.lengths.fit import choose_length_model, fit_length_model
from rollpacker.core.lengths.model import LengthModel
from tests.core.lengths.product_limit import kaplan_meier_mean

CAP = 4096


def draw(
    rng: np.random.Generator, num_prompts: int, rho: float, hard_share: float = 0.0
) -> list[tuple[float, float]]:
    """What makes a prompt long, and how often its responses run to the cap."""
    scores = math.sqrt(rho) * rng.standard_normal(num_prompts)
    stray = np.where(rng.random(num_prompts) < hard_share, 0.15, 0.0)
    return list(zip(scores.tolist(), stray.tolist(), strict=True))


def respond(
    rng: np.random.Generator, prompt: tuple[float, float], rho: float, num_samples: int
) -> list[int]:
    """Log-normal lengths, median 200, cut off at the cap."""
    score, stray = prompt
    scores = score + math.sqrt(1 - rho) * rng.standard_normal(num_samples)
    lengths = np.clip(np.round(np.exp(math.log(200) + scores)), 1, CAP)
    return np.where(rng.random(num_samples) < stray, CAP, lengths).astype(int).tolist()


def race(
    rng: np.random.Generator,
    *,
    rho: float,
    hard_share: float = 0.0,
    num_rounds: int = 40,
    size: int = 32,
) -> tuple[list[PromptLengths], list[int]]:
    """Tail batching with both factors 1.25 and 8 samples: what the prompts show, and what is
    trained on. The last deferred prompts stay without a long round."""
    seen: list[PromptLengths] = []
    trained: list[int] = []
    deferred: list[tuple[tuple[float, float], PromptLengths]] = []
    for _ in range(num_rounds):
        if len(deferred) >= size:
            for prompt, shown in deferred[:size]:
                row = respond(rng, prompt, rho, 8)
                trained += row
                seen.append(replace(shown, finished=(*shown.finished, *row)))
            del deferred[:size]
            continue
        prompts = draw(rng, size * 5 // 4, rho, hard_share)
        rows = [sorted(respond(rng, prompt, rho, 10)) for prompt in prompts]
        order = sorted(range(len(rows)), key=lambda i: (rows[i][7], i))
        end = rows[order[size - 1]][7]
        for place, i in enumerate(order):
            row = rows[i]
            stop = row[7] if place < size else end
            kept = row[:8] if place < size else [n for n in row if n <= end][:7]
            shown = PromptLengths(finished=tuple(kept), stopped=(stop,) * (10 - len(kept)))
            if place < size:
                trained += kept
                seen.append(shown)
            else:
                deferred.append((prompts[i], shown))
    return seen + [shown for _, shown in deferred], trained


def own_lengths(rho: float, hard_share: float = 0.0) -> list[int]:
    rng = np.random.default_rng(99)
    prompts = draw(rng, 40_000, rho, hard_share)
    return [n for prompt in prompts for n in respond(rng, prompt, rho, 2)]


def pool(prompts: Sequence[PromptLengths]) -> tuple[list[int], list[int]]:
    return [n for p in prompts for n in p.finished], [n for p in prompts for n in p.stopped]


# -- known laws ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rho", "hard_share"), [(0.0, 0.0), (0.2, 0.0), (0.5, 0.0), (0.05, 0.08), (0.4, 0.08)]
)
def test_it_finds_the_law_behind_the_race(rho, hard_share):
    rng = np.random.default_rng(1)
    prompts, trained = race(rng, rho=rho, hard_share=hard_share, size=64)
    own = own_lengths(rho, hard_share)
    model = fit_length_model(prompts, cap=CAP)
    assert np.mean(trained) < 0.9 * np.mean(own)
    assert model.mean() == pytest.approx(np.mean(own), rel=0.05)
    for q in (0.25, 0.5, 0.75, 0.9, 0.95):
        assert model.quantile(q) == pytest.approx(np.quantile(own, q), rel=0.1)


def test_where_kaplan_meier_goes_wrong():
    prompts, _ = race(np.random.default_rng(2), rho=0.4)
    own_mean = np.mean(own_lengths(0.4))
    assert kaplan_meier_mean(*pool(prompts), CAP) > 1.1 * own_mean
    assert fit_length_model(prompts, cap=CAP).mean() == pytest.approx(own_mean, rel=0.05)


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.4, 0.8])
def test_the_correlation_is_that_of_the_copula(rho):
    prompts, _ = race(np.random.default_rng(3), rho=rho)
    model = fit_length_model(prompts, cap=CAP)
    assert model.within_prompt_correlation() == pytest.approx(rho, abs=0.07)


def test_two_kinds_of_prompts_that_no_copula_makes():
    rng = np.random.default_rng(4)
    prompts = []
    for i in range(600):
        centre = 50 if i % 3 else 1000
        row = sorted(rng.integers(centre, 2 * centre, size=10).tolist())
        again = rng.integers(centre, 2 * centre, size=8).tolist() if i % 5 == 0 else []
        prompts.append(PromptLengths(finished=(*row[:8], *again), stopped=(row[7],) * 2))
    model = fit_length_model(prompts, cap=CAP)
    assert model.mean() == pytest.approx((2 * 75 + 1500) / 3, rel=0.02)
    assert model.within_prompt_correlation() > 0.6
    assert model.quantile(0.6) < 110
    assert model.quantile(0.7) > 900


def test_a_sample_stopped_before_its_first_token_says_nothing():
    prompts, _ = race(np.random.default_rng(5), rho=0.2, num_rounds=5)
    more = [replace(prompt, stopped=(*prompt.stopped, 0, 0)) for prompt in prompts]
    without, with_empty = (fit_length_model(data, cap=CAP).to_plain() for data in (prompts, more))
    assert with_empty == without


def test_a_sample_stopped_at_the_cap_is_as_long_as_the_cap():
    rows = [PromptLengths(finished=(10, 11, 12), stopped=(CAP,)) for _ in range(100)]
    model = fit_length_model(rows, cap=CAP)
    assert model.density[-1] == pytest.approx(0.25, abs=0.01)


def test_without_a_race_it_is_what_was_seen():
    rng = np.random.default_rng(5)
    prompts = [PromptLengths(finished=tuple(respond(rng, p, 0.3, 8))) for p in draw(rng, 500, 0.3)]
    finished, _ = pool(prompts)
    model = fit_length_model(prompts, cap=CAP)
    assert model.mean() == pytest.approx(np.mean(finished), rel=0.01)
    assert model.quantile(0.95) == pytest.approx(np.quantile(finished, 0.95), rel=0.05)
    assert model.tail_share(finished) == pytest.approx(1.0, abs=0.05)
    assert model.unseen() < 1e-4


# -- Kaplan-Meier --------------------------------------------------------------------------


def random_stops(num: int) -> list[PromptLengths]:
    """Lengths of 1 to 10, so that every bin is one token wide, and stops that know nothing of
    them; the longest is complete."""
    rng = np.random.default_rng(6)
    lengths, stops = rng.integers(1, 11, size=num), rng.integers(0, 14, size=num)
    complete = [PromptLengths(finished=(10,))]
    return complete + [
        PromptLengths(finished=(n,)) if n <= stop else PromptLengths(stopped=(stop,))
        for n, stop in zip(lengths.tolist(), stops.tolist(), strict=True)
    ]


@pytest.mark.parametrize("max_iterations", [0, 300])
def test_one_class_without_long_rounds_is_kaplan_meier(max_iterations):
    prompts = random_stops(400)
    model = fit_length_model(
        prompts, cap=10, num_classes=1, hard_prompts=False, max_iterations=max_iterations
    )
    assert model.mean() == pytest.approx(kaplan_meier_mean(*pool(prompts), 10), rel=1e-4)


def test_one_class_finds_kaplan_meier_from_elsewhere():
    prompts = random_stops(20_000)
    wrong = fit_length_model(
        [PromptLengths(finished=(1, 1, 1, 10))], cap=10, num_classes=1, hard_prompts=False
    )
    model = fit_length_model(
        prompts, cap=10, num_classes=1, hard_prompts=False, start=wrong, max_iterations=300
    )
    assert model.mean() == pytest.approx(kaplan_meier_mean(*pool(prompts), 10), rel=0.01)


# -- the EM --------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_classes", "hard_prompts"), [(5, True), (5, False), (1, True)])
def test_no_iteration_makes_the_objective_smaller(num_classes, hard_prompts):
    prompts, _ = race(np.random.default_rng(7), rho=0.2, hard_share=0.08, num_rounds=8)
    objectives = [
        fit_length_model(
            prompts,
            cap=CAP,
            num_classes=num_classes,
            hard_prompts=hard_prompts,
            max_iterations=n,
            tolerance=0.0,
        ).objective
        for n in range(12)
    ]
    steps = np.diff(objectives)
    assert (steps >= -1e-7).all()
    assert steps[0] > 0


def test_going_on_from_a_fit_ends_where_it_would_have_ended():
    prompts, _ = race(np.random.default_rng(8), rho=0.2)
    whole = fit_length_model(prompts, cap=CAP, max_iterations=300)
    part = fit_length_model(prompts, cap=CAP, max_iterations=100)
    rest = fit_length_model(prompts, cap=CAP, start=part, max_iterations=200)
    assert rest.mean() == pytest.approx(whole.mean(), rel=0.005)
    assert fit_length_model(prompts, cap=CAP, start=whole, tolerance=1e-4).num_iterations < 5


def test_the_same_data_give_the_same_fit():
    prompts, _ = race(np.random.default_rng(9), rho=0.2, num_rounds=10)
    first, second = (fit_length_model(prompts, cap=CAP) for _ in range(2))
    assert first.to_plain() == second.to_plain()


def test_a_prompt_without_samples_changes_nothing():
    prompts, _ = race(np.random.default_rng(9), rho=0.2, num_rounds=10)
    with_empty = fit_length_model([*prompts, PromptLengths()], cap=CAP)
    assert with_empty.mean() == pytest.approx(fit_length_model(prompts, cap=CAP).mean(), rel=1e-3)


# -- what a model tells --------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LengthModel:
    prompts, _ = race(np.random.default_rng(10), rho=0.3)
    return fit_length_model(prompts, cap=CAP)


def test_a_checkpoint_keeps_every_bit(model):
    again = LengthModel.from_plain(json.loads(json.dumps(model.to_plain())))
    assert again.to_plain() == model.to_plain()
    assert again.density.tobytes() == model.density.tobytes()
    assert again.quantile(0.9) == model.quantile(0.9)


def test_samples_have_the_law_of_the_model(model):
    lengths = model.sample(np.random.default_rng(11), 20_000, 4)
    assert lengths.shape == (20_000, 4)
    assert lengths.min() >= 1
    assert lengths.max() == CAP
    assert lengths.mean() == pytest.approx(model.mean(), rel=0.03)
    for q in (0.1, 0.5, 0.9, 0.95):
        assert np.quantile(lengths, q) == pytest.approx(model.quantile(q), rel=0.05)
    logs = np.log(lengths)
    between = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert between == pytest.approx(model.within_prompt_correlation(), abs=0.03)
    again = model.sample(np.random.default_rng(11), 20_000, 4)
    assert (lengths == again).all()


def test_quantiles_rise_from_the_shortest_to_the_cap(model):
    quantiles = [model.quantile(q) for q in np.linspace(0, 1, 101)]
    assert quantiles == sorted(quantiles)
    assert 1 <= quantiles[0] < 100
    assert quantiles[-1] == CAP


def test_the_tail_share_counts_what_is_beyond_the_quantile(model):
    beyond = int(model.quantile(0.95)) + 500
    assert model.tail_share([10] * 100) == 0.0
    whole = model.tail_share([10] * 95 + [beyond] * 5)
    assert 0.85 < whole <= 1.0  # the own tail begins with the bin that the quantile is in
    assert model.tail_share([10] * 98 + [beyond] * 2) == pytest.approx(0.4 * whole)


def test_what_was_only_stopped_is_unseen():
    rows = [PromptLengths(finished=(10, 11, 12), stopped=(13,)) for _ in range(100)]
    assert fit_length_model(rows, cap=CAP).unseen() == pytest.approx(0.25, abs=0.02)


@given(st.integers(2, 200_000))
@settings(max_examples=50)
def test_bins_cover_every_length_up_to_the_cap(cap):
    starts = bin_starts(cap)
    assert starts[0] == 1
    assert starts[-1] == cap
    assert (np.diff(starts) >= 1).all()
    # 9 % wide, but for rounding.
    assert (starts[1:] <= np.maximum(starts[:-1] * 1.0906 + 1, starts[:-1] + 1)).all()


LENGTHS = st.lists(st.integers(0, 300), max_size=6).map(tuple)
PROMPTS = st.lists(st.builds(PromptLengths, finished=LENGTHS, stopped=LENGTHS), min_size=1)


@given(PROMPTS)
@settings(max_examples=40, deadline=None)
def test_any_data_give_a_distribution(prompts):
    if not any(prompt.finished for prompt in prompts):
        return
    model = fit_length_model(prompts, cap=300, max_iterations=5)
    assert model.density.sum() == pytest.approx(1.0)
    assert (model.class_densities >= 0).all()
    assert np.isfinite(model.objective)
    assert 0 <= model.mean() <= 300
    assert 1 <= model.quantile(0.5) <= 300
    assert 0 <= model.within_prompt_correlation() <= 1


# -- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no complete response"),
        ([PromptLengths(stopped=(5,))], {}, "no complete response"),
        ([PromptLengths(finished=(11,))], {}, "length of 11 tokens"),
        ([PromptLengths(finished=(-1,))], {}, "length of -1 tokens"),
        ([PromptLengths(finished=(5,), stopped=(12,))], {}, "length of 12 tokens"),
        ([PromptLengths(finished=(1,))], {"num_classes": 0}, "at least one class"),
        ([PromptLengths(finished=(1,))], {"cap": 1}, "cap must be at least 2"),
    ],
)
def test_bad_input_is_refused(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        fit_length_model(prompts, **{"cap": 10, **options})


def test_a_start_with_another_cap_or_other_classes_is_refused():
    prompts = [PromptLengths(finished=(1, 5))]
    start = fit_length_model(prompts, cap=10)
    with pytest.raises(ValueError, match="a cap of 10 tokens"):
        fit_length_model(prompts, cap=12, start=start)
    with pytest.raises(ValueError, match="10 classes"):
        fit_length_model(prompts, cap=10, num_classes=3, start=start)
    with pytest.raises(ValueError, match="10 classes"):
        fit_length_model(prompts, cap=10, hard_prompts=False, start=start)


def test_questions_without_an_answer_are_refused(model):
    with pytest.raises(ValueError, match="between 0 and 1"):
        model.quantile(1.5)
    with pytest.raises(ValueError, match="outside 0 to the cap"):
        model.bins([CAP + 1])
    with pytest.raises(ValueError, match="no lengths"):
        model.tail_share([])


def test_the_structure_is_the_one_that_explains_the_prompts():
    """Lengths that are the task's take many classes, lengths that are luck take few."""
    rng = np.random.default_rng(5)
    tasks = [
        PromptLengths(finished=tuple((center * rng.uniform(0.9, 1.1, 8)).astype(int).tolist()))
        for center in rng.choice([12, 20, 33, 55, 90, 150, 250], 400)
    ]
    assert choose_length_model(tasks, cap=CAP).class_weights.size == 12
    luck = [
        PromptLengths(finished=tuple(np.exp(rng.normal(5.0, 0.6, 8)).astype(int).tolist()))
        for _ in range(400)
    ]
    chosen = choose_length_model(luck, cap=CAP)
    assert chosen.class_weights.size == 10  # five and their twins
    again = choose_length_model(luck, cap=CAP, start=chosen)
    assert again.class_weights.size == 10
