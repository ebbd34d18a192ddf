"""Rows end to end: each packed attention against every row by itself, and the model as before."""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoConfig,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    masking_utils,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from rollpacker.core.packs import plan_packs
from rollpacker.engines.embedded.attention import ATTENTION_NAME, install_attention
from rollpacker.trainer import packing, varlen
from rollpacker.trainer.batches import Batcher, Row, collate
from rollpacker.trainer.packing import best_kind, pack, packed_attention, why_not
from rollpacker.trainer.varlen import PackedRows
from tests.trainer.families import (
    CPU,
    FAMILIES,
    SHAPE,
    alone,
    gradients_of,
    log_probs_of,
    new_model,
    new_rows,
)


def documented_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
):
    """What torch's documentation says of `varlen_attn`, which itself runs on CUDA alone."""
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q is cu_seq_k
    assert max_q == max_k == cu_seq_q.diff().max() and cu_seq_q[-1] == len(query)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    outputs = []
    for begin, end in zip(cu_seq_q.tolist()[:-1], cu_seq_q.tolist()[1:], strict=True):
        q, k, v = (states[begin:end].transpose(0, 1) for states in (query, key, value))
        index = torch.arange(end - begin)
        offset = index - index[:, None]
        mask = (offset <= right) & ((offset >= -left) if left >= 0 else True)
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        )
    return torch.cat([output.transpose(0, 1) for output in outputs])


@pytest.fixture
def on_cpu(monkeypatch):
    """The GPU's paths on a CPU, in float64 throughout: varlen by its documentation, and flex's own
    unfused backward."""
    monkeypatch.setattr(varlen, "varlen_function", lambda: documented_varlen_attn)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    in_float64 = lambda self, x: self._norm(x) * (1 + self.weight)  # noqa: E731
    monkeypatch.setattr(Gemma2RMSNorm, "forward", in_float64)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", packing.KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_equals_its_rows_by_themselves(on_cpu, family, kind):
    if family == "gemma2" and kind == "varlen":
        pytest.skip("varlen_attn has no soft cap, and is refused for it")
    model, rows = new_model(family), new_rows()
    model.set_attn_implementation("textbook")
    expected = alone(model, rows)
    expected_gradients = gradients_of(model, expected)
    batch = pack(rows, CPU)
    assert batch.input_ids.shape == (1, batch.num_tokens)
    with packed_attention(model, kind):
        actual = log_probs_of(model, batch)
        gradients = gradients_of(model, actual)
    assert (actual - expected).abs().max() < 1e-10
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected_gradients[name]).abs().max() < 1e-10, name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", packing.KINDS)
def test_no_token_sees_another_row(on_cpu, kind):
    """Not by a bit: other rows' tokens are changed, and their gradient is exactly nothing."""
    model, rows = new_model("qwen2_windows"), new_rows()
    changed = [Row([5] * len(row.context), row.response) for row in rows]
    changed[0], changed[3] = rows[0], rows[3]
    ends = torch.tensor([row.num_targets for row in rows]).cumsum(0).tolist()
    with packed_attention(model, kind), torch.no_grad():
        before, after = (log_probs_of(model, pack(some, CPU)) for some in (rows, changed))
    assert torch.equal(before[: ends[0]], after[: ends[0]])
    assert torch.equal(before[ends[2] : ends[3]], after[ends[2] : ends[3]])
    assert not torch.equal(before[ends[3] : ends[4]], after[ends[3] : ends[4]])
    batch = pack(rows, CPU)
    embedded = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
    with packed_attention(model, kind):
        hidden = model.model(inputs_embeds=embedded, use_cache=False, **batch.model_inputs)[0]
        begin, end = PackedRows.cumulative_lengths.func(batch.model_inputs["packed_rows"])[3:5]
        hidden[0, begin:end].square().sum().backward()
    reached = embedded.grad[0].abs().sum(-1) > 0
    assert reached[begin:end].all() and reached.sum() == end - begin


