"""Layers of stages, budgets of micro-batches, and costs that are fitted."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.packs import plan_packs
from rollpacker.pipeline.plan.plan import ready_choosers
from rollpacker.pipeline.plan.split import BUDGET_FACTOR, check_layers, plan_budget, split_layers
from rollpacker.pipeline.plan.virtual_time import run
from rollpacker.pipeline.plan.work import (
    KINDS,
    Link,
    Load,
    OpCost,
    StageCost,
    Work,
    constant,
    fit_op_cost,
    fit_stage_cost,
)


def slowest(layers, layer_s, last_s, slowness) -> float:
    ends = list(itertools.accumulate(layers))
    sums = [sum(layer_s[end - n : end]) for n, end in zip(layers, ends, strict=True)]
    sums[-1] += last_s
    return max(s * f for s, f in zip(sums, slowness, strict=True))


@settings(deadline=None)
@given(
    st.lists(st.floats(0.1, 9.0), min_size=1, max_size=9),
    st.integers(1, 4),
    st.floats(0, 9),
    st.data(),
)
def test_no_split_has_a_faster_slowest_stage(layer_s, num_stages, last_s, data) -> None:
    num_stages = min(num_stages, len(layer_s))
    slowness = data.draw(st.tuples(*[st.floats(0.5, 4.0)] * num_stages))
    layers = split_layers(layer_s, num_stages, last_s=last_s, slowness=slowness)
    check_layers(layers, num_layers=len(layer_s), num_stages=num_stages)
    cuts = itertools.combinations(range(1, len(layer_s)), num_stages - 1)
    best = min(
        slowest(
            [b - a for a, b in itertools.pairwise((0, *cut, len(layer_s)))],
            layer_s, last_s, slowness,
        )
        for cut in cuts
    )  # fmt: skip
    assert slowest(layers, layer_s, last_s, slowness) == pytest.approx(best)


def test_layers_are_spread_evenly_and_round_what_is_heavy() -> None:
    assert split_layers([1.0] * 12, 4) == [3, 3, 3, 3]
    assert split_layers([1.0] * 12, 2, slowness=[2.0, 1.0]) == [4, 8]
    # Slowest 4 either way; the even one has no stage idle for nothing.
    assert split_layers([1.0] * 9, 4, last_s=3.0) == [2, 3, 3, 1]


def test_splits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="5 stages need as many layers, and the model has 4"):
        split_layers([1.0] * 4, 5)
    for layers, message in [
        ([6, 5], "adds up to 11, but the model has 12"),
        ([6, 6, 0], "every stage needs a layer"),
        ([12], "a number for each of 2 stages"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_layers(layers, num_layers=12, num_stages=3 if len(layers) == 3 else 2)


TRUE = OpCost(fixed_s=2e-3, per_token_s=5e-6, per_pair_s=1e-9, per_target_s=2e-6)


def loads(rng: random.Random, count: int) -> list[Load]:
    rows = ([rng.randint(10, 3000) for _ in range(rng.randint(1, 6))] for _ in range(count))
    return [Load.of(row, rng.randint(1, sum(row))) for row in rows]


def test_a_cost_is_found_again_from_exact_times() -> None:
    measured = loads(random.Random(3), 20)
    found = fit_op_cost(measured, [TRUE(load) for load in measured])
    for name in ("fixed_s", "per_token_s", "per_pair_s", "per_target_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-4)


def test_a_cost_from_noisy_times_predicts_and_is_never_negative() -> None:
    rng = random.Random(4)
    measured = loads(rng, 200)
    found = fit_op_cost(measured, [TRUE(load) * rng.lognormvariate(0, 0.3) for load in measured])
    assert min(found.fixed_s, found.per_token_s, found.per_pair_s, found.per_target_s) >= 0
    errors = [abs(found(load) / TRUE(load) - 1) for load in measured]
    assert max(errors) < 0.3


def test_what_sizes_cannot_tell_apart_is_left_out() -> None:
    same = [Load.of([100])] * 5
    found = fit_op_cost(same, [0.5] * 5)
    assert found(same[0]) == pytest.approx(0.5)
    assert found(Load.of([])) == 0.0, "no fixed part is made up"
    alone = fit_op_cost([Load(tokens=10)], [0.1])
    assert alone.per_token_s == pytest.approx(0.01)


def stage_costs(num_stages: int, fixed_s: float) -> list[StageCost]:
    cost = OpCost(fixed_s=fixed_s, per_token_s=1e-5)
    return [StageCost(cost, cost, cost)] * num_stages


def test_a_budget_is_smaller_where_a_pipeline_is_deep_and_larger_where_ops_cost_much() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(50, 800) for _ in range(100)]

    def chosen(num_stages: int, fixed_s: float) -> int:
        links = [Link()] * (num_stages - 1)
        return plan_budget(lengths, stage_costs(num_stages, fixed_s), links, most_tokens=32768)

    assert chosen(8, 1e-3) < chosen(2, 1e-3) < chosen(2, 30e-3)
    assert chosen(1, 1e-3) >= sum(lengths) / 2, "one stage has no bubble to shrink"


def test_no_budget_that_is_tried_has_a_quicker_sweep() -> None:
    lengths = [400, 300, 200, 100] * 8
    costs, links = stage_costs(2, 1e-3), [Link(0.01, 1e9)]

    def makespan_s(budget: int) -> float:
        packs = [[lengths[i] for i in pack] for pack in plan_packs(lengths, budget)]
        work = Work.of(costs, [Load.of(pack) for pack in packs])
        return run(ready_choosers(2), work, constant(links)).makespan_s

    chosen = plan_budget(lengths, costs, links, most_tokens=8192)
    assert chosen <= 8192
    tried = [round(8192 / BUDGET_FACTOR**step) for step in range(12)]
    assert makespan_s(chosen) == min(map(makespan_s, tried))
    assert plan_budget([], costs, links, most_tokens=8192) == 8192


def test_a_sample_longer_than_the_budget_has_a_micro_batch_of_its_own() -> None:
    lengths = [9000, 10, 10]
    chosen = plan_budget(lengths, stage_costs(2, 1e-3), [Link()], most_tokens=4096)
    assert chosen <= 4096 and len(plan_packs(lengths, chosen)) == 2


def test_the_work_of_a_stage_adds_up() -> None:
    rng = random.Random(2)
    measured = loads(rng, 6)
    stage = fit_stage_cost({kind: (measured, [TRUE(x) for x in measured]) for kind in KINDS})
    work = Work.of([stage, stage], measured, bytes_per_token=2.0)
    assert work.stage_s(1) == pytest.approx(3 * sum(TRUE(x) for x in measured), rel=1e-6)
    assert work.message_bytes == tuple(2 * x.tokens for x in measured)
    assert work.mean_s("W")[0] == pytest.approx(sum(TRUE(x) for x in measured) / 6, rel=1e-6)
