"""Noise and draws against plain reference implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.rollout.sampling import DrawMode, draw, sample_key, uniforms


def _reference_probs(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> list[float]:
    """Temperature, then top-k, then top-p, one token at a time."""
    weights = [math.exp(logit / temperature) for logit in logits]
    ranked = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept = ranked[: top_k or None]
    total = sum(weights[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        nucleus.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    total = sum(weights[token] for token in nucleus)
    return [weights[t] / total if t in nucleus else 0.0 for t in range(len(logits))]


def _reference_draw(probs: list[float], noise: float) -> int:
    reached = 0.0
    for token, prob in enumerate(probs):
        reached += prob
        if prob and noise < reached:
            return token
    return max(token for token, prob in enumerate(probs) if prob)


@pytest.mark.parametrize("mixed", [False, True])
def test_draws_equal_a_reference(mixed: bool) -> None:
    rng = np.random.default_rng(0)
    num_rows, size = 400, 23
    logits = rng.normal(scale=2.0, size=(num_rows, size)).astype(np.float32)
    noise = rng.random(num_rows)
    temperature = rng.choice([0.5, 1.0, 1.7], num_rows) if mixed else np.full(num_rows, 0.8)
    top_k = rng.choice([1, 3, 10, size], num_rows) if mixed else np.full(num_rows, size)
    top_p = rng.choice([0.1, 0.5, 0.9, 1.0], num_rows) if mixed else np.full(num_rows, 0.7)
    tokens, log_probs = draw(
        torch.from_numpy(logits),
        torch.from_numpy(noise),
        torch.from_numpy(temperature),
        torch.from_numpy(top_k),
        torch.from_numpy(top_p),
        DrawMode(tempered=True, truncated=True),
    )
    for row in range(num_rows):
        probs = _reference_probs(
            logits[row].tolist(), temperature[row], int(top_k[row]), top_p[row]
        )
        wanted = _reference_draw(probs, noise[row])
        assert tokens[row] == wanted
        assert log_probs[row].item() == pytest.approx(math.log(probs[wanted]), abs=1e-9)


def _plain_columns(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ones = torch.ones(rows, dtype=torch.float64)
    return ones, torch.full((rows,), size), ones.clone()


def test_a_part_that_a_row_does_not_need_leaves_it_bit_for_bit() -> None:
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(1))
    noise = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    columns = _plain_columns(64, 30)
    plain = draw(logits, noise, *columns, DrawMode())
    every = draw(logits, noise, *columns, DrawMode(greedy=True, tempered=True, truncated=True))
    assert torch.equal(plain[0], every[0])
    assert torch.equal(plain[1], every[1])


def test_greedy_takes_the_likeliest_with_its_plain_log_probability() -> None:
    logits = torch.randn(16, 30, generator=torch.Generator().manual_seed(1))
    _, top_k, top_p = _plain_columns(16, 30)
    tokens, log_probs = draw(
        logits,
        torch.full((16,), 0.999, dtype=torch.float64),
        torch.zeros(16, dtype=torch.float64),
        top_k,
        top_p,
        DrawMode(greedy=True, tempered=True),
    )
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.double().log_softmax(-1).amax(-1))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-float("inf"), 0.0, 0.0, 0.0, -float("inf")]]).repeat(2, 1)
    noise = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens, log_probs = draw(logits, noise, *_plain_columns(2, 5), DrawMode())
    assert tokens.tolist() == [1, 3]
    assert log_probs.tolist() == pytest.approx([-math.log(3)] * 2)


def test_nan_logits_give_a_nan_log_probability_in_that_row_only() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 2] = float("nan")
    noise = torch.full((2,), 0.3, dtype=torch.float64)
    tokens, log_probs = draw(logits, noise, *_plain_columns(2, 4), DrawMode())
    assert 0 <= tokens[0] < 4
    assert log_probs.isnan().tolist() == [True, False]


def test_noise_depends_on_key_and_position_only() -> None:
    keys = np.array([sample_key(7, SampleId(PromptId("train", 0, 3), 1, 0)), 5], np.uint64)
    whole = uniforms(keys, np.array([0, 0]), 100)
    parts = uniforms(keys[::-1], np.array([40, 10]), 50)
    np.testing.assert_array_equal(parts[1], whole[0, 10:60])
    np.testing.assert_array_equal(parts[0], whole[1, 40:90])
    # Known values: the noise of a seed is part of what a run's results mean.
    assert whole[1, :2].tolist() == uniforms(np.array([5], np.uint64), np.array([0]), 2)[0].tolist()


def test_noise_is_uniform_and_uncorrelated() -> None:
    keys = np.array(
        [sample_key(0, SampleId(PromptId("train", 0, row), 0, 0)) for row in range(2000)], np.uint64
    )
    noise = uniforms(keys, np.zeros(2000, np.int64), 64)
    assert noise.min() >= 0
    assert noise.max() < 1
    counts = np.histogram(noise, bins=64, range=(0, 1))[0]
    expected = noise.size / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 25 < chi_square < 115
    for one, other in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.012


def test_samples_seeds_and_attempts_have_keys_of_their_own() -> None:
    keys = {
        sample_key(seed, SampleId(PromptId(source, epoch, row), index, attempt))
        for seed in (0, 1)
        for source in ("train", "eval")
        for epoch in (0, 1)
        for row in range(20)
        for index in range(4)
        for attempt in (0, 1)
    }
    assert len(keys) == 2 * 2 * 2 * 20 * 4 * 2
