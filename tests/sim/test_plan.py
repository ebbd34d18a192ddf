"""The search for settings: on made-up systems of known optimum, and on a small real scenario."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cli.plan_text import explain
from rollpacker.cluster.sim.spec import load_cluster
from rollpacker.config.document import ConfigError
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.sim.plan import Budget, compare, plan
from rollpacker.sim.plan_ideas import (
    OFF,
    Base,
    Candidate,
    Idea,
    ScenarioEvaluate,
    changed,
    factors_idea,
    neighbours,
    on_shared_pools,
    order_idea,
    plan_base,
)
from rollpacker.sim.plan_result import Plan, measure, round_shares
from rollpacker.sim.plan_shared import PoolPrices, pool_prices
from rollpacker.sim.result import BUBBLE_CAUSES, StepResult, SystemResult
from rollpacker.sim.scenario import CarrySpec, Cluster, RolloutSpec, Scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.workload_spec import LengthLaw, RewardStage

ROOT = Path(__file__).parents[2]
SMALL = Budget(fine=False, screen_steps=8, kept=4, second_steps=12, finalists=2, seeds=3, steps=12)
POLICY_MEAN = 1000.0


def step(kind: str, seconds: float, tokens: float, samples: int = 64) -> StepResult:
    return StepResult(
        kind=kind,
        rollout_s=seconds,
        reward_s=0.0,
        train_s=0.0,
        sync_s=0.0,
        total_s=seconds,
        tensor_parallel=1,
        preemptions=0,
        max_response_tokens=0,
        tokens_generated=0,
        tokens_trained=round(tokens * samples),
        num_trained=samples,
        num_streamed=0,
    )


def result(steps: list[StepResult]) -> SystemResult:
    trained = sum(s.tokens_trained for s in steps)
    return SystemResult(
        steps=tuple(steps),
        tokens_generated=0,
        tokens_trained=trained,
        trained_length_mean=trained / sum(s.num_trained for s in steps),
        policy_length_mean=POLICY_MEAN,
        policy_length_p95=POLICY_MEAN,
        tail_trained_share=0.0,
        bubble=dict.fromkeys(BUBBLE_CAUSES, 0.0),
        device_seconds=1.0,
        num_releases=0,
    )


@dataclass(frozen=True)
class MadeUp:
    """A step takes 100 s less what the switches and the factors save. More samples are faster and
    shorten more. `noise_s` goes up and down with the seed, the same for every candidate."""

    base: Base
    saved_s: dict[str, float] = field(default_factory=dict)
    """By switch."""
    noise_s: float = 5.0
    own_noise_s: float = 0.0
    """... and this for each candidate apart."""

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult:
        tail = self.base.tail_of(candidate)
        shares = round_shares(tail, self.base.prompts_per_step)
        assert shares is not None
        prompts, samples = tail.factors
        shift = 0.4 * (prompts - 1) + 0.8 * (samples - 1) + 0.1 * len(tail.tiers)
        seconds = 100 - 60 * (samples - 1) - 10 * (prompts - 1)
        seconds -= sum(self.saved_s.get(name, 0.0) for name in candidate.changes)
        seconds += self.noise_s * math.sin(seed)
        seconds += self.own_noise_s * math.sin(len(candidate.key) * (seed + 1))
        kinds = list(shares)
        tokens = POLICY_MEAN * (1 - shift)
        return result([step(kinds[i % len(kinds)], seconds, tokens) for i in range(steps)])


def made_base(*ideas: Idea, **tail: Any) -> Base:
    return Base(
        prompts_per_step=64,
        samples_per_prompt=8,
        tail_batching=TailBatchingConfig(**{"selection": "published", **tail}),
        ideas=ideas,
    )


def switch(name: str) -> Idea:
    return Idea(name=name, slot=name, changes={name: True})


# -- the parts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail",
    [
        {"prompt_factor": 1.25, "sample_factor": 1.25},
        {"prompt_factor": 1.5, "sample_factor": 1.0},
        {"prompt_factor": 1.25, "tiers": (Tier(prompt_factor=1.5, sample_factor=1.0),)},
    ],
)
def test_round_shares_are_what_the_core_does(tail: dict[str, Any]) -> None:
    published = TailBatchingConfig(selection="published", **tail)
    scenario = small(tail_batching=published, steps=240)
    counts = Counter(s.kind for s in simulate(scenario).steps)
    shares = round_shares(scenario.tail_batching, scenario.rollout.prompts_per_step)
    assert shares is not None and sum(shares.values()) == pytest.approx(1.0)
    assert set(counts) == set(shares)
    for kind, share in shares.items():
        assert counts[kind] / 240 == pytest.approx(share, abs=0.02)


def test_round_shares_of_special_cases() -> None:
    assert round_shares(TailBatchingConfig(enabled=False), 64) == {"plain": 1.0}
    only_samples = TailBatchingConfig(selection="published", prompt_factor=1.0, sample_factor=1.25)
    assert round_shares(only_samples, 64) == {"short": 1.0}
    assert round_shares(TailBatchingConfig(selection="published", prompt_factor="auto"), 64) is None
    assert round_shares(TailBatchingConfig(stragglers="pool", prompt_factor=2.0), 64) == {
        "short": 1.0
    }
    queue = TailBatchingConfig(prompt_factor=1.5, stragglers="queue")
    assert round_shares(queue, 64) == {"short": 2 / 3, "long": 1 / 3}


def test_measure_weighs_the_kinds_as_in_the_long_run() -> None:
    # By chance a third of these steps are long rounds.
    steps = [step("short", 10, 500), step("short", 12, 500), step("long", 50, 2000)]
    found = measure(result(steps), {"short": 0.8, "long": 0.2})
    assert found.step_s == pytest.approx(0.8 * 11 + 0.2 * 50)
    assert found.shift == pytest.approx((0.8 * 500 + 0.2 * 2000) / POLICY_MEAN - 1)
    assert found.kinds_s == {"short": 11, "long": 50}


def test_measure_without_shares_or_with_other_kinds_takes_the_plain_mean() -> None:
    steps = [step("short", 10, 500), step("flush", 40, 1500)]
    for shares in (None, {"short": 0.8, "long": 0.2}):
        found = measure(result(steps), shares)
        assert found.step_s == pytest.approx(25)
        assert found.shift == pytest.approx(0.0)


def test_changed_sets_dotted_keys_and_checks_them() -> None:
    scenario = small(tail_batching=TailBatchingConfig(selection="published"))
    candidate = Candidate(ideas=(factors_idea((1.5, 1.0), (1.25, 1.25)),))
    made = changed(scenario, candidate.changes)
    assert made.tail_batching.tiers == (Tier(prompt_factor=1.25, sample_factor=1.25),)
    assert made.tail_batching.prompt_factor == 1.5
    assert dataclasses.replace(made, tail_batching=scenario.tail_batching) == scenario
    with pytest.raises(ConfigError, match=r"tail_batching\.prompt_factor must lie between"):
        changed(scenario, {"tail_batching.prompt_factor": 0.5})


def test_changed_leaves_the_changes_alone() -> None:
    changes = {"stream_trainer": {"enabled": True}, "stream_trainer.max_share": 0.5}
    assert changed(small(), changes).stream_trainer.max_share == 0.5
    assert changes["stream_trainer"] == {"enabled": True}


# -- the search --------------------------------------------------------------------


def test_finds_what_helps_and_leaves_out_what_does_not() -> None:
    base = made_base(switch("good"), switch("useless"), switch("bad"), switch("better"))
    evaluate = MadeUp(base, {"good": 4.0, "better": 9.0, "useless": 0.1, "bad": -3.0})
    found = plan(base, evaluate, budget=SMALL)
    assert {"good", "better"} <= found.best.candidate.changes.keys()
    assert not {"useless", "bad"} & found.best.candidate.changes.keys()
    assert found.best.shift >= found.current.shift
    assert found.best.saved_error_s < 0.01  # the noise is common to both
    reasons = {reason.idea.name: reason for reason in found.reasons}
    assert reasons["good"].left_out_s == pytest.approx(4.0, abs=0.01)
    assert reasons["better"].left_out_s == pytest.approx(9.0, abs=0.01)
    factors = found.best.candidate.without(reasons["good"].idea).without(reasons["better"].idea)
    assert reasons.keys() == {"good", "better", *(idea.name for idea in factors.ideas)}
    assert {idea.name for idea, _ in found.rejected} == {"useless", "bad"}


def test_of_two_ideas_for_one_slot_the_better_is_taken() -> None:
    one = Idea(name="one", slot="same", changes={"one": 1})
    two = Idea(name="two", slot="same", changes={"two": 2})
    base = made_base(one, two)
    found = plan(base, MadeUp(base, {"one": 5.0, "two": 8.0}), budget=SMALL)
    assert "two" in found.best.candidate.changes and "one" not in found.best.candidate.changes


@pytest.mark.parametrize("max_shift", [0.35, 0.2, 0.1])
def test_the_bound_is_kept_and_nearly_used_up(max_shift: float) -> None:
    base = made_base(prompt_factor=1.25, sample_factor=1.125)  # a shift of 0.2
    found = plan(base, MadeUp(base), budget=SMALL, max_shift=max_shift)
    assert -max_shift <= found.best.shift <= -max_shift + 0.08
    assert all(finding.shift >= -max_shift for finding in found.ranked)
    assert found.current_keeps == (max_shift >= 0.2)
    assert (found.best.saved_s < 0) == (max_shift < 0.2)


def test_factors_between_those_of_the_grid_are_found() -> None:
    base = made_base(prompt_factor=1.25, sample_factor=1.125)
    found = plan(base, MadeUp(base), budget=SMALL, max_shift=0.24)
    # (1.125, 1.25) is in the grid and the fastest, but shortens by 0.25.
    assert found.best.candidate.changes["tail_batching.prompt_factor"] == 1.09375
    assert found.best.candidate.changes["tail_batching.sample_factor"] == 1.25


def test_with_debias_the_raw_shift_bounds_nothing() -> None:
    base = made_base(prompt_factor=1.25, sample_factor=1.125, debias="moments")
    found = plan(base, MadeUp(base), budget=SMALL, max_shift=0.01)
    assert found.best.shift < -0.3
    assert found.max_shift is None


def test_recommends_to_stay_if_nothing_is_faster() -> None:
    base = made_base(switch("bad"), enabled=False)
    found = plan(base, MadeUp(base, {"bad": -3.0}), budget=SMALL)
    assert found.stays and found.reasons == ()
    assert found.best.step_s == found.current.step_s


def test_a_gain_inside_the_noise_is_none() -> None:
    base = made_base(switch("lucky"), enabled=False)
    found = plan(base, MadeUp(base, {"lucky": 1.0}, own_noise_s=20.0), budget=SMALL)
    assert found.stays


def test_refuses_a_bound_that_means_nothing() -> None:
    base = made_base()
    with pytest.raises(ValueError, match=r"--max-shift must be at least 0 and less than 1, not 35"):
        plan(base, MadeUp(base), budget=SMALL, max_shift=35)
    with pytest.raises(ValueError, match="--jobs must be at least 1, not 0"):
        plan(base, MadeUp(base), budget=SMALL, jobs=0)


def test_processes_change_nothing() -> None:
    base = made_base(switch("good"))
    evaluate = MadeUp(base, {"good": 4.0})
    candidates = [Candidate(), Candidate(ideas=base.ideas)]
    alone = compare(base, evaluate, candidates, seeds=range(2), steps=4)
    assert compare(base, evaluate, candidates, seeds=range(2), steps=4, jobs=2) == alone


# -- a real scenario ---------------------------------------------------------------


def small(**settings: Any) -> Scenario:
    return Scenario(
        **{
            "name": "small",
            "model": "qwen2.5-7b",
            "cluster": Cluster(gpu="h800", gpus=8),
            "rollout": RolloutSpec(
                prompts_per_step=8, samples_per_prompt=4, max_response_tokens=4096
            ),
            "lengths": LengthLaw(quantiles={0.1: 100, 0.5: 500, 0.95: 2000, 0.99: 4096}),
            "rewards": (RewardStage(kind="judge", share=1.0, calls_per_s=1.0),),
            **settings,
        }
    )


def test_a_real_scenario_is_planned_on_its_own_terms() -> None:
    scenario = small(tail_batching=TailBatchingConfig(selection="published", race="scored"))
    evaluate = ScenarioEvaluate(scenario=scenario)
    base = plan_base(scenario)
    assert {"race", "order", "reward_wait"} <= {idea.slot for idea in base.ideas}
    assert "speculation" not in {idea.slot for idea in base.ideas}  # its engine has none
    found = plan(base, evaluate, budget=SMALL)
    assert not found.stays
    assert found.best.shift >= found.current.shift
    # It is true of seeds that the search has not seen, too.
    now, best = compare(
        base, evaluate, [Candidate(), found.best.candidate], seeds=range(5000, 5003), steps=30
    )
    assert best.step_s < now.step_s
    assert found.oracle is not None and abs(found.oracle.shift) < 0.1


# -- where only the order may change -----------------------------------------------


HEAVY = LengthLaw(quantiles={0.1: 100, 0.5: 500, 0.95: 2000, 0.99: 4096})


def order_plan(**settings: Any) -> Plan:
    scenario = small(rewards=(), **settings)
    return plan(plan_base(scenario), ScenarioEvaluate(scenario=scenario), budget=SMALL)


def test_without_mismatches_a_large_pool_wins_at_no_shift() -> None:
    found = order_plan(lengths=HEAVY, tail_batching=TailBatchingConfig(prompt_factor=1.125))
    changes = found.best.candidate.changes
    assert changes["tail_batching.stragglers"] == "pool" and found.best.shift == 0.0
    assert changes["tail_batching.prompt_factor"] >= 1.5
    assert found.max_shift == 0.02 and found.base.order_only and found.pays
    assert found.untailed is not None and found.untailed.step_s > found.best.step_s
    assert not any("sample_factor" in key for key in changes)
    assert all(reason.left_out_s > 0 for reason in found.reasons)  # nobody misses the others


def test_mismatches_make_it_careful() -> None:
    found = order_plan(lengths=HEAVY, carry=CarrySpec(mismatch=1e-2))
    assert abs(found.best.shift) <= 0.02 + found.best.shift_error
    free = order_plan(lengths=HEAVY)
    assert found.best.step_s > free.best.step_s


def test_a_band_of_mismatches_is_kept_at_both_ends() -> None:
    carry = CarrySpec(mismatch=0.0, mismatch_band=(0.0, 0.01))
    found = order_plan(lengths=HEAVY, carry=carry)
    for finding in found.ranked:
        made = small(rewards=(), lengths=HEAVY, carry=CarrySpec(mismatch=0.01), steps=60)
        assert abs(simulate(changed(made, finding.candidate.changes)).paired_shift) < 0.06
    free = order_plan(lengths=HEAVY)
    assert free.best.step_s < found.best.step_s


def test_where_engines_are_full_and_every_response_runs_to_the_cap_it_does_not_pay() -> None:
    capped = LengthLaw(quantiles={0.01: 4096})
    rollout = RolloutSpec(
        prompts_per_step=8, samples_per_prompt=4, max_response_tokens=4096, max_running=4
    )
    found = order_plan(lengths=capped, rollout=rollout)
    assert not found.pays
    assert found.base.capped_share is not None and found.base.capped_share > 0.9
    assert "Tail batching does not pay here" in "\n".join(explain(found, corrected=False))


def test_neighbours_of_a_pool_move_one_number() -> None:
    base = dataclasses.replace(made_base(), tail_batching=TailBatchingConfig())
    pool = Candidate(ideas=(order_idea(1.5, max_deferrals=4),))
    tried = [base.tail_of(pool.with_idea(idea)) for idea in neighbours(base, pool)]
    assert {(t.prompt_factor, t.max_deferrals) for t in tried} == {
        *((1.375, 4), (1.75, 4), (1.5, 2), (1.5, 8)),
    }
    assert all(t.pooled and t.carry == "exact" for t in tried)


# -- on shared pools ---------------------------------------------------------------

PRICES = PoolPrices(rollout_per_h=14.8, train_per_h=42.24, prompts_per_step=8)


def test_a_step_on_shared_pools_costs_what_they_cost_while_they_are_held() -> None:
    waits = dataclasses.replace(
        step("plain", 30.0, 500), reward_s=50.0, train_s=8.0, sync_s=2.0, total_s=90.0
    )
    by_hand = (30 * 14.8 + 10 * 42.24) / 3600
    assert PRICES.busy_s(waits) * PRICES.per_h / 3600 == pytest.approx(by_hand)
    assert PRICES.price_of_1k_prompts(PRICES.busy_s(waits)) == pytest.approx(1000 * by_hand / 8)
    found = measure(result([waits]), {"plain": 1.0}, cost_s=PRICES.busy_s)
    assert (found.step_s, found.cost_s) == (90.0, PRICES.busy_s(waits))
    assert found.kinds_s == {"plain": PRICES.busy_s(waits)}


def test_prices_are_those_of_whole_nodes() -> None:
    pools = load_cluster(ROOT / "configs/clusters/mixed.yaml").core_pools()
    found = pool_prices(pools, {"rollout": 12, "train": 8}, 4)
    assert found.rollout_per_h == pytest.approx(16 * 1.85)
    assert found.train_per_h == pytest.approx(8 * 5.28)
    assert found.prompts_per_step == 4


@dataclass(frozen=True)
class Waits:
    """An idea makes the round shorter and the wait for verdicts longer, another the reverse."""

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult:
        reward_s, rollout_s = 40.0, 30.0
        if "early" in candidate.changes:
            rollout_s, reward_s = rollout_s - 10, reward_s + 12
        if "patient" in candidate.changes:
            rollout_s, reward_s = rollout_s + 2, reward_s - 20
        whole_s = rollout_s + reward_s + 10
        one = dataclasses.replace(
            step("plain", rollout_s, 500), reward_s=reward_s, train_s=10.0, total_s=whole_s
        )
        return result([one] * steps)


def test_what_is_best_depends_on_what_is_compared() -> None:
    base = made_base(switch("early"), switch("patient"), enabled=False)
    alone = plan(base, Waits(), budget=SMALL)
    assert [*alone.best.candidate.changes] == ["patient"]
    shared = plan(on_shared_pools(base, PRICES), Waits(), budget=SMALL)
    assert [*shared.best.candidate.changes] == ["early"]
    assert shared.best.step_s > shared.current.step_s
    assert shared.best.cost_s < shared.current.cost_s
    plain = shared.to_plain()
    assert plain["shared_pools"] == {"rollout_per_h": 14.8, "train_per_h": 42.24}
    assert plain["best"]["busy_s"] == shared.best.cost_s
    assert plain["best"]["step_s"] == shared.best.step_s
    told = "\n".join(explain(shared, corrected=False))
    assert "The pools that the job holds cost" in told and "price/1k" in told
    assert "busy_s" not in alone.to_plain()["best"] and "price/1k" not in "\n".join(
        explain(alone, corrected=False)
    )


def test_with_a_slow_judge_only_shared_pools_make_tail_batching_pay() -> None:
    """A real scenario. The judge says how long a step is; with tail batching the rollout pool is
    free earlier."""
    scenario = small(
        cluster=Cluster(gpu="h20", gpus=8, train_gpu="h800"),
        stream_trainer=StreamConfig(enabled=False),
        rewards=(RewardStage(kind="judge", share=1.0, calls_per_s=0.5),),
        tail_batching=TailBatchingConfig(race="generated"),
    )
    base = on_shared_pools(plan_base(scenario), PRICES)
    assert not any(key.startswith("stream") for idea in base.ideas for key in idea.changes)
    candidates = [Candidate(), Candidate(ideas=(OFF,))]
    evaluate = ScenarioEvaluate(scenario=scenario)
    tail, without = compare(base, evaluate, candidates, seeds=range(2), steps=30)
    assert without.step_s < 0.99 * tail.step_s
    assert tail.cost_s < 0.95 * without.cost_s


def test_the_page_has_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rows = json.loads((ROOT / "benchmarks/results/plan_shared.json").read_text())["rows"]
    page = (ROOT / "docs/simulation.md").read_text()
    assert importlib.import_module("plan_shared").table(rows) in page
    fastest, cheapest = (min(rows, key=lambda row: row[key]) for key in ("step_s", "busy_s"))
    assert fastest["setting"] == "no tail batching" and cheapest is rows[0]
