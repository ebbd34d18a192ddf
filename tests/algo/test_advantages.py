"""From rewards to advantages: baselines, length, penalties, GAE, whitening, a teacher."""

from __future__ import annotations

import math
import statistics
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.algo import AlgorithmConfig, advantages, shape_rewards, step_advantages
from rollpacker.algo.gae import discounted_sums, generalized_advantages

GRPO = AlgorithmConfig()
DR_GRPO = AlgorithmConfig(name="dr_grpo")
RLOO = AlgorithmConfig(name="rloo")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(rewards: torch.Tensor, groups: list[int], **switches: object) -> list[float]:
    return advantages(rewards, torch.tensor(groups), config=AlgorithmConfig(**switches)).tolist()


# -- baselines --------------------------------------------------------------------------


def test_by_hand():
    rewards, groups = tensor(1, 5, 0, 0, 2, 5), torch.tensor([0, 1, 0, 0, 0, 1])
    plain = advantages(rewards, groups, config=DR_GRPO)
    assert plain.tolist() == [0.25, 0, -0.75, -0.75, 1.25, 0]
    std = statistics.stdev([1, 0, 0, 2])
    scaled = advantages(rewards, groups, config=GRPO)
    assert torch.allclose(scaled, plain / (std + 1e-4))
    left_out = advantages(rewards, groups, config=RLOO)
    assert torch.allclose(left_out, tensor(1 - 2 / 3, 0, -1, -1, 2 - 1 / 3, 0))


def test_statistics_of_the_step():
    rewards, groups = [1.0, 5.0, 0.0, 2.0], [0, 0, 1, 1]
    std = statistics.stdev(rewards) + 1e-4
    of_step = of(tensor(*rewards), groups, normalize_mean="batch", normalize_std="batch")
    assert of_step == pytest.approx([(r - 2) / std for r in rewards])
    mixed = of(tensor(*rewards), groups, normalize_std="batch")
    assert mixed == pytest.approx([c / std for c in (-2, 2, -1, 1)])
    untouched = of(tensor(*rewards), groups, normalize_mean="none", normalize_std="none")
    assert untouched == rewards


@pytest.mark.parametrize("config", [DR_GRPO, RLOO])
def test_no_verdict_is_left_out(config):
    rewards, groups = tensor(1, math.nan, 3, math.nan, 7), torch.tensor([0, 0, 0, 1, 1])
    result = advantages(rewards, groups, config=config)
    assert result.isnan().tolist() == [False, True, False, True, False]
    factor = 2 if config is RLOO else 1
    assert result[[0, 2, 4]].tolist() == [-factor, factor, 0]


def test_no_verdict_is_left_out_of_the_steps_statistics():
    rewards = tensor(1, 2, math.nan, 6)
    result = of(rewards, [0, 0, 1, 1], normalize_mean="batch", normalize_std="none")
    assert result[0] == -2 and math.isnan(result[2])
    result = of(rewards, [0, 0, 1, 1], normalize_std="batch")
    assert result[0] == pytest.approx(-0.5 / (statistics.stdev([1, 2, 6]) + 1e-4))


@pytest.mark.parametrize("mean", ["group", "leave-one-out"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_groups_without_signal_give_exactly_zero(mean, std):
    rewards = tensor(0.1, 0.1, 0.1, 0.3, math.nan, 0.5, 0.6)
    result = of(rewards, [0, 0, 0, 1, 1, 2, 2], normalize_mean=mean, normalize_std=std)
    assert result[:4] == [0, 0, 0, 0]
    assert result[5] == pytest.approx(-result[6]) and result[6] > 0


def test_nothing_to_compare():
    empty = advantages(tensor(), torch.tensor([], dtype=torch.int64), config=GRPO)
    assert empty.shape == (0,)
    nothing = advantages(tensor(math.nan, math.nan), torch.tensor([0, 1]), config=GRPO)
    assert nothing.isnan().all()


# -- rewards and length -----------------------------------------------------------------


def test_overlong_responses_lose_reward():
    config = AlgorithmConfig(overlong_buffer_tokens=4, overlong_penalty=2.0)
    rewards = shape_rewards(
        tensor(1, 1, 1, 1, 1, 1), [1, 6, 7, 9, 10, 12], config=config, max_response_tokens=10
    )
    assert rewards.tolist() == [1, 1, 0.5, -0.5, -1, -1]
    with pytest.raises(ValueError, match="overlong_buffer_tokens"):
        shape_rewards(tensor(1), [1], config=config, max_response_tokens=4)
    kept = shape_rewards(tensor(1), [10], config=GRPO, max_response_tokens=None)
    assert kept.tolist() == [1]


# -- sums over time ---------------------------------------------------------------------

STEPS = st.lists(
    st.lists(
        st.tuples(st.floats(-3, 3, allow_subnormal=False), st.floats(-3, 3, allow_subnormal=False)),
        min_size=1,
        max_size=7,
    ),
    min_size=1,
    max_size=4,
)


def textbook_gae(rewards, values, gamma, lam):
    """Equation 16 of the paper: the sum of discounted errors, token by token."""
    following = [*values[1:], 0.0]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - now) * errors[later] for later in range(now, len(errors)))
        for now in range(len(errors))
    ]


