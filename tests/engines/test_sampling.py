"""Noise and draws against plain reference implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.sampling import (
    DrawMode,
    draw,
    exponentials,
    noise_size,
    num_groups,
)
from rollpacker.engines.engine import sample_key

PINNED_KEY = 3661546623890549043
PINNED_NOISE = [0.4037332438685237, 0.1322234093990957, 1.7752831778329377, 0.04652605126063502]


def _noise(rows: int, vocabulary_size: int) -> torch.Tensor:
    keys = torch.arange(rows)
    return exponentials(keys, torch.zeros_like(keys), 1, noise_size(vocabulary_size))[:, 0]


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


def _smallest(scores: list[float]) -> int:
    return min(range(len(scores)), key=scores.__getitem__)


def _reference_draw(probs: list[float], noise: list[float]) -> int:
    """The smallest exponential over probability, in two rounds where the vocabulary is wide."""
    groups = num_groups(len(probs))
    sums = [sum(probs[group::groups]) for group in range(groups)]
    group = _smallest([e / p if p else math.inf for e, p in zip(noise, sums, strict=False)])
    inside = probs[group::groups]
    if len(inside) == 1:
        return group
    scores = [e / p if p else math.inf for e, p in zip(noise[groups:], inside, strict=False)]
    return group + groups * _smallest(scores)


@pytest.mark.parametrize("size", [23, 64, 65, 100, 257])
@pytest.mark.parametrize("mixed", [False, True])
def test_draws_equal_a_reference(mixed: bool, size: int) -> None:
    rng = np.random.default_rng(0)
    num_rows = 300
    logits = rng.normal(scale=2.0, size=(num_rows, size)).astype(np.float32)
    noise = rng.exponential(size=(num_rows, noise_size(size)))
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
        wanted = _reference_draw(probs, noise[row].tolist())
        assert tokens[row] == wanted
        assert log_probs[row].item() == pytest.approx(math.log(probs[wanted]), abs=1e-9)


@pytest.mark.parametrize("size", [16, 200])
def test_tokens_come_as_often_as_their_probability_says(size: int) -> None:
    num_draws = 100_000
    logits = 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(num_draws // 100)
    noise = exponentials(keys, torch.zeros_like(keys), 100, noise_size(size)).flatten(0, 1)
    tokens, _ = draw(
        logits.expand(num_draws, -1), noise, *_plain_columns(num_draws, size), DrawMode()
    )
    wanted = num_draws * logits.double().softmax(-1)
    chi_square = ((torch.bincount(tokens, minlength=size) - wanted) ** 2 / wanted).sum()
    assert abs(chi_square - size) < 5 * (2 * size) ** 0.5


def _plain_columns(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ones = torch.ones(rows, dtype=torch.float64)
    return ones, torch.full((rows,), size), ones.clone()


def test_a_part_that_a_row_does_not_need_leaves_it_bit_for_bit() -> None:
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(1))
    noise = _noise(64, 30)
    columns = _plain_columns(64, 30)
    plain = draw(logits, noise, *columns, DrawMode())
    every = draw(logits, noise, *columns, DrawMode(greedy=True, tempered=True, truncated=True))
    assert torch.equal(plain[0], every[0])
    assert torch.equal(plain[1], every[1])


def test_rows_that_are_drawn_in_parts_come_out_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, size = 13, 300
    logits = 2 * torch.randn(rows, size, generator=torch.Generator().manual_seed(3))
    logits[4, 7] = float("nan")
    columns = [
        torch.tensor([0.0, 0.7, 1.0, 1.3])[torch.arange(rows) % 4].double(),
        torch.tensor([size, 5, 1])[torch.arange(rows) % 3],
        torch.tensor([1.0, 0.4])[torch.arange(rows) % 2].double(),
    ]
    for mode in (DrawMode(), DrawMode(greedy=True, tempered=True, truncated=True)):
        found = []
        for at_once in (1, 4 * size, 1 << 30):
            monkeypatch.setattr("rollpacker.engines.embedded.sampling.AT_ONCE", at_once)
            tokens, log_probs = draw(logits, _noise(rows, size), *columns, mode)
            found.append((tokens.tolist(), log_probs.nan_to_num(1.0).tolist()))
        assert found[0] == found[1] == found[2]


def test_greedy_takes_the_likeliest_with_its_plain_log_probability() -> None:
    logits = torch.randn(16, 30, generator=torch.Generator().manual_seed(1))
    _, top_k, top_p = _plain_columns(16, 30)
    tokens, log_probs = draw(
        logits,
        _noise(16, 30),
        torch.zeros(16, dtype=torch.float64),
        top_k,
        top_p,
        DrawMode(greedy=True, tempered=True),
    )
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.double().log_softmax(-1).amax(-1))


@pytest.mark.parametrize("size", [5, 80])
def test_a_token_of_probability_zero_is_never_drawn(size: int) -> None:
    logits = torch.full((200, size), -float("inf"))
    logits[:, 1:4] = 0
    noise = _noise(200, size)
    noise[:, 0], noise[:, 4:] = 1e-16, 1e-16
    tokens, log_probs = draw(logits, noise, *_plain_columns(200, size), DrawMode())
    assert set(tokens.tolist()) == {1, 2, 3}
    assert log_probs.tolist() == pytest.approx([-math.log(3)] * 200)


@pytest.mark.parametrize("size", [4, 90])
def test_nan_logits_give_a_nan_log_probability_in_that_row_only(size: int) -> None:
    logits = torch.zeros(2, size)
    logits[0, 2] = float("nan")
    tokens, log_probs = draw(logits, _noise(2, size), *_plain_columns(2, size), DrawMode())
    assert 0 <= tokens[0] < size
    assert log_probs.isnan().tolist() == [True, False]


def test_noise_depends_on_key_and_position_only() -> None:
    key = sample_key(7, SampleId(PromptId("train", 0, 3), 1, 0))
    # Known values: the noise of a seed is part of what a run's results mean.
    assert key == PINNED_KEY
    keys = torch.tensor([key, 5], dtype=torch.uint64).view(torch.int64)
    whole = exponentials(keys, torch.tensor([0, 0]), 100, 48)
    parts = exponentials(keys.flip(0), torch.tensor([40, 10]), 50, 20)
    assert torch.equal(parts[1], whole[0, 10:60, :20])
    assert torch.equal(parts[0], whole[1, 40:90, :20])
    assert whole[0, :2, :2].flatten().tolist() == pytest.approx(PINNED_NOISE, rel=1e-12)


def _reference_exponential(key: int, number: int, place: int) -> float:
    """In Python's own integers."""

    def mix(bits: int) -> int:
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return bits ^ (bits >> 31)

    token = mix(mix((0x9E3779B97F4A7C15 * (number + 1) + key) % 2**64) ^ key)
    bits = mix((token + 0x9E3779B97F4A7C15 * (place + 1)) % 2**64)
    return -math.log(((bits >> 12) + 0.5) * 2.0**-52)