@pytest.mark.parametrize("family", FAMILIES)
def test_no_mask_is_built(monkeypatch, family):
    """transformers recognises packs by their positions and would build [N, N] masks for them."""

    def refuse(*_arguments, **_keywords):
        raise AssertionError("a mask was built")

    for name in ("sdpa_mask", "eager_mask", "find_packed_sequence_indices"):
        monkeypatch.setattr(masking_utils, name, refuse)
    model, batch = new_model(family), pack(new_rows(), CPU)
    with packed_attention(model, "grouped"):
        log_probs_of(model, batch)
    with pytest.raises(AssertionError, match="a mask was built"):
        log_probs_of(model, batch)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=12),
    st.none() | st.integers(1, 500),
)
@settings(max_examples=40, deadline=None)
def test_block_masks_are_those_that_torch_makes_from_all_pairs(lengths, window):
    rows = PackedRows(lengths, CPU)
    ours, total = rows.block_mask(window), sum(lengths)
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    reach = window or total

    def visible(_b, _h, q, k):
        return (q >= k) & (row_of[q] == row_of[k]) & (q - k < reach)

    theirs = torch_flex.create_block_mask(visible, None, None, total, total, device="cpu")
    assert ours.shape == theirs.shape
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    for counts, indices, expected in (
        (ours.kv_num_blocks, ours.kv_indices, theirs.kv_indices),
        (ours.full_kv_num_blocks, ours.full_kv_indices, theirs.full_kv_indices),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            assert torch.equal(indices[0, 0, row, :count], expected[0, 0, row, :count])
    q, k = torch.arange(total)[:, None], torch.arange(total)
    assert torch.equal(ours.mask_mod(0, 0, q, k), visible(0, 0, q, k))


def implementations(model: nn.Module) -> list[str]:
    configs = (m.config for m in model.modules() if isinstance(m, PreTrainedModel))
    return [config._attn_implementation for config in configs]


def test_the_engines_attention_is_back_afterwards():
    model, rows = new_model("mistral"), new_rows()
    install_attention(model)
    padded = collate(rows, 0, CPU)
    expected = log_probs_of(model, padded)
    with packed_attention(model, "grouped"):
        assert ATTENTION_NAME not in implementations(model)
        packed = log_probs_of(model, pack(rows, CPU))
    assert set(implementations(model)) == {ATTENTION_NAME}
    assert (packed - expected).abs().max() < 1e-10
    assert torch.equal(log_probs_of(model, padded), expected)
    with pytest.raises(RuntimeError, match="boom"), packed_attention(model, "flex"):
        raise RuntimeError("boom")
    assert set(implementations(model)) == {ATTENTION_NAME}


def test_other_threads_calls_go_where_they_went_before():
    """An engine may run the shared model while the trainer has packed attention on."""
    model, rows = new_model("qwen3"), new_rows()
    install_attention(model)
    padded = collate(rows, 0, CPU)
    expected, seen = log_probs_of(model, padded), []
    with packed_attention(model, "grouped"):
        thread = threading.Thread(target=lambda: seen.append(log_probs_of(model, padded)))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], expected)


def test_calls_without_a_pack_need_a_known_attention():
    model = new_model("llama")
    model.set_attn_implementation("eager")
    with packed_attention(model, "grouped"), pytest.raises(ValueError, match="without packed rows"):
        log_probs_of(model, collate(new_rows(), 0, CPU))


def test_nested_and_repeated_switches_register_no_more_names():
    model = new_model("llama")
    with packed_attention(model, "grouped"):
        inside, names = implementations(model), dict(packing._names)
        with packed_attention(model, "grouped"):
            assert implementations(model) == inside
        assert implementations(model) == inside
    for _ in range(3):
        with packed_attention(model, "grouped"):
            assert implementations(model) == inside
    assert packing._names == names
    assert set(implementations(model)) == {"sdpa"}


def test_configs_of_parts_are_restored_one_by_one():
    """A vision model's parts may have implementations of their own."""
    config = AutoConfig.for_model(
        "gemma3",
        text_config=SHAPE | {"sliding_window": 4},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=1,
    )
    model = Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    before = implementations(model)
    assert {"eager", "sdpa"} <= set(before)
    with packed_attention(model, "grouped"):
        assert all(name.startswith("rollpacker_packed") for name in implementations(model))
    assert implementations(model) == before


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body = model

    def forward(self, **inputs):
        return self.body(**inputs)


