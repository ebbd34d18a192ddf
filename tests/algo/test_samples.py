"""From groups of responses to the samples of a step."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch

from rollpacker.algo import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import Response
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.trainer import NonFiniteError, TokenScores

CONFIG = AlgorithmConfig()
SIZES = (3, 1, 4), (2, 5, 2)
"""Response tokens of each sample of each group."""


def make_groups(rewards=((1.0, 0.0, 2.0), (0.0, 0.0, 3.0))):
    draw = torch.Generator().manual_seed(0)
    return [
        [
            (
                Response(
                    sample=SampleId(PromptId("train", 0, row), index, 0),
                    prompt_tokens=(7, 8),
                    tokens=tuple(range(3, 3 + size)),
                    log_probs=tuple((-torch.rand(size, generator=draw)).tolist()),
                    finish_reason="length" if size == 5 else "stop",
                    version=0,
                ),
                reward,
            )
            for index, (size, reward) in enumerate(zip(sizes, of_group, strict=True))
        ]
        for row, (sizes, of_group) in enumerate(zip(SIZES, rewards, strict=True))
    ]


def make_scores(groups, *names):
    draw = torch.Generator().manual_seed(1)
    return {
        response.sample: TokenScores(
            **{
                name: tuple((-torch.rand(len(response.tokens), generator=draw)).tolist())
                for name in names
            }
        )
        for group in groups
        for response, _ in group
    }


def test_samples_carry_what_the_engine_produced():
    groups = make_groups()
    samples, metrics = build_train_samples(groups, AlgorithmConfig(name="dr_grpo", fixed_length=9))
    flat = [response for group in groups for response, _ in group]
    for sample, response in zip(samples, flat, strict=True):
        assert sample.sample == response.sample
        assert sample.prompt_tokens == response.prompt_tokens
        assert sample.response_tokens == response.tokens
        assert sample.rollout_log_probs == response.log_probs
        assert sample.token_weight == pytest.approx(1 / (6 * 9))
        assert (sample.ref_log_probs, sample.values, sample.returns) == (None, None, None)
    assert [sample.advantage for sample in samples] == [0, -1, 1, -1, -1, 2]
    assert metrics == {
        "critic/advantages/mean": 0,
        "critic/advantages/max": 2,
        "critic/advantages/min": -1,
        "critic/zero_advantages": pytest.approx(1 / 6),
    }


def test_the_weights_of_a_step_add_up_to_one():
    for aggregation in ("token-mean", "sequence-mean-token-mean"):
        config = AlgorithmConfig(loss_aggregation=aggregation)
        samples, _ = build_train_samples(make_groups(), config)
        total = sum(s.token_weight * len(s.response_tokens) for s in samples)
        assert total == pytest.approx(1)


def test_weights_multiply_and_leave_the_denominators():
    plain, _ = build_train_samples(make_groups(), CONFIG)
    weights = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    weighted, _ = build_train_samples(make_groups(), CONFIG, weights=weights)
    for before, after, weight in zip(plain, weighted, chain(*weights), strict=True):
        assert after.token_weight == pytest.approx(weight * before.token_weight)
        assert after.advantage == before.advantage


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "fixed-length"])
def test_groups_that_come_early_differ_by_one_factor(aggregation):
    config = AlgorithmConfig(loss_aggregation=aggregation, mask_truncated=True)
    groups = make_groups()
    whole, _ = build_train_samples(groups, config, max_response_tokens=8)
    early, _ = build_train_samples(groups[1:], config, partial=True, max_response_tokens=8)
    assert [sample.advantage for sample in early] == [sample.advantage for sample in whole[3:]]
    factors = [
        late.token_weight / soon.token_weight
        for late, soon in zip(whole[3:], early, strict=True)
        if soon.token_weight
    ]
    assert factors == pytest.approx([factors[0]] * 2)
    one_by_one, _ = build_train_samples(groups[:1], config, partial=True, max_response_tokens=8)
    in_full = {"token-mean": 1, "sequence-mean-token-mean": 1 / 3, "fixed-length": 1 / 8}
    assert one_by_one[0].token_weight == in_full[aggregation]  # the denominator is not in it


def test_truncated_responses_are_left_out():
    samples, _ = build_train_samples(make_groups(), AlgorithmConfig(mask_truncated=True))
    weights = [sample.token_weight for sample in samples]
    assert weights == pytest.approx([1 / 12] * 4 + [0.0] + [1 / 12])
    kept, _ = build_train_samples(make_groups(), CONFIG)
    assert [s.advantage for s in samples] == [s.advantage for s in kept]


def test_long_responses_lose_reward():
    config = AlgorithmConfig(normalize_mean="none", normalize_std="none", overlong_buffer_tokens=2)
    samples, _ = build_train_samples(make_groups(), config, max_response_tokens=5)
    assert [sample.advantage for sample in samples] == [1, 0, 1.5, 0, -1, 3]


def test_ppo_samples():
    groups = make_groups()
    scores = make_scores(groups, "values")
    config = AlgorithmConfig(name="ppo", gae_lambda=1.0, whiten=False)
    samples, metrics = build_train_samples(groups, config, scores=scores)
    rewards = [reward for group in groups for _, reward in group]
    for sample, reward in zip(samples, rewards, strict=True):
        values = scores[sample.sample].values
        assert sample.values == values
        assert sample.returns == pytest.approx([reward] * len(values))  # nothing is discounted
        assert sample.advantage == pytest.approx([reward - value for value in values])
    assert metrics["critic/returns/mean"] == pytest.approx(
        sum(r * n for r, n in zip(rewards, chain(*SIZES), strict=True)) / 17
    )
    assert {"critic/values/mean", "critic/explained_variance"} < set(metrics)


def test_a_kl_penalty_in_the_reward():
    groups = make_groups()
    scores = make_scores(groups, "log_probs", "ref_log_probs")
    config = AlgorithmConfig(
        name="rloo", kl_coef=0.5, normalize_mean="group", loss_aggregation="token-mean"
    )
    samples, metrics = build_train_samples(groups, config, scores=scores)
    kl = {sample: sum(of.log_probs) - sum(of.ref_log_probs) for sample, of in scores.items()}
    shaped = [[reward - 0.5 * kl[r.sample] for r, reward in group] for group in groups]
    expected = [value - sum(group) / 3 for group in shaped for value in group]
    assert [sample.advantage for sample in samples] == pytest.approx(expected)
    assert all(s.ref_log_probs == scores[s.sample].ref_log_probs for s in samples)
    assert metrics["critic/kl_reward/mean"] == pytest.approx(sum(kl.values()) / 17)


def test_a_teacher():
    groups = make_groups()
    scores = make_scores(groups, "log_probs", "teacher_log_probs")
    samples, _ = build_train_samples(groups, AlgorithmConfig(name="distillation"), scores=scores)
    for sample in samples:
        of = scores[sample.sample]
        gaps = [t - p for t, p in zip(of.teacher_log_probs, of.log_probs, strict=True)]
        assert sample.advantage == pytest.approx(gaps)


def test_samples_of_equal_rewards_have_advantages_of_zero():
    _, metrics = build_train_samples(make_groups(((1.0,) * 3, (2.0,) * 3)), CONFIG)
    assert metrics["critic/zero_advantages"] == 1


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match=r"reinforce_pp .* whole step.*stream_trainer"):
        build_train_samples(make_groups(), AlgorithmConfig(name="reinforce_pp"), partial=True)


def test_missing_scores_are_named():
    groups = make_groups()
    scores = make_scores(groups, "values")
    del scores[groups[1][2][0].sample]
    for given in (scores, None):
        with pytest.raises(ValueError, match=r"needs the scores of sample train/0/\d#0\.\d"):
            build_train_samples(groups, AlgorithmConfig(name="ppo"), scores=given)


def test_a_lonely_sample_is_named():
    groups = make_groups()
    groups[1] = groups[1][:1]
    with pytest.raises(ValueError, match=r"train/0/1#0\.0 is alone .*samples_per_prompt"):
        build_train_samples(groups, CONFIG)
    alone = AlgorithmConfig(name="reinforce_pp")
    assert len(build_train_samples(groups, alone)[0]) == 4


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_named(reward):
    groups = make_groups(((1.0, 0.0, 2.0), (0.0, 0.0, reward)))
    with pytest.raises(NonFiniteError, match=r"train/0/1#0\.2"):
        build_train_samples(groups, CONFIG)


def test_no_groups_give_no_samples():
    assert build_train_samples([], CONFIG) == ([], {})
