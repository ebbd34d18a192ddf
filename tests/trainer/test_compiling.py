"""Compiled layers against uncompiled ones, and what happens when compiling fails."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.trainer.compiling import compile_layers
from rollpacker.trainer.lora import adapter_off, adapter_parameters, add_adapter
from rollpacker.trainer.trainer import LoraConfig

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 5], [4, 4, 6, 3, 7, 1, 2, 5, 9, 9, 8]])
"""A width that is no other size of the model: torch takes equal sizes for the same."""


def tiny_model(num_layers: int = 1) -> Qwen2ForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM(config).double().eval()


def checkpointed(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    model.activation_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True
    return model


class Counting:
    """A backend that runs the graphs as they are, counts them, and fails at graph `fail_at`."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.graphs = 0
        self.fail_at = fail_at

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]):
        if self.graphs == self.fail_at:
            raise RuntimeError("no compiler here")
        self.graphs += 1
        return graph.forward


def fails_in_the_backward_pass():
    def fail(graph, inputs):
        raise RuntimeError("no backward compiler")

    return aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fail)


def gradients(model: torch.nn.Module, ids: Tensor = IDS) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and actual
    for name, value in actual.items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-12), name


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


def test_one_compilation_serves_all_layers_and_lengths():
    plain, compiled, backend = tiny_model(5), tiny_model(5), Counting()
    names = [name for name, _ in compiled.named_parameters()]
    assert compile_layers(compiled, backend=backend)
    for width in (11, 5, 3):
        assert_same(gradients(compiled, IDS[:, :width]), gradients(plain, IDS[:, :width]))
    assert backend.graphs == 1
    assert [name for name, _ in compiled.named_parameters()] == names
    assert compiled.state_dict().keys() == plain.state_dict().keys()


def test_generation_with_a_cache_stays_uncompiled():
    plain, compiled, backend = tiny_model(2), tiny_model(2), Counting()
    compile_layers(compiled, backend=backend)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(compiled.generate(IDS, **settings), plain.generate(IDS, **settings))
    assert torch.equal(compiled(IDS, use_cache=True).logits, plain(IDS).logits)
    assert backend.graphs == 0


def saved_bytes(model: torch.nn.Module) -> int:
    """What the forward pass keeps for the backward pass."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=IDS, use_cache=False)
    weights = {p.data_ptr() for p in model.parameters()}
    return sum(t.nbytes for pointer, t in kept.items() if pointer not in weights)


def test_gradient_checkpointing_still_saves_memory():
    plain, free, model = tiny_model(), tiny_model(), checkpointed(tiny_model())
    for each in (free, model):
        compile_layers(each, backend="aot_eager")
    assert_same(gradients(model), gradients(plain))
    assert saved_bytes(model) < 0.6 * saved_bytes(free)


def test_checkpointed_layers_are_compiled_around_what_cannot_be():
    plain, model, backend = checkpointed(tiny_model()), checkpointed(tiny_model()), Counting()
    compile_layers(model, backend=backend)
    for each in (plain, model):
        feed_forward = each.model.layers[0].mlp
        feed_forward.forward = torch.compiler.disable(feed_forward.forward)
    assert_same(gradients(model), gradients(plain))
    assert backend.graphs > 0


@pytest.mark.parametrize("fail_at", [0, 1])
@pytest.mark.parametrize("with_checkpoints", [False, True])
def test_without_a_compiler_the_run_goes_on(caplog, fail_at, with_checkpoints):
    """At once, or when something is compiled again: here without gradients."""
    plain, model, backend = tiny_model(), tiny_model(), Counting(fail_at)
    if with_checkpoints:
        checkpointed(model)
    compile_layers(model, backend=backend)
    with caplog.at_level(logging.WARNING):
        assert_same(gradients(model), gradients(plain))
        with torch.no_grad():
            actual = model(IDS, use_cache=False).logits
        assert torch.equal(actual, plain(IDS).logits)
        assert_same(gradients(model, IDS[:, :5]), gradients(plain, IDS[:, :5]))
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("rollpacker")]
    assert len(ours) == 1 and "no compiler here" in ours[0]
    assert "the run goes on with uncompiled layers" in ours[0]
    assert backend.graphs == fail_at


def test_a_compiler_that_fails_in_the_backward_pass(caplog):
    plain, model = tiny_model(), tiny_model()
    compile_layers(model, backend=fails_in_the_backward_pass())
    with caplog.at_level(logging.WARNING):
        assert_same(gradients(model), gradients(plain))
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("rollpacker")]
    assert len(ours) == 1 and "no backward compiler" in ours[0]


def test_a_copy_of_the_model_has_its_own_weights():
    model = tiny_model()
    compile_layers(model, backend="eager")
    expected = gradients(model)
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert_same(gradients(other), expected)


def test_an_adapter_can_be_switched_off():
    pytest.importorskip("peft")
    plain, model = (add_adapter(tiny_model(), LoraConfig(rank=2)) for _ in range(2))
    for each in (plain, model):
        for parameter in adapter_parameters(each).values():
            parameter.data.fill_(0.1)
    compile_layers(model, backend="eager")
    for _ in range(2):
        assert_same(gradients(model), gradients(plain))
        with adapter_off(model):
            logits = model(IDS, use_cache=False).logits
        assert torch.allclose(logits, tiny_model()(IDS).logits, rtol=0, atol=1e-12)


def test_a_model_without_such_layers_says_so(caplog):
    assert not compile_layers(torch.nn.Linear(2, 2))
    assert "Linear has no layers" in caplog.text


def test_sharded_and_checkpointed_layers(tmp_path):
    """In a process of its own, whose assertions fail here. FSDP's classes and hooks are the same
    for one process as for several."""
    mp.spawn(_sharded_worker, args=(tmp_path / "store",), nprocs=1)


def _sharded_worker(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    try:
        plain, model, backend = tiny_model(), checkpointed(tiny_model()), Counting()
        compile_layers(model, backend=backend)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        actual = {n: g.full_tensor() for n, g in gradients(model).items()}
        assert_same(actual, gradients(plain))
        assert backend.graphs >= 1
    finally:
        dist.destroy_process_group()