def peft_wrapped(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    return wrapped.eval()


@pytest.mark.parametrize("wrap", [Wrapper, peft_wrapped])
def test_wrapped_models_are_packed(wrap):
    model, rows = wrap(new_model("qwen2")), new_rows()
    with torch.no_grad():
        expected = log_probs_of(model, collate(rows, 0, CPU))
        with packed_attention(model, "grouped"):
            actual = log_probs_of(model, pack(rows, CPU))
    assert (actual - expected).abs().max() < 1e-10
    assert set(implementations(model)) == {"sdpa"}


def test_checkpointed_layers_are_computed_again_from_the_pack():
    model, rows = new_model("mistral"), new_rows()
    batch = pack(rows, CPU)
    with packed_attention(model, "grouped"):
        expected = gradients_of(model, log_probs_of(model, batch))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True
    with packed_attention(model, "grouped"):
        actual = gradients_of(model, log_probs_of(model, batch))
    for name, gradient in actual.items():
        assert torch.equal(gradient, expected[name]), name


def test_compiled_layers_are_not_compiled_again_for_every_pack(on_cpu):
    torch.compiler.reset()
    model, compilations = new_model("qwen2_windows"), []

    def backend(graph, _inputs):
        compilations.append(graph)
        return graph.forward

    expected = new_model("qwen2_windows")
    for layer in model.model.layers[:1]:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    for number in range(2, 6):
        batch = pack(new_rows(seed=number)[:number], CPU)
        with packed_attention(model, "varlen"), packed_attention(expected, "varlen"):
            difference = log_probs_of(model, batch) - log_probs_of(expected, batch)
        assert difference.abs().max() < 1e-12
        if number == 3:
            after_two = len(compilations)
    assert len(compilations) == after_two


@pytest.mark.parametrize("change", ["sinks", "dropout", "mask", "bidirectional"])
def test_what_packs_cannot_do_is_refused(change):
    attend = varlen.packed_attention_function("grouped", log_probs_of)
    rows = PackedRows([3], CPU)
    query = torch.zeros(1, 2, 3, 8)
    module, mask, more = nn.Module(), None, {}
    if change == "sinks":
        more = {"s_aux": torch.zeros(2)}
    elif change == "dropout":
        more = {"dropout": 0.1}
    elif change == "mask":
        mask = torch.zeros(1, 1, 3, 3)
    else:
        module.is_causal = False
    with pytest.raises(ValueError, match=r"does not support; set train\.micro_batches=sorted"):
        attend(module, query, query, query, mask, packed_rows=rows, **more)


@contextmanager
def gpu(monkeypatch, *, capability: tuple[int, int] = (9, 0), triton: bool = True):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        patch.setattr(packing, "find_spec", lambda _name: object() if triton else None)
        patch.setattr(packing, "varlen_function", lambda: documented_varlen_attn)
        yield torch.device("cuda")


@pytest.mark.parametrize(
    "family, dtype, machine, expected",
    [
        ("qwen2", torch.bfloat16, {}, "varlen"),
        ("mistral", torch.float16, {}, "varlen"),
        ("qwen2", torch.float32, {}, "flex"),
        ("gemma2", torch.bfloat16, {}, "flex"),
        ("qwen2", torch.bfloat16, {"capability": (7, 5)}, "flex"),
        ("gemma2", torch.bfloat16, {"triton": False}, "grouped"),
        ("qwen2", torch.float64, {}, "grouped"),
    ],
)
def test_what_a_gpu_uses(monkeypatch, family, dtype, machine, expected):
    with gpu(monkeypatch, **machine) as device:
        model = new_model(family, dtype)
        assert best_kind(model, device) == expected
        assert best_kind(new_model(family, torch.float32), device, dtype) == expected
        batcher = Batcher(model, layout="auto", max_tokens=9, pad_token_id=0, device=device)
        assert batcher.layout == "packed"
        model.config.layer_types = ["full_attention", "linear_attention"]
        batcher = Batcher(model, layout="auto", max_tokens=9, pad_token_id=0, device=device)
        assert batcher.layout == "sorted"


def test_this_torchs_varlen_attn_takes_what_is_given_to_it():
    function = varlen.varlen_function()
    assert function is torch.nn.attention.varlen.varlen_attn


def test_models_whose_attention_is_their_own_are_not_packed():
    model = new_model("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention"]
    reason = (
        "Qwen2ForCausalLM has layers of type linear_attention: a row of a pack would begin with "
        "what the one before it left"
    )
    assert why_not(model, "grouped", CPU) == reason and best_kind(model, CPU) is None
    assert why_not(nn.Linear(1, 1), "grouped", CPU) == "Linear is no transformers model"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 120))
def test_packs_cover_all_rows_and_are_nearly_the_fewest(lengths, budget):
    packs = plan_packs(lengths, budget)
    assert sorted(i for members in packs for i in members) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in members) for members in packs]
    for members, size in zip(packs, sizes, strict=True):
        assert members == sorted(members) and (len(members) == 1 or size <= budget)
    # Best-fit decreasing: 11/9 of the fewest and 6/9; the fewest is at least the lower bound.
    oversize = [size for size in lengths if size > budget]
    others = [size for size in lengths if size <= budget]
    fewest = fewest_packs(others, budget) if len(others) <= 8 else None
    if fewest is not None:
        assert len(packs) - len(oversize) <= (11 * fewest + 6) / 9
    assert plan_packs(copy.copy(lengths), budget) == packs


def fewest_packs(sizes: list[int], budget: int) -> int:
    """By trying everything."""

    def place(rest: list[int], bins: list[int]) -> int:
        if not rest:
            return len(bins)
        size, later = rest[0], rest[1:]
        best = place(later, [*bins, size])
        for i, filled in enumerate(bins):
            if filled + size <= budget:
                best = min(best, place(later, [*bins[:i], filled + size, *bins[i + 1 :]]))
        return best

    return place(sorted(sizes, reverse=True), [])


def test_many_rows_fill_their_packs():
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randn(2000, generator=draw).exp() * 60).clamp(2, 2000).long().tolist()
    packs = plan_packs(lengths, 4096)
    assert len(packs) <= -(-sum(lengths) // 4096) + 1