def test_the_hash_is_that_of_unsigned_integers() -> None:
    for key in (5, 2**63 + 12345, 2**64 - 1):
        keys = torch.tensor([key], dtype=torch.uint64).view(torch.int64)
        found = exponentials(keys, torch.tensor([3]), 4, 6)[0]
        wanted = [[_reference_exponential(key, 3 + t, j) for j in range(6)] for t in range(4)]
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_noise_is_exponential_and_uncorrelated() -> None:
    keys = torch.tensor(
        [sample_key(0, SampleId(PromptId("train", 0, row), 0, 0)) for row in range(500)],
        dtype=torch.uint64,
    ).view(torch.int64)
    noise = exponentials(keys, torch.zeros_like(keys), 16, 16).neg().exp().numpy()
    assert noise.min() > 0
    assert noise.max() < 1
    counts = np.histogram(noise, bins=64, range=(0, 1))[0]
    expected = noise.size / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 25 < chi_square < 115
    for axis in range(3):
        one, other = (
            np.take(noise, range(k, noise.shape[axis] - 1 + k), axis=axis) for k in (0, 1)
        )
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.012


def test_the_noise_of_another_redraw_or_turn_is_another() -> None:
    sample = SampleId(PromptId("train", 0, 3), 1, 0)
    assert sample_key(7, sample, 0) == sample_key(7, sample) == PINNED_KEY
    assert len({sample_key(7, sample, redraw) for redraw in range(17)}) == 17
    assert sample_key(7, sample, 0, turn=1) == PINNED_KEY
    keys = {sample_key(7, sample, redraw, turn) for redraw in range(4) for turn in range(1, 9)}
    assert len(keys) == 32


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