@settings(max_examples=40, deadline=None)
@given(samples=STEPS, gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_textbooks(samples, gamma, lam):
    rewards = [[r for r, _ in sample] for sample in samples]
    values = [[v for _, v in sample] for sample in samples]
    lengths = [len(sample) for sample in samples]
    found, returns = generalized_advantages(
        tensor(*chain(*rewards)),
        tensor(*chain(*values)),
        lengths,
        gamma=gamma,
        gae_lambda=lam,
    )
    expected = [
        a for r, v in zip(rewards, values, strict=True) for a in textbook_gae(r, v, gamma, lam)
    ]
    torch.testing.assert_close(found, tensor(*expected), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, tensor(*expected) + tensor(*chain(*values)))


def test_discounted_sums_stay_within_a_sample():
    found = discounted_sums(tensor(1, 2, 4, 8, 16), [2, 3], 0.5)
    assert found.tolist() == [2, 2, 12, 16, 16]


# -- whole steps ------------------------------------------------------------------------

REWARDS, GROUPS, LENGTHS = tensor(1.0, 0.0, 3.0), torch.tensor([0, 0, 1]), [2, 1, 3]
LOG_PROBS = tensor(-1.0, -2.0, -0.5, -0.1, -0.2, -0.3)
OTHERS = tensor(-1.5, -1.0, -0.5, -0.4, -0.2, -0.6)


def step(config, **scores):
    return step_advantages(REWARDS, GROUPS, LENGTHS, config=config, **scores)


def test_group_algorithms_need_nothing_else():
    found = step_advantages(tensor(1.0, 3.0), torch.tensor([0, 0]), [4, 2], config=DR_GRPO)
    assert found.advantages.tolist() == [-1, 1] and not found.per_token
    assert found.returns is None and found.metrics == {}


def test_kl_of_a_whole_response_in_its_reward():
    config = AlgorithmConfig(name="rloo", kl_coef=0.5)
    found = step(config, log_probs=LOG_PROBS, ref_log_probs=OTHERS)
    kl = LOG_PROBS - OTHERS
    first, second = 1.0 - 0.5 * kl[:2].sum().item(), 0.0 - 0.5 * kl[2].item()
    assert not found.per_token
    assert found.advantages.tolist() == pytest.approx([first - second, second - first, 0])
    assert found.metrics == {"critic/kl_reward/mean": pytest.approx(kl.mean().item())}


def test_kl_of_each_token_counts_for_those_before_it():
    config = AlgorithmConfig(name="reinforce_pp", kl_coef=0.5, gamma=0.9, whiten=False)
    found = step(config, log_probs=LOG_PROBS, ref_log_probs=OTHERS)
    own = (-0.5 * (LOG_PROBS - OTHERS)).tolist()
    third = own[5] + 3
    expected = [own[0] + 0.9 * (own[1] + 1), own[1] + 1, own[2]]
    expected += [own[3] + 0.9 * (own[4] + 0.9 * third), own[4] + 0.9 * third, third]
    assert found.per_token
    assert found.advantages.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_counts_tokens(name):
    found = step(AlgorithmConfig(name=name))
    base = [1.0, 0.0, 3.0] if name == "reinforce_pp" else [0.5, -0.5, 0.0]
    tokens = [base[0]] * 2 + [base[1]] + [base[2]] * 3
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    assert not found.per_token
    assert found.advantages.tolist() == pytest.approx([(b - mean) / std for b in base])


def test_whitening_by_token_and_by_sample_agree():
    """With a penalty of (nearly) nothing the same step takes the way per token."""
    by_sample = step(AlgorithmConfig(name="reinforce_pp"))
    config = AlgorithmConfig(name="reinforce_pp", kl_coef=1e-13)
    by_token = step(config, log_probs=LOG_PROBS, ref_log_probs=OTHERS)
    repeated = by_sample.advantages.repeat_interleave(torch.tensor(LENGTHS))
    assert by_token.per_token
    torch.testing.assert_close(by_token.advantages, repeated)


def test_a_step_without_signal_is_not_whitened():
    found = step_advantages(
        tensor(0.1, 0.1, 0.1),
        GROUPS,
        LENGTHS,
        config=AlgorithmConfig(name="reinforce_pp"),
    )
    assert found.advantages.tolist() == [0, 0, 0]


def test_ppo():
    config = AlgorithmConfig(name="ppo", kl_coef=0.1, gamma=0.9, gae_lambda=0.8)
    values = tensor(0.5, 0.2, -0.1, 1.0, 2.0, 0.3)
    found = step(config, log_probs=LOG_PROBS, ref_log_probs=OTHERS, values=values)
    rewards = (-0.1 * (LOG_PROBS - OTHERS)).tolist()
    for last, reward in zip((1, 2, 5), REWARDS.tolist(), strict=True):
        rewards[last] += reward
    raw = [
        a
        for start, end in ((0, 2), (2, 3), (3, 6))
        for a in textbook_gae(rewards[start:end], values.tolist()[start:end], 0.9, 0.8)
    ]
    assert found.returns.tolist() == pytest.approx((tensor(*raw) + values).tolist())
    mean, std = statistics.mean(raw), statistics.stdev(raw)
    assert found.advantages.tolist() == pytest.approx([(a - mean) / std for a in raw])
    errors, returns = tensor(*raw), found.returns
    explained = 1 - errors.var().item() / returns.var().item()
    assert found.metrics["critic/explained_variance"] == pytest.approx(explained)
    assert found.metrics["critic/values/mean"] == pytest.approx(values.mean().item())
    assert found.metrics["critic/returns/mean"] == pytest.approx(returns.mean().item())


def test_no_verdict_in_a_whitened_step():
    rewards = tensor(1.0, math.nan, 3.0)
    config = AlgorithmConfig(name="ppo")
    values = tensor(0.5, 0.2, -0.1, 1.0, 2.0, 0.3)
    found = step_advantages(rewards, GROUPS, LENGTHS, config=config, values=values)
    assert found.advantages.isnan().tolist() == [False, False, True, False, False, False]
    rest = found.advantages[~found.advantages.isnan()]
    assert rest.mean().item() == pytest.approx(0, abs=1e-12)
    assert rest.std().item() == pytest.approx(1)


def test_a_teachers_advantages():
    found = step(
        AlgorithmConfig(name="distillation"), log_probs=LOG_PROBS, teacher_log_probs=OTHERS
    )
    assert found.per_token
    torch.testing.assert_close(found.advantages, OTHERS - LOG_PROBS)
    kl = (LOG_PROBS - OTHERS).mean().item()
    assert found.metrics == {"critic/teacher_kl/mean": pytest.approx(kl)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AlgorithmConfig(name="ppo"), "critic's values"),
        (AlgorithmConfig(name="distillation"), "teacher's log-probs"),
        (AlgorithmConfig(name="rloo", kl_coef=1.0), "reference model's log-probs"),
    ],
)
def test_what_is_missing_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        step(config, log_probs=LOG_PROBS)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_alone_has_the_same_bits(name):
    """What is streamed early must be what the whole step says later."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 9, (40,), generator=draw)
    groups = torch.arange(40).repeat_interleave(sizes)
    rewards = torch.rand(len(groups), generator=draw, dtype=torch.float64)
    lengths = torch.randint(1, 30, (len(groups),), generator=draw)
    config = AlgorithmConfig(name=name, kl_coef=0.1, kl_in="reward", kl_estimator="k3")
    of_token = torch.arange(len(groups)).repeat_interleave(lengths)
    log_probs, reference = torch.randn(2, len(of_token), generator=draw, dtype=torch.float64)

    def found(samples, tokens):
        return step_advantages(
            rewards[samples],
            groups[samples],
            lengths[samples].tolist(),
            config=config,
            log_probs=log_probs[tokens],
            ref_log_probs=reference[tokens],
        ).advantages

    whole = found(groups >= 0, of_token >= 0)
    for group in range(40):
        own = groups == group
        assert found(own, own[of_token]).equal(whole[own])
