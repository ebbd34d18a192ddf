"""Model FLOPs against torch's own counter, and the peaks they are divided by."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from rollpacker.trainer import flops
from rollpacker.trainer.flops import FlopModel, known_peak_flops
from rollpacker.trainer.model import character_tokenizer, new_model

HIDDEN, HEADS, LAYERS = 32, 4, 3


def language_model(model_type: str = "qwen2", **settings: object) -> PreTrainedModel:
    architecture = {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
    }
    return new_model(architecture | settings, character_tokenizer("abcdefghij"), 0)


def counted(model: PreTrainedModel, rows: int, length: int) -> tuple[int, int]:
    """Forward and backward of whole rows by torch's counter: matrices and attention. The gradient
    reaches the embeddings' output, as it does in training."""
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.zeros(rows, length, dtype=torch.long))
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded.requires_grad_(True)).logits.sum().backward()
    total = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in total.items() if "attention" in str(op) or "bmm" in str(op))
    return sum(total.values()) - attention, attention


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_torchs_with_causal_attention_halved(tied: bool) -> None:
    model = language_model("qwen3", tie_word_embeddings=tied, head_dim=24)
    model.set_attn_implementation("eager")
    rows, length = 2, 16
    matrices, attention = counted(model, rows, length)
    flops = FlopModel.of(model)
    assert flops.body * rows * length + flops.output * rows * length == matrices
    ours = flops.training([length] * rows, rows * length) - matrices
    assert ours == attention / 2


def test_frozen_parameters_have_no_gradient_of_their_own() -> None:
    model = language_model("qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    flops = FlopModel.of(model)
    matrices, _ = counted(model, 1, 8)
    assert (flops.body + flops.output) * 8 == matrices


def test_only_predicted_tokens_go_through_the_output_layer() -> None:
    model = language_model()
    flops = FlopModel.of(model)
    head = model.lm_head.weight.numel()
    assert flops.training([10], 4) - flops.training([10], 1) == 3 * 6 * head
    assert FlopModel.of(model.get_decoder()).output == 0


def test_a_window_bounds_what_a_token_attends_to() -> None:
    whole = FlopModel.of(language_model())
    windowed = FlopModel.of(
        language_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    )
    assert windowed.windows == (None, 4, 4)
    pairs = sum(min(i + 0.5, 4) for i in range(20))  # each token at the middle of its stretch
    saved = whole.training([20], 1) - windowed.training([20], 1)
    assert saved == 2 * 12 * HIDDEN * (20 * 20 / 2 - pairs)


def test_of_experts_the_chosen_ones_count() -> None:
    def body(num_experts: int) -> float:
        model = language_model(
            "qwen3_moe",
            num_experts=num_experts,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            decoder_sparse_step=1,
        )
        return FlopModel.of(model).body

    router = 6 * LAYERS * HIDDEN
    assert body(8) - body(4) == 4 * router, "more experts to choose from cost the router alone"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_the_devices_name(name: str, tflops: float | None) -> None:
    assert known_peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_a_cpus_peak_is_that_of_the_quickest_matrix_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a made-up clock: a busy machine may take any time for a product."""
    seconds, products = itertools.cycle([0.003, 0.001, 0.007]), []
    now = 0.0

    def product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        nonlocal now
        now += next(seconds)
        products.append(2 * left.shape[0] * left.shape[1] * right.shape[1])

    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(torch, "mm", product)
    found = flops._measured_flops.__wrapped__(1)
    assert found == pytest.approx(products[0] / 0.001)
    assert len(products) > 3 and 0.05 <= now < 0.06


def test_with_an_adapter_the_frozen_weights_cost_two_thirds() -> None:
    plain = language_model()
    whole = FlopModel.of(plain)
    config = LoraConfig(r=2, target_modules=["q_proj"])
    flops = FlopModel.of(get_peft_model(plain, config))
    assert flops.body == whole.body * 4 / 6 + LAYERS * 6 * 2 * 2 * HIDDEN
    assert flops.output == whole.output * 4 / 6
    assert flops.attention == whole.attention
