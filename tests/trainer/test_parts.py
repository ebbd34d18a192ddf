"""Schedules, micro-batches and log-probabilities, each on its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from rollpacker.trainer import logprobs
from rollpacker.trainer.base import TrainConfig
from rollpacker.trainer.batches import collate, plan_micro_batches
from rollpacker.trainer.packing import pack, use_packed_attention
from rollpacker.trainer.schedule import learning_rate
from tests.trainer.tiny import tiny_model

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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_cover_all_rows_within_the_budget(lengths, budget):
    lengths = sorted(lengths)
    runs = plan_micro_batches(lengths, budget)
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(lengths)))
    for run in runs:
        rows = lengths[run]
        assert len(rows) == 1 or len(rows) * rows[-1] <= budget


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(20, 120))
def test_micro_batches_cost_the_least(lengths, budget):
    """Against every way to cut, by brute force."""
    lengths, overhead = sorted(lengths), 13
    best = None
    for cuts in range(1 << (len(lengths) - 1)):
        ends = [i + 1 for i in range(len(lengths) - 1) if cuts >> i & 1] + [len(lengths)]
        begins = [0, *ends[:-1]]
        parts = list(zip(begins, ends, strict=True))
        if all(e - b == 1 or (e - b) * lengths[e - 1] <= budget for b, e in parts):
            cost = sum((e - b) * lengths[e - 1] + overhead for b, e in parts)
            best = cost if best is None else min(best, cost)
    runs = plan_micro_batches(lengths, budget, overhead)
    assert sum((r.stop - r.start) * lengths[r.stop - 1] + overhead for r in runs) == best


def test_collate_places_rows_and_targets():
    batch = collate([((7, 8), (9,)), ((5,), (6, 4, 3))], 0, torch.device("cpu"))
    assert batch.input_ids.tolist() == [[7, 8, 0], [5, 6, 4]]
    assert batch.positions.tolist() == [1, 3, 4, 5]
    assert batch.targets.tolist() == [9, 6, 4, 3]
    assert batch.num_targets == (1, 3) and batch.num_tokens == 5


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


def gemma() -> Gemma2ForCausalLM:
    config = Gemma2Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=2.0,
        initializer_range=0.5,
        sliding_window=4,
    )
    return Gemma2ForCausalLM(config).double()


@pytest.mark.parametrize(
    "make, attention", [(tiny_model, "sdpa"), (tiny_model, "eager"), (gemma, "eager")]
)
def test_padding_on_the_right_needs_no_mask(make, attention):
    """Also with soft-capped logits and sliding windows; each row as if it were alone."""
    model = make().eval()
    model.set_attn_implementation(attention)
    rows = [((3, 4, 5), (6, 7)), ((8,), tuple(range(3, 20))), ((9, 10), (11,))]
    batch = collate(rows, 0, torch.device("cpu"))
    together, _ = logprobs.response_log_probs(model, batch, 0.8)
    alone = []
    for context, targets in rows:
        ids = torch.tensor([[*context, *targets]])
        table = F.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.8, -1)
        alone.append(table.gather(-1, ids[0, 1:, None])[len(context) - 1 :, 0])
    assert torch.allclose(together, torch.cat(alone), atol=1e-12)


def test_packed_rows_equal_padded_rows():
    model = tiny_model().eval()
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in (2, 3, 3, 5, 9, 30, 31, 60):
        tokens = torch.randint(3, 23, (length,), generator=draw).tolist()
        rows.append((tokens[: 1 + length // 4], tokens[1 + length // 4 :]))
    results = []
    for packed in (False, True):
        model.zero_grad()
        device = torch.device("cpu")
        if packed:
            assert use_packed_attention(model)
            batch, inputs = pack(rows, device)
            assert batch.input_ids.numel() == batch.num_tokens
            assert len(inputs["packed_rows"]) > 1
        else:
            batch, inputs = collate(rows, 0, device), {}
        log_probs, _ = logprobs.response_log_probs(model, batch, 1.0, inputs)
        log_probs.sum().backward()
        results.append((log_probs.detach(), [p.grad.clone() for p in model.parameters()]))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-12)
    for padded, packed in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(padded, packed, atol=1e-11)


def test_models_with_windows_or_caps_are_not_packed():
    model = gemma()
    assert not use_packed_attention(model)
    assert model.config._attn_implementation == "eager"
