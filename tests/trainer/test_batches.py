"""Micro-batches: which rows share one, and their tensors, sorted and packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rollpacker.trainer.batches import Batcher, Row, collate, plan_micro_batches, row_length
from rollpacker.trainer.packing import pack
from tests.trainer.families import (
    CPU,
    FAMILIES,
    alone,
    gradients_of,
    log_probs_of,
    new_model,
    new_rows,
)


def new_batcher(layout: str, max_tokens: int = 80, model: nn.Module | None = None, **more):
    return Batcher(
        new_model("qwen2") if model is None else model,
        layout=layout,
        max_tokens=max_tokens,
        pad_token_id=0,
        device=CPU,
        **more,
    )


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
    batch = collate([Row((7, 8), (9,)), Row((5,), (6, 4, 3))], 0, CPU)
    assert batch.input_ids.tolist() == [[7, 8, 0], [5, 6, 4]]
    assert batch.positions.tolist() == [1, 3, 4, 5]
    assert batch.targets.tolist() == [9, 6, 4, 3]
    assert batch.num_targets == (1, 3) and batch.num_tokens == 5
    assert not batch.model_inputs


def test_pack_places_rows_and_targets():
    batch = pack([Row((7, 8), (9,)), Row((5,), (6, 4, 3))], CPU)
    assert batch.input_ids.tolist() == [[7, 8, 5, 6, 4]]
    assert batch.positions.tolist() == [1, 2, 3, 4]
    assert batch.targets.tolist() == [9, 6, 4, 3]
    assert batch.num_targets == (1, 3) and batch.num_tokens == 5
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


@pytest.mark.parametrize("make", [lambda rows: collate(rows, 0, CPU), lambda rows: pack(rows, CPU)])
@pytest.mark.parametrize("row", [Row((), (3,)), Row((3,), ()), Row((3,), (4,), ((0, 1),))])
def test_rows_need_a_context_and_a_target(make, row):
    with pytest.raises(AssertionError, match="a row needs a context and a target"):
        make([Row((3, 4), (5, 6)), row])


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_right_needs_no_mask(family):
    """Also with soft-capped logits and sliding windows; each row as if it were alone."""
    model, rows = new_model(family), new_rows()
    model.set_attn_implementation("textbook")
    together = log_probs_of(model, collate(rows, 0, CPU))
    assert (together - alone(model, rows)).abs().max() < 1e-10


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_plans_cover_every_row_and_depend_on_lengths_alone(layout):
    batcher, draw = new_batcher(layout, 100), torch.Generator().manual_seed(0)
    lengths = [*torch.randint(1, 60, (50,), generator=draw).tolist(), 170, 170]
    plan = batcher.plan(lengths)
    assert sorted(i for places in plan for i in places) == list(range(len(lengths)))
    assert [50] in plan and [51] in plan
    assert new_batcher(layout, 100).plan(tuple(lengths)) == plan
    for places in plan:
        sizes = [lengths[i] for i in places]
        padded = max(sizes) * len(sizes) if layout == "sorted" else sum(sizes)
        assert padded <= 100 or len(places) == 1
    assert batcher.plan([]) == []


def test_equal_lengths_keep_their_order():
    assert new_batcher("sorted", 20).plan([5, 3, 5, 3, 5, 3]) == [[1, 3, 5], [0, 2, 4]]
    assert new_batcher("packed", 10).plan([5, 5, 5, 5]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_any_layout_gives_the_same_step(layout):
    model, rows = new_model("llama"), new_rows()
    expected = alone(model, rows)
    expected_gradients = gradients_of(model, expected, weights=torch.ones(len(expected)))
    batcher = new_batcher(layout, model=model)
    ends = torch.tensor([row.num_targets for row in rows]).cumsum(0).tolist()
    model.zero_grad()
    with batcher.attention():
        for places in batcher.plan([row_length(row) for row in rows]):
            batch = batcher.batch([rows[i] for i in places])
            assert batch.num_targets == tuple(rows[i].num_targets for i in places)
            log_probs = log_probs_of(model, batch)
            log_probs.sum().backward()
            for i, part in zip(places, log_probs.split(list(batch.num_targets)), strict=True):
                assert (part - expected[ends[i] - len(part) : ends[i]]).abs().max() < 1e-10
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected_gradients[name]).abs().max() < 1e-10, name


@pytest.mark.parametrize("layout", ["sorted", "packed"])
def test_a_filler_is_one_token_and_one_target(layout):
    batcher = new_batcher(layout)
    batch = batcher.filler()
    assert batch.input_ids.tolist() == [[0]] and batch.num_targets == (1,)
    model = new_model("qwen2")
    batcher = new_batcher(layout, model=model)
    with batcher.attention():
        (log_probs_of(model, batch) * 0.0).sum().backward()
    assert all(not p.grad.any() for p in model.parameters())


def test_rows_are_packed_unless_told_otherwise():
    assert new_batcher("auto").layout == new_batcher("packed").layout == "packed"
    assert new_batcher("sorted").layout == "sorted"


def test_sorted_rows_leave_the_attention_alone():
    model = new_model("qwen2")
    with new_batcher("sorted", model=model).attention():
        assert model.config._attn_implementation == "sdpa"


def test_models_that_cannot_be_packed_say_why():
    model, foreign = new_model("qwen2"), new_model("qwen2")
    foreign.config.layer_types = ["full_attention", "linear_attention"]
    message = (
        r"micro_batches=packed is not possible: Qwen2ForCausalLM has layers of type "
        r"linear_attention: a row of a pack would begin with what the one before it left; set it "
        r"to sorted or auto"
    )
    with pytest.raises(ValueError, match=message):
        new_batcher("packed", model=foreign)
    with pytest.raises(ValueError, match=message):
        new_batcher("packed", model=model, others=[foreign])
    assert new_batcher("auto", model=foreign).layout == "sorted"


def test_other_models_take_the_same_packs():
    """A reference, a teacher or a critic beside the policy."""
    model, other, rows = new_model("qwen2"), new_model("gemma2"), new_rows()
    batcher = new_batcher("packed", model=model, others=[other])
    with torch.no_grad():
        other.set_attn_implementation("textbook")
        expected = alone(other, rows)
        with batcher.attention():
            actual = log_probs_of(other, batcher.batch(rows))
    assert (actual - expected).abs().max() < 1e-10
    assert other.config._attn_implementation == "textbook"
