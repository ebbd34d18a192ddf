"""What the turns of a trajectory are worth, all rewards together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollpacker.environments.environment import Episode
from rollpacker.rewards.environment_reward import EnvironmentReward, EnvironmentRewardConfig
from rollpacker.rewards.reward import RewardConfig, RewardInput, Scored
from rollpacker.rewards.shared import Shared
from rollpacker.rewards.weighted import Weighted, WeightedReward
from rollpacker.sandbox.sandbox import SandboxConfig
from tests.rewards.plain import sample
from tests.rewards.test_weighted import Part


def played(rewards: tuple[float | None, ...], num_drawn: tuple[int, ...]) -> RewardInput:
    return replace(sample(), episode=Episode(messages=(), rewards=rewards, num_drawn=num_drawn))


def verdict(one: RewardInput, *functions: tuple[float, float]) -> Scored:
    """Of the environment with weight 0.5, and functions that say so much with that weight."""
    shared, entry = Shared(SandboxConfig()), RewardConfig(function="environment", weight=0.5)
    environment = EnvironmentReward(
        EnvironmentRewardConfig(), entry=entry, name="environment", shared=shared
    )
    parts = [Weighted(environment, entry)] + [
        Weighted(Part(f"f{n}", value), RewardConfig(function="m:f", weight=weight))
        for n, (value, weight) in enumerate(functions)
    ]
    (found,) = asyncio.run(WeightedReward(parts, shared).score([one]))
    assert isinstance(found, Scored)
    return found


def test_functions_count_at_the_last_turn() -> None:
    found = verdict(played((1.0, None, -2.0), (3, 4, 5)), (1.0, 3.0), (2.0, 0.25))
    assert found.turns == (0.5, 0.0, -1.0 + 3.0 + 0.5)
    assert found.value == pytest.approx(sum(found.turns))


def test_a_turn_that_was_cut_off_has_what_is_said_of_the_whole() -> None:
    assert verdict(played((1.0, 0.5), (3, 4, 5))).turns == (0.5, 0.25, 0.0)
    assert verdict(played((1.0,), (3, 4)), (1.0, 2.0)).turns == (0.5, 2.0)
    assert verdict(played((), (3,)), (1.0, 2.0)).turns == (2.0,)


def test_one_turn_has_the_whole_value() -> None:
    found = verdict(played((0.1,), (3,)), (0.7, 0.3), (0.9, 0.1))
    assert found.turns == (found.value,)


def test_single_responses_have_no_turns() -> None:
    shared = Shared(SandboxConfig())
    parts = [Weighted(Part("f"), RewardConfig(function="m:f"))]
    (found,) = asyncio.run(WeightedReward(parts, shared).score([sample()]))
    assert isinstance(found, Scored) and found.turns == ()
