"""Schedules and log-probabilities, each on its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from rollpacker.trainer import logprobs
from rollpacker.trainer.base import TrainConfig
from rollpacker.trainer.schedule import learning_rate

WARMUP, TOTAL = 4, 20


def transformers_rates(make, **settings) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    schedule = make(optimizer, num_warmup_steps=WARMUP, **settings)
    rates = []
    for _ in range(TOTAL):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    "name, ratio, make, arguments",
    [
        ("constant", 0.0, get_constant_schedule_with_warmup, {}),
        ("linear", 0.0, get_linear_schedule_with_warmup, {"num_training_steps": TOTAL}),
        ("cosine", 0.0, get_cosine_schedule_with_warmup, {"num_training_steps": TOTAL}),
        (
            "cosine",
            0.1,
            get_cosine_with_min_lr_schedule_with_warmup,
            {"num_training_steps": TOTAL, "min_lr_rate": 0.1},
        ),
    ],
)
def test_schedules_after_the_warmup_are_those_of_transformers(name, ratio, make, arguments):
    config = TrainConfig(
        steps=TOTAL,
        learning_rate=3e-4,
        schedule=name,
        warmup_steps=WARMUP,
        min_learning_rate_ratio=ratio,
    )
    ours = [learning_rate(step, config, TOTAL) for step in range(TOTAL)]
    theirs = transformers_rates(make, **arguments)
    assert ours[WARMUP:] == pytest.approx(theirs[WARMUP:])
    assert ours[:WARMUP] == pytest.approx([3e-4 * (i + 1) / 5 for i in range(WARMUP)])


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_steps_beyond_the_end_go_on_at_the_last_rate(name):
    config = TrainConfig(steps=TOTAL, schedule=name, learning_rate=1.0)
    last = learning_rate(TOTAL - 1, config, TOTAL)
    assert last > 0
    assert [learning_rate(step, config, TOTAL) for step in (TOTAL, TOTAL + 7)] == [last, last]


def test_linear_ends_at_its_floor():
    config = TrainConfig(
        steps=10, schedule="linear", learning_rate=2.0, min_learning_rate_ratio=0.5
    )
    rates = [learning_rate(step, config, 10) for step in range(10)]
    assert rates[0] == 2.0 and rates[-1] == pytest.approx(1.1)


@pytest.mark.parametrize("block", [1 << 24, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_selected_log_probs_and_gradient(monkeypatch, block, temperature):
    monkeypatch.setattr(logprobs, "BLOCK_ELEMENTS", block)
    torch.manual_seed(0)
    logits = torch.randn(17, 29, dtype=torch.float64, requires_grad=True)
    targets, weights = torch.randint(29, (17,)), torch.randn(17, dtype=torch.float64)
    table = F.log_softmax(logits / temperature, -1)
    expected = table.gather(-1, targets[:, None])[:, 0]
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    actual, entropy = logprobs.selected_log_probs(logits, targets, temperature)
    (actual_grad,) = torch.autograd.grad((actual * weights).sum(), logits)
    assert torch.allclose(actual, expected, atol=1e-12)
    assert torch.allclose(actual_grad, expected_grad, atol=1e-12)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-12)


def test_low_precision_logits_are_summed_in_float32():
    torch.manual_seed(0)
    logits = torch.randn(5, 1000).bfloat16()
    actual, _ = logprobs.selected_log_probs(logits, torch.arange(5))
    expected = F.log_softmax(logits.float(), -1)[range(5), range(5)]
    assert actual.dtype == torch.float32 and torch.allclose(actual, expected, atol=1e-5)
