"""The losses: by hand, under any split, and blind to padding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.algo import (
    ALGORITHMS,
    AlgorithmConfig,
    policy_loss,
    token_loss,
    token_weights,
    value_loss,
)
from rollpacker.algo.kl import kl_estimate

GRPO = AlgorithmConfig()


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(ratio: float, advantage: float, config: AlgorithmConfig, **more: torch.Tensor):
    """The loss of a single token whose ratio is this, its gradient, and the sums."""
    log_prob = tensor(math.log(ratio)).requires_grad_()
    result = token_loss(
        log_prob,
        tensor(0.0),
        tensor(advantage),
        torch.tensor([0]),
        num_samples=1,
        config=config,
        **more,
    )
    (gradient,) = torch.autograd.grad(result.per_token.sum(), log_prob)
    return result.per_token.item(), gradient.item(), {k: v.item() for k, v in result.sums.items()}


# -- by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.2, 1.5])
@pytest.mark.parametrize("advantage", [-2.0, 3.0])
def test_clipped(ratio, advantage):
    loss, gradient, sums = one_token(ratio, advantage, GRPO)
    clipped = min(max(ratio, 0.8), 1.28)
    assert loss == pytest.approx(-min(ratio * advantage, clipped * advantage))
    is_low, is_high = ratio < 0.8 and advantage < 0, ratio > 1.28 and advantage > 0
    assert gradient == pytest.approx(0 if is_low or is_high else -ratio * advantage)
    assert sums == {"clip_ratio_low": is_low, "clip_ratio_high": is_high}


@pytest.mark.parametrize(
    ("ratio", "advantage", "counts"),
    [(2.0, -1.0, 2.0), (5.0, -1.0, 3.0), (0.5, -1.0, 0.8), (5.0, 1.0, 1.28), (0.5, 1.0, 0.5)],
)
def test_dual_clip(ratio, advantage, counts):
    loss, gradient, sums = one_token(ratio, advantage, AlgorithmConfig(clip_dual=3.0))
    assert loss == pytest.approx(-counts * advantage)
    assert gradient == pytest.approx(-ratio * advantage if counts == ratio else 0)
    assert sums["clip_ratio_dual"] == (counts == 3.0)


@pytest.mark.parametrize(("ratio", "counts"), [(0.01, 0.01), (2.0, 2.0), (9.0, 5.0)])
def test_cispo_cuts_the_weight_and_keeps_the_gradient(ratio, counts):
    loss, gradient, sums = one_token(ratio, 2.0, AlgorithmConfig(name="cispo"))
    assert loss == pytest.approx(-counts * 2 * math.log(ratio))
    assert gradient == pytest.approx(-counts * 2)
    assert sums == {"clip_ratio_low": 0, "clip_ratio_high": counts != ratio}


def test_ratios_of_uneven_sequences():
    """One ratio a response: the geometric mean, or the product, of those of its tokens."""
    ratios = tensor(1.1, 0.9, 1.3, 0.7, 1.2, 1.05)
    samples = torch.tensor([0, 2, 2, 0, 0, 1])  # tokens may lie in any order
    for name, power in (("gspo", (1 / 3, 1, 1 / 2)), ("rloo", (1, 1, 1))):
        config = AlgorithmConfig(name=name, clip_low=1.0, clip_high=100.0)
        result = token_loss(
            ratios.log(), torch.zeros(6), torch.ones(6), samples, num_samples=3, config=config
        )
        products = [1.1 * 0.7 * 1.2, 1.05, 0.9 * 1.3]
        expected = [-(products[s] ** power[s]) for s in samples.tolist()]
        assert result.per_token.tolist() == pytest.approx(expected)


def test_a_ratio_without_bounds_has_a_finite_gradient():
    for name in ("grpo", "rloo"):
        log_probs = torch.tensor([400.0, 500.0], requires_grad=True)
        config = AlgorithmConfig(name=name)
        result = token_loss(
            log_probs,
            torch.zeros(2),
            torch.ones(2),
            torch.tensor([0, 0]),
            num_samples=1,
            config=config,
        )
        (gradient,) = torch.autograd.grad(result.per_token.sum(), log_probs)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("reward", [-1.0, 1.0])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_policy_every_algorithm_is_the_policy_gradient(name, reward):
    """At a ratio of 1 the gradient of a token's loss is minus its advantage, whatever clips."""
    log_probs = tensor(-0.5, -1.0, -2.0).requires_grad_()
    config = AlgorithmConfig(name=name)
    result = token_loss(
        log_probs,
        log_probs.detach(),
        torch.full((3,), reward, dtype=torch.float64),
        torch.tensor([0, 1, 2]),
        num_samples=3,
        config=config,
    )
    (gradient,) = torch.autograd.grad(result.per_token.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([-reward] * 3)
    assert result.sums["clip_ratio_low"] == result.sums["clip_ratio_high"] == 0


@pytest.mark.parametrize(
    ("ratio", "equals"),
    [
        ("sequence", "sequence-mean-token-mean"),
        ("sequence-product", "sequence-mean-token-sum"),
    ],
)
def test_on_policy_a_sequences_ratio_is_an_aggregation(ratio, equals):
    mask, tensors, advantages = padded_case()

    def gradient(**switches):
        log_probs = tensors["logprobs"].clone().requires_grad_()
        config = AlgorithmConfig(**switches)
        loss, _ = policy_loss(log_probs, log_probs.detach(), advantages, mask, config=config)
        return torch.autograd.grad(loss, log_probs)[0]

    of_sequence = gradient(importance_ratio=ratio, loss_aggregation="sequence-mean-token-mean")
    torch.testing.assert_close(of_sequence, gradient(loss_aggregation=equals))


# -- KL, mismatch, entropy --------------------------------------------------------------


def test_kl_estimates_of_one_token():
    for estimator, expected in (("k1", 0.4), ("k2", 0.08), ("k3", math.exp(-0.4) + 0.4 - 1)):
        found = kl_estimate(tensor(-1.0), tensor(-1.4), estimator)
        assert found.item() == pytest.approx(expected)


def test_kl_estimates_mean_the_divergence():
    """Weighted by the policy's probabilities: k1 and k3 are the KL divergence itself, and the
    gradients of k2 (as a loss on samples) and of the divergence agree."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    probs = log_probs.exp()
    exact = torch.nn.functional.kl_div(reference, log_probs, reduction="sum", log_target=True)
    for estimator in ("k1", "k3"):
        mean = (probs * kl_estimate(log_probs, reference, estimator)).sum()
        assert mean.item() == pytest.approx(exact.item())
    sampled = (probs.detach() * kl_estimate(log_probs, reference, "k2")).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    torch.testing.assert_close(found, expected)
    useless = (probs.detach() * kl_estimate(log_probs, reference, "k1")).sum()
    (found,) = torch.autograd.grad(useless, logits, retain_graph=True)
    assert found.abs().max() < 1e-12
    for estimator in ("k1", "k3"):
        config = AlgorithmConfig(kl_coef=1.0, kl_estimator=estimator, kl_bias_correction=True)
        result = token_loss(
            log_probs,
            log_probs.detach(),
            torch.zeros(7),
            torch.arange(7),
            num_samples=7,
            config=config,
            ref_log_probs=reference,
        )
        corrected = (probs.detach() * result.per_token).sum()
        (found,) = torch.autograd.grad(corrected, logits, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_kl_in_the_loss_or_only_measured():
    kl = math.exp(-0.4) + 0.4 - 1
    reference = {"ref_log_probs": tensor(-0.4)}
    loss, _, sums = one_token(1.0, 0.0, AlgorithmConfig(kl_coef=0.5), **reference)
    assert (loss, sums["kl"]) == pytest.approx((0.5 * kl, kl))
    in_reward = AlgorithmConfig(kl_coef=0.5, kl_in="reward")
    loss, _, sums = one_token(1.0, 0.0, in_reward, **reference)
    assert loss == 0 and sums["kl"] == pytest.approx(kl)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("token-truncate", [0.5, 1.5, 2.0]),
        ("token-mask", [0.0, 1.5, 0.0]),
        ("sequence-truncate", [0.6, 0.6, 2.0]),
        ("sequence-mask", [0.6, 0.6, 0.0]),
    ],
)
def test_mismatch_weights(correction, expected):
    config = AlgorithmConfig(mismatch_correction=correction, mismatch_max=2.0, mismatch_min=0.5)
    log_probs = tensor(-1.0, -1.0, -1.0).requires_grad_()
    result = token_loss(
        log_probs,
        log_probs,
        torch.ones(3),
        torch.tensor([0, 0, 1]),
        num_samples=2,
        config=config,
        rollout_log_probs=tensor(-1.0, -1.0, -1.0) - tensor(0.4, 1.5, 2.5).log(),
    )
    assert result.per_token.tolist() == pytest.approx([-weight for weight in expected])
    (gradient,) = torch.autograd.grad(result.per_token.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([-weight for weight in expected])
    assert result.sums["mismatch_weight"].item() == pytest.approx(sum(expected))
    squares = sum(weight**2 for weight in expected)
    assert result.sums["mismatch_weight_squared"].item() == pytest.approx(squares)
    assert result.sums["mismatch_outside"] == (2 if correction.startswith("token") else 1)


def test_entropy_bonus():
    loss, _, _ = one_token(1.0, 0.0, AlgorithmConfig(entropy_coef=0.1), entropy=tensor(2.0))
    assert loss == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"kl_coef": 0.1}, "reference model"),
        ({"mismatch_correction": "token-mask"}, "engine's log-probs"),
        ({"entropy_coef": 0.1}, "entropy of each token"),
    ],
)
def test_what_is_missing_is_named(switches, message):
    with pytest.raises(ValueError, match=message):
        one_token(1.0, 1.0, AlgorithmConfig(**switches))


# -- aggregation ------------------------------------------------------------------------


def test_token_weights():
    def weights(name, **more):
        config = AlgorithmConfig(loss_aggregation=name)
        return token_weights([1, 4, 5], config=config, **more)

    assert weights("token-mean") == pytest.approx([0.1] * 3)
    assert weights("sequence-mean-token-mean") == pytest.approx([1 / 3, 1 / 12, 1 / 15])
    assert weights("sequence-mean-token-sum") == pytest.approx([1 / 3] * 3)
    assert weights("fixed-length", max_response_tokens=8) == pytest.approx([1 / 24] * 3)
    fixed = AlgorithmConfig(name="dr_grpo", fixed_length=20)
    assert token_weights([1], config=fixed, max_response_tokens=8) == [1 / 20]
    with pytest.raises(ValueError, match="needs fixed_length"):
        weights("fixed-length")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token-mean", 1 / 6), ("sequence-mean-token-mean", 1 / 10), ("fixed-length", 1 / 16)],
)
def test_samples_that_do_not_count_are_in_no_denominator(name, expected):
    config = AlgorithmConfig(loss_aggregation=name)
    counted = [True, False, True]
    weights = token_weights([1, 4, 5], config=config, counted=counted, max_response_tokens=8)
    assert weights[1] == 0 and weights[2] == pytest.approx(expected)
    nothing = token_weights([1], config=config, counted=[False], max_response_tokens=8)
    assert nothing == [0]


@pytest.mark.parametrize("name", ["token-mean", "sequence-mean-token-mean", "fixed-length"])
def test_weights_with_another_denominator_differ_by_one_factor(name):
    config = AlgorithmConfig(loss_aggregation=name, fixed_length=9 if "fixed" in name else None)
    whole = token_weights([3, 4, 5], config=config)
    part = token_weights([3, 4], config=config, denominator=1)
    assert part[0] / whole[0] == pytest.approx(part[1] / whole[1])
    half = token_weights([3, 4], config=config, denominator=2)
    assert half == pytest.approx([weight / 2 for weight in part])


EVERYTHING = {
    "clip_dual": 1.4,
    "kl_coef": 0.1,
    "kl_in": "loss",
    "kl_estimator": "k3",
    "mismatch_correction": "sequence-truncate",
    "entropy_coef": 0.01,
}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(1, 5), max_size=4),
    ratio=st.sampled_from(["token", "sequence", "sequence-product"]),
)
def test_any_split_gives_the_same_loss(seed, cuts, ratio):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (6,), generator=draw)
    ids = torch.arange(6).repeat_interleave(lengths)
    numbers = torch.randn(6, len(ids), generator=draw, dtype=torch.float64)
    log_probs = numbers[0].requires_grad_()
    old = log_probs.detach() + 0.2 * numbers[1]
    config = AlgorithmConfig(importance_ratio=ratio, **EVERYTHING)

    def part(samples):
        chosen = (ids[:, None] == torch.tensor(samples)).any(1)
        return token_loss(
            log_probs[chosen],
            old[chosen],
            numbers[2][chosen],
            ids[chosen] - samples[0],
            num_samples=len(samples),
            config=config,
            ref_log_probs=(log_probs + 0.1 * numbers[3])[chosen],
            rollout_log_probs=(old + 0.1 * numbers[4])[chosen],
            entropy=numbers[5].abs()[chosen],
        )

    borders = [0, *sorted(set(cuts)), 6]
    parts = [part(list(range(a, b))) for a, b in pairwise(borders)]
    whole = part(list(range(6)))
    torch.testing.assert_close(torch.cat([p.per_token for p in parts]), whole.per_token)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(p.sums[name] for p in parts), value)
    split = torch.cat([p.per_token for p in parts]).sum()
    (expected,) = torch.autograd.grad(whole.per_token.sum(), log_probs, retain_graph=True)
    (found,) = torch.autograd.grad(split, log_probs)
    torch.testing.assert_close(found, expected)


# -- padded tensors ---------------------------------------------------------------------


def padded_case(seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 4])[:, None]
    names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy")
    numbers = 0.3 * torch.randn(5, 4, 5, generator=draw, dtype=torch.float64)
    advantages = torch.randn(4, generator=draw, dtype=torch.float64)
    return mask, dict(zip(names, numbers, strict=True)), advantages


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "fixed-length"])
def test_padding_has_no_effect(ratio, aggregation):
    mask, tensors, advantages = padded_case()
    config = AlgorithmConfig(importance_ratio=ratio, loss_aggregation=aggregation, **EVERYTHING)

    def loss_of(fill, per_token):
        filled = {name: torch.where(mask, value, fill) for name, value in tensors.items()}
        filled["logprobs"].requires_grad_()
        own = advantages
        if per_token:
            own = torch.where(mask, advantages[:, None], fill)
        loss, metrics = policy_loss(advantages=own, mask=mask, config=config, **filled)
        (gradient,) = torch.autograd.grad(loss, filled["logprobs"])
        return loss, gradient, metrics

    expected = loss_of(0.0, False)
    assert expected[0].ndim == 0 and (expected[1][~mask] == 0).all()
    for fill in (math.nan, math.inf, 7.0):
        for per_token in (False, True):
            torch.testing.assert_close(loss_of(fill, per_token), expected, rtol=0, atol=0)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "fixed-length"])
def test_rows_without_a_verdict_are_left_out(aggregation):
    mask, tensors, advantages = padded_case()
    config = AlgorithmConfig(loss_aggregation=aggregation)
    tensors = {name: tensors[name] for name in ("logprobs", "old_logprobs")}
    kept = torch.tensor([0, 2, 3])
    expected, _ = policy_loss(
        advantages=advantages[kept],
        mask=mask[kept],
        config=config,
        **{name: value[kept] for name, value in tensors.items()},
    )
    advantages[1] = math.nan
    found, _ = policy_loss(advantages=advantages, mask=mask, config=config, **tensors)
    torch.testing.assert_close(found, expected)
    per_token = advantages.nan_to_num(nan=1.0)[:, None].repeat(1, 5)
    per_token[1, 0] = math.nan  # one token of it is enough
    found, _ = policy_loss(advantages=per_token, mask=mask, config=config, **tensors)
    torch.testing.assert_close(found, expected)
    advantages[1], mask[1] = 1.0, False
    found, _ = policy_loss(advantages=advantages, mask=mask.long(), config=config, **tensors)
    torch.testing.assert_close(found, expected)


def test_nothing_that_counts_gives_a_loss_of_zero():
    mask, tensors, advantages = padded_case()
    log_probs = tensors["logprobs"].requires_grad_()
    loss, metrics = policy_loss(
        log_probs, tensors["old_logprobs"], advantages * math.nan, mask, config=GRPO
    )
    loss.backward()
    assert loss == 0 and (log_probs.grad == 0).all()
    assert metrics["clip_ratio_low"] == 0


def test_metrics_are_means_over_tokens():
    ratios = torch.tensor([[2.0, 1.0], [2.0, 2.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    _, metrics = policy_loss(ratios.log(), torch.zeros(2, 2), torch.ones(2), mask, config=GRPO)
    assert metrics["clip_ratio_high"].item() == pytest.approx(2 / 3)


# -- the critic -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "counts_as", "gradient"),
    [(1.1, 1.1, -0.9), (1.5, 1.2, 0.0), (0.5, 0.5, -1.5), (3.5, 3.5, 1.5)],
)
def test_value_loss(value, counts_as, gradient):
    """An old value of 1, a return of 2: towards it the value counts up to 1.2, away from it as it
    is."""
    config = AlgorithmConfig(name="ppo", value_clip=0.2)
    values = tensor(value).requires_grad_()
    result = value_loss(values, tensor(1.0), tensor(2.0), config=config)
    assert result.per_token.item() == pytest.approx((counts_as - 2) ** 2 / 2)
    assert torch.autograd.grad(result.per_token.sum(), values)[0].item() == pytest.approx(gradient)
    assert result.sums["value_clip_ratio"] == (counts_as != value)


def test_value_loss_without_a_clip():
    config = AlgorithmConfig(name="ppo", value_clip=None)
    values = tensor(3.0, 1.0).requires_grad_()
    result = value_loss(values, tensor(1.0, 1.0), tensor(2.0, 2.0), config=config)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), values)
    assert result.per_token.tolist() == [0.5, 0.5] and gradient.tolist() == [1, -1]
    assert result.sums == {}
