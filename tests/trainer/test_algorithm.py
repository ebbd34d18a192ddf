"""GRPO's pure functions, and the samples made with them."""

from __future__ import annotations

import math

import pytest
import torch

from rollpacker.algo.base import AlgorithmConfig
from rollpacker.algo.grpo import advantages, policy_loss, token_weights
from rollpacker.algo.table import ALGORITHMS
from rollpacker.trainer.base import NonFiniteError
from rollpacker.trainer.samples import build_train_samples
from tests.trainer.tiny import responses

CONFIG = AlgorithmConfig()


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_by_hand():
    rewards, groups = tensor(1, 5, 0, 0, 2, 5), torch.tensor([0, 1, 0, 0, 0, 1])
    plain = advantages(rewards, groups, config=AlgorithmConfig(normalize_std=False))
    assert plain.tolist() == [0.25, 0, -0.75, -0.75, 1.25, 0]
    std = math.sqrt((0.25**2 + 2 * 0.75**2 + 1.25**2) / 3)
    scaled = advantages(rewards, groups, config=CONFIG)
    assert torch.allclose(scaled, plain / (std + 1e-4))


def test_no_verdict_is_left_out_of_the_baseline():
    rewards, groups = tensor(1, math.nan, 3, math.nan, 7), torch.tensor([0, 0, 0, 1, 1])
    result = advantages(rewards, groups, config=AlgorithmConfig(normalize_std=False))
    assert result.isnan().tolist() == [False, True, False, True, False]
    assert result[[0, 2, 4]].tolist() == [-1, 1, 0]


def test_groups_without_signal_give_exactly_zero():
    rewards = tensor(0.1, 0.1, 0.1, 0.3)
    result = advantages(rewards, torch.tensor([0, 0, 0, 1]), config=CONFIG)
    assert result.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.2, 1.5])
@pytest.mark.parametrize("advantage", [-2.0, 3.0])
def test_clipped_loss_by_hand(ratio, advantage):
    loss, sums = policy_loss(tensor(math.log(ratio)), tensor(0.0), tensor(advantage), config=CONFIG)
    clipped = min(max(ratio, 0.8), 1.28)
    assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))
    assert sums["clip_ratio_low"] == (ratio < 0.8 and advantage < 0)
    assert sums["clip_ratio_high"] == (ratio > 1.28 and advantage > 0)


def test_masked_tokens_count_for_nothing():
    values = tensor(-0.1, math.nan), tensor(-0.3, 0.0), tensor(1.0, 1.0)
    mask = torch.tensor([True, False])
    loss, sums = policy_loss(*values, mask, config=CONFIG, ref_logprobs=tensor(-0.1, 0))
    assert loss[1] == 0 and loss[0] == pytest.approx(-math.exp(0.2))
    assert sums["kl"] == 0


def test_kl_estimate():
    config = AlgorithmConfig(kl_coef=0.5)
    loss, sums = policy_loss(
        tensor(-1.0), tensor(-1.0), tensor(0.0), config=config, ref_logprobs=tensor(-1.4)
    )
    kl = math.exp(-0.4) + 0.4 - 1
    assert sums["kl"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(0.5 * kl)


def test_token_weights():
    def weights(name):
        return token_weights([1, 4, 5], config=AlgorithmConfig(loss_aggregation=name))

    assert weights("token-mean") == pytest.approx([0.1, 0.1, 0.1])
    assert weights("sequence-mean-token-mean") == pytest.approx([1 / 3, 1 / 12, 1 / 15])
    assert weights("sequence-mean-token-sum") == pytest.approx([1 / 3] * 3)


def test_every_configurable_algorithm_has_a_row():
    from typing import get_args, get_type_hints

    assert set(get_args(get_type_hints(AlgorithmConfig)["name"])) == set(ALGORITHMS)


def test_samples_carry_what_the_engine_produced():
    groups = responses(0)
    batch, metrics = build_train_samples(groups, CONFIG)
    flat = [pair for group in groups for pair in group]
    assert [s.sample for s in batch] == [r.sample for r, _ in flat]
    assert all(s.response_tokens == r.tokens for s, (r, _) in zip(batch, flat, strict=True))
    total = sum(s.token_weight * len(s.response_tokens) for s in batch)
    assert total == pytest.approx(1)
    found = [sample.advantage for sample in batch]
    assert metrics["critic/advantages/mean"] == pytest.approx(sum(found) / len(found))
    assert metrics["critic/advantages/min"] == min(found)
    assert metrics["critic/advantages/max"] == max(found)


def test_a_reward_that_is_no_number_is_named():
    groups = responses(0)
    groups[1][2] = (groups[1][2][0], math.nan)
    with pytest.raises(NonFiniteError, match=r"train/0/1#0\.2"):
        build_train_samples(groups, CONFIG)


def test_no_groups_give_no_samples():
    assert build_train_samples([], CONFIG) == ([], {})
