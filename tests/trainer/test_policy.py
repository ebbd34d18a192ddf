"""The policy's forward pass against `model(...).logits` of transformers."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.engines.embedded.attention import install_attention
from rollpacker.trainer.micro_batch import MicroBatch, Row, collate
from rollpacker.trainer.policy import Policy
from tests.trainer.test_logprobs import LargestTensor

TEMPERATURE = 0.7
ROWS = [Row((3, 4), (5, 6, 7)), Row((3,), (4, 4, 9, 9, 2)), Row((8, 9, 1, 2, 3), (5,))]
SMALL = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
FAMILIES = {
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "llama": {},
    "gemma2": {"final_logit_softcapping": 2.0, "sliding_window": 4},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.2},
    "phi": {},  # its output layer has a bias
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64},
}
NORMS_IN_FLOAT32 = {"gemma2", "cohere"}
"""Whatever the model's own precision."""


def make(family: str) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **SMALL, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config).double().eval()


def batch_of(rows=ROWS) -> MicroBatch:
    return collate(rows, 0, torch.device("cpu"))


def plain(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Each row by itself, with full logits."""
    log_probs, entropies = [], []
    for context, targets, _ in ROWS:
        ids = torch.tensor([[*context, *targets]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1]
        table = torch.log_softmax(logits / TEMPERATURE, -1)
        log_probs.append(table.gather(-1, torch.tensor(targets)[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model: nn.Module, results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    log_probs, entropy = results
    (log_probs * torch.arange(1, 1 + len(log_probs)) + 0.3 * entropy).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, policy: Policy, tolerance: float = 1e-9) -> None:
    """Values and every gradient, relative to their norms."""
    expected, actual = plain(model), policy(batch_of(), TEMPERATURE)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() < tolerance * theirs.norm()
    ours, theirs = gradients(model, actual), gradients(model, expected)
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < tolerance * (1 + gradient.norm()), name


@pytest.mark.parametrize("block_elements", [50, 1 << 20])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_model_s_own_logits(family, block_elements):
    model = make(family)
    policy = Policy(model, block_elements=block_elements)
    assert policy.runs_in_blocks
    assert_same(model, policy, 1e-4 if family in NORMS_IN_FLOAT32 else 1e-9)


def test_the_families_are_as_different_as_the_tests_say():
    assert make("phi").get_output_embeddings().bias is not None
    tied = make("qwen2 tied")
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    untied = make("qwen2")
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight


class Oddity(nn.Module):
    """An output layer that no one knows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden).sin()


def test_an_unknown_output_layer_runs_as_a_whole_and_says_so_once(caplog):
    model = make("llama")
    model.lm_head = Oddity(model.lm_head)
    with caplog.at_level(logging.WARNING, logger="rollpacker"):
        policy = Policy(model)
        assert not policy.runs_in_blocks
        assert_same(model, policy)
    assert len(caplog.records) == 1 and "LlamaForCausalLM" in caplog.text


def test_a_decoder_that_takes_other_arguments_runs_as_a_whole():
    model = make("llama")
    model.get_decoder = lambda: nn.Flatten()
    policy = Policy(model)
    assert not policy.runs_in_blocks
    assert_same(model, policy)


def test_an_unknown_transform_of_the_logits_runs_as_a_whole():
    model = make("llama")
    own_forward = model.forward

    def bent(*args, **kwargs):
        outputs = own_forward(*args, **kwargs)
        outputs.logits = outputs.logits * 1.01
        return outputs

    model.forward = bent
    policy = Policy(model)
    assert not policy.runs_in_blocks
    assert_same(model, policy)


def test_other_threads_see_the_whole_output_layer_meanwhile():
    """An engine may use the model while the fallback has its hook in place."""
    model = make("llama")
    model.lm_head = Oddity(model.lm_head)
    seen = []

    def elsewhere(*_: object) -> None:
        hidden = torch.zeros(1, 9, 16, dtype=torch.float64)
        worker = threading.Thread(target=lambda: seen.append(model.lm_head(hidden).shape))
        worker.start()
        worker.join()

    policy = Policy(model)
    model.model.norm.register_forward_hook(elsewhere)
    policy(batch_of(), TEMPERATURE)
    assert seen == [(1, 9, 37)]


def test_no_tensor_has_the_size_of_full_logits():
    """Only the output layer's share of a larger batch; the rest of the model is smaller."""
    model = make("qwen2 tied")
    policy = Policy(model, block_elements=600)
    batch = batch_of([Row(tuple(range(1, 4)), (5,) * 60)] * 2)
    with LargestTensor() as largest:
        log_probs, entropy = policy(batch, TEMPERATURE)
        (log_probs.sum() + entropy.sum()).backward()
    parameters = max(p.numel() for p in model.parameters())
    layer = batch.input_ids.numel() * SMALL["intermediate_size"]
    assert largest.elements <= max(parameters, layer) < 120 * SMALL["vocab_size"]


def test_construction_and_forward_change_nothing():
    model = make("gemma2")
    model.model.layers[0].train()
    modes = [m.training for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    policy = Policy(model)
    policy(batch_of(), TEMPERATURE)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert dict(policy.model.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_with_the_engine_s_attention_and_a_low_precision():
    model = make("qwen2 tied")
    expected = plain(model)
    install_attention(model)
    ours = Policy(model)(batch_of(), TEMPERATURE)
    assert torch.allclose(ours[0], expected[0], atol=1e-11)
    low = Policy(model.bfloat16())
    assert low.runs_in_blocks
    log_probs, entropy = low(batch_of(), TEMPERATURE)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(log_probs.double(), expected[0], atol=0.2)


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(make("llama"), settings)
    policy = Policy(model, block_elements=50)
    assert policy.runs_in_blocks
    assert_same(model, policy)
    names = gradients(model, policy(batch_of(), TEMPERATURE)).keys()
    assert names and all("lora_" in name for name in names)
    with_adapter = policy(batch_of(), TEMPERATURE)[0]
    with model.disable_adapter():
        without = policy(batch_of(), TEMPERATURE)[0]
        assert torch.allclose(without, plain(make("llama"))[0], atol=1e-11)
    assert not torch.allclose(with_adapter, without, atol=1e-3)


def test_an_adapter_on_the_output_layer_runs_as_a_whole():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(make("llama"), settings)
    policy = Policy(model)
    assert not policy.runs_in_blocks
    assert_same(model, policy)
