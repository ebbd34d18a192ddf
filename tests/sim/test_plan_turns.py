"""The search for settings on a scenario with turns whose best step can be told beforehand."""

from __future__ import annotations

import dataclasses

import pytest

from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.plan import Budget, expected_steps, plan
from rollpacker.sim.plan_ideas import OFF, ScenarioEvaluate, factor_grid, plan_base
from rollpacker.sim.scenario import CarrySpec, Cluster, RolloutSpec, Scenario, TrainSpec
from rollpacker.sim.simulate import simulate
from rollpacker.sim.turns_spec import TurnsSpec
from rollpacker.sim.workload_spec import LengthLaw

SMALL = Budget(fine=False, screen_steps=6, kept=2, second_steps=8, finalists=1, seeds=5, steps=16)
POOL = TailBatchingConfig(stragglers="pool", prompt_factor=2.0)
SLOW_S, SLOW_RATE = 50.0, 0.05
NUM_TURNS, NUM_PROMPTS, NUM_SAMPLES = 2, 8, 2


def agent(seconds: dict[float, float]) -> Scenario:
    """All trajectories are alike but for the seconds of their answers, which are a sample's own in
    every launch."""
    return Scenario(
        name="agent",
        model="qwen2.5-7b",
        cluster=Cluster(gpu="h800", gpus=8),
        rollout=RolloutSpec(
            prompts_per_step=NUM_PROMPTS,
            samples_per_prompt=NUM_SAMPLES,
            max_response_tokens=256,
            prompt_tokens=200,
        ),
        lengths=LengthLaw(quantiles={0.5: 100}),
        turns=TurnsSpec(
            messages_quantiles={0.5: NUM_TURNS},
            given_tokens_quantiles={0.5: 50},
            seconds_quantiles=seconds,
            max_tokens=2048,
        ),
        train=TrainSpec(fixed_s=20),
        sync_s=5,
        tail_batching=POOL,
    )


def test_slow_answers_are_gathered_and_the_step_is_as_short_as_they_allow() -> None:
    """Every slow prompt is waited for once: at best in rounds of nothing else, a fifth of all."""
    even = dataclasses.replace(agent({0.5: 1.0}), steps=4)
    off = dataclasses.replace(even.tail_batching, enabled=False)
    even_s = simulate(dataclasses.replace(even, tail_batching=off)).mean["total_s"]
    slow_prompts = 1 - (1 - SLOW_RATE) ** (NUM_TURNS * NUM_SAMPLES)
    slow_steps = 1 - (1 - slow_prompts) ** NUM_PROMPTS
    scenario = agent({1 - SLOW_RATE: 1.0, 1 - SLOW_RATE + 0.001: SLOW_S})
    base, shares = plan_base(scenario), [0.0]
    found = plan(
        base,
        ScenarioEvaluate(scenario=scenario),
        budget=SMALL,
        progress=lambda stage, done, total, share: shares.append(share),
    )
    assert found.untailed is not None
    assert found.untailed.step_s >= even_s + 0.8 * slow_steps * SLOW_S
    assert found.pays and found.best.candidate.changes["tail_batching.stragglers"] == "queue"
    waited_s = found.best.step_s - even_s
    assert slow_prompts * SLOW_S - 1 <= waited_s <= 0.5 * SLOW_S
    assert found.best.shift == pytest.approx(0.0, abs=0.01)  # trajectories are as long as they are
    # How much there is to simulate was told from the start.
    assert shares == sorted(shares) and shares[-1] < 1.0
    assert 0.5 < found.num_simulated / expected_steps(base, SMALL) < 1.5


def test_with_turns_the_complement_rule_is_not_tried() -> None:
    """It does not apply to trajectories."""
    scenario = dataclasses.replace(agent({0.5: 1.0}), carry=CarrySpec(mismatch=0.01))
    for turns, rules in ((scenario.turns, {True}), (None, {True, False})):
        base = plan_base(dataclasses.replace(scenario, turns=turns))
        grid = [idea for idea in factor_grid(base, fine=True) if idea is not OFF]
        assert {idea.changes["tail_batching.complement"] for idea in grid} == rules
