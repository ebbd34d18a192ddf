"""Adapters against peft's own wrapper and against the plain model."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.resume import write_model
from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.data.dataset import DataConfig, DatasetConfig
from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.rewards.reward import RewardConfig
from rollpacker.run.parts.trainer import build_trainer, start_trainer_processes
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.hand_over import hand_over_weights
from rollpacker.trainer.lora import (
    adapter_off,
    adapter_parameters,
    add_adapter,
    load_adapter,
    merged_weights,
    save_adapter,
)
from rollpacker.trainer.model import load_model
from rollpacker.trainer.optimizer import MasterOptimizer
from rollpacker.trainer.trainer import LoraConfig, ModelConfig, TrainConfig, TrainerError
from tests.trainer.tiny import samples

peft = pytest.importorskip("peft")

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}


def qwen(dtype: torch.dtype = torch.float64, tied: bool = True) -> Qwen2ForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).to(dtype).eval()


def llama(dtype: torch.dtype = torch.float64, tied: bool = False) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype).eval()


def with_adapter(model: PreTrainedModel, *targets: str) -> PreTrainedModel:
    """Adapters with random weights, so that they matter."""
    config = LoraConfig(rank=3, alpha=5.0, target_modules=targets or ("all-linear",))
    adapted = add_adapter(model, config)
    assert adapted is model
    draw = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(model).values():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("make", [qwen, llama])
def test_only_the_adapters_train(make):
    model, plain = make(), make()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    add_adapter(model, LoraConfig(rank=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(model), logits(plain))
    adapters = adapter_parameters(model)
    assert len(adapters) == 2 * 7 * 2
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == adapters.keys()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == adapters.keys()


def test_the_seed_decides_the_adapters():
    first, same, other = (add_adapter(qwen(), LoraConfig(rank=3), seed=seed) for seed in (1, 1, 2))
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    weights = [dict(model.named_parameters())[name] for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_logits_are_those_of_pefts_wrapper():
    ours = with_adapter(qwen())
    settings = peft.LoraConfig(r=3, lora_alpha=5.0, target_modules="all-linear")
    theirs = peft.get_peft_model(qwen(), settings)
    named = dict(theirs.named_parameters())
    for name, parameter in adapter_parameters(ours).items():
        named[f"base_model.model.{name}"].data.copy_(parameter)
    assert torch.equal(logits(ours), logits(theirs))
    assert not torch.allclose(logits(ours), logits(qwen()), atol=0.1)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
@pytest.mark.parametrize("make, tied", [(qwen, True), (qwen, False), (llama, False)])
def test_merged_weights_are_a_plain_model_that_computes_the_same(make, tied, targets):
    model, plain = with_adapter(make(tied=tied), *targets), make(tied=tied)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    merged = dict(merged_weights(model))
    assert merged.keys() == {name for name, _ in plain.named_parameters()}
    missing, unexpected = plain.load_state_dict(merged, strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if tied else [])
    assert torch.allclose(logits(plain), logits(model), rtol=0, atol=1e-12)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_an_untied_embedding_and_head_can_have_adapters():
    model, plain = with_adapter(qwen(tied=False), "embed_tokens", "lm_head"), qwen(tied=False)
    plain.load_state_dict(dict(merged_weights(model)))
    assert torch.allclose(logits(plain), logits(model), rtol=0, atol=1e-12)


def test_merged_weights_are_saved_as_a_plain_model(tmp_path):
    model = with_adapter(qwen(torch.float32))
    model.save_pretrained(tmp_path, state_dict=dict(merged_weights(model)))
    assert not (tmp_path / "adapter_config.json").exists()
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.allclose(logits(loaded), logits(model), rtol=0, atol=1e-5)


def test_bfloat16_weights_have_float32_adapters_and_merge_in_float32():
    model = with_adapter(qwen(torch.bfloat16))
    adapters = adapter_parameters(model)
    assert all(p.dtype == torch.float32 for p in adapters.values())
    assert logits(model).dtype == torch.bfloat16
    merged = dict(merged_weights(model))
    assert all(t.dtype == torch.bfloat16 for t in merged.values())
    path = "model.layers.1.mlp.up_proj"
    down, up = (adapters[f"{path}.lora_{side}.default.weight"] for side in "AB")
    base = dict(qwen(torch.bfloat16).named_parameters())[f"{path}.weight"]
    expected = (base.double() + 5 / 3 * up.double() @ down.double()).bfloat16()
    # A float32 sum may fall on the other side of the middle between two bfloat16 numbers.
    assert (merged[f"{path}.weight"] == expected).float().mean() > 0.99
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in adapters.values())


def test_without_the_adapter_it_is_the_model_as_it_was():
    model, plain = with_adapter(qwen()), qwen()
    adapted = logits(model)
    with adapter_off(model):
        assert torch.equal(logits(model), logits(plain))
        assert all(p.requires_grad for p in adapter_parameters(model).values())
        assert not model(input_ids=IDS).logits.requires_grad
    assert torch.equal(logits(model), adapted)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == adapter_parameters(
        model
    ).keys()


def test_the_adapter_comes_back_after_an_error():
    model = with_adapter(qwen())
    adapted = logits(model)
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert torch.equal(logits(model), adapted)


def test_a_step_of_training_changes_the_adapters_alone():
    model, plain = with_adapter(qwen(torch.bfloat16)), qwen(torch.bfloat16)
    optimizer = MasterOptimizer(
        model.named_parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    before = logits(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert optimizer.gradients().keys() == adapter_parameters(model).keys()
    optimizer.step(1e-2, 1.0)
    assert not torch.equal(logits(model), before)
    with adapter_off(model):
        assert torch.equal(logits(model), logits(plain))


def test_peft_reads_what_is_saved(tmp_path):
    model = with_adapter(qwen(torch.float32))
    save_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 5.0, "LORA")
    loaded = peft.PeftModel.from_pretrained(qwen(torch.float32), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))


def test_a_saved_adapter_is_loaded_exactly(tmp_path):
    model = with_adapter(qwen(torch.bfloat16))
    save_adapter(model, tmp_path)
    other = add_adapter(qwen(torch.bfloat16), LoraConfig(rank=3, alpha=5.0), seed=9)
    load_adapter(other, tmp_path)
    assert torch.equal(logits(other), logits(model))


def test_another_adapter_is_refused(tmp_path):
    save_adapter(with_adapter(qwen()), tmp_path)
    with pytest.raises(TrainerError, match="not the adapter of this model"):
        load_adapter(add_adapter(qwen(), LoraConfig(rank=4)), tmp_path)
    with pytest.raises(TrainerError, match="not the adapter of this model"):
        load_adapter(with_adapter(qwen(), "q_proj"), tmp_path)
    with pytest.raises(TrainerError, match="cannot read the adapter"):
        load_adapter(with_adapter(qwen()), tmp_path / "nowhere")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(TrainerError, match="cannot read the adapter"):
        load_adapter(with_adapter(qwen()), tmp_path)


def test_adapters_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"target_modules=\['nothing'\] does not fit Qwen2"):
        add_adapter(qwen(), LoraConfig(target_modules=("nothing",)))
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(ValueError, match=f"{name}, whose weight is tied"):
            add_adapter(qwen(), LoraConfig(target_modules=(name,)))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs peft, .*rollpacker\[lora\]"):
        add_adapter(qwen(), LoraConfig())


def test_two_processes_with_sharded_adapters(tmp_path):
    """The worker's assertions fail here."""
    mp.spawn(_sharded_worker, args=(tmp_path,), nprocs=2)


@pytest.mark.parametrize("processes", [None, 1])
def test_the_engine_computes_what_the_trainer_does(tmp_path, processes):
    """In bfloat16, with updates so small that merged weights would hardly change."""
    write_model(tmp_path)
    config = RunConfig(
        name="lora",
        model=ModelConfig(
            path=str(tmp_path), dtype="bfloat16", device="cpu", lora=LoraConfig(rank=2)
        ),
        data=DataConfig(train=DatasetConfig(kind="jsonl", path="none")),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=40),
        train=TrainConfig(steps=2, learning_rate=1e-4, processes=processes),
        rewards=(RewardConfig(function="none:none"),),
    )
    loaded = load_model(config.model)
    install_attention(loaded.model)
    engine = TorchEngine(model=loaded.model, tokenizer=None, config=config.rollout.engine)
    policy = SimpleNamespace(loaded=loaded, engine=engine, threads=1)
    trainer = build_trainer(config, policy, start_trainer_processes(config))
    untrained = logits(loaded.model)

    async def step() -> None:
        await trainer.accumulate(samples(0))
        await trainer.apply()
        await hand_over_weights(trainer, Engines([engine]), 1)

    try:
        asyncio.run(step())
        trainer.save(tmp_path / "saved")
    finally:
        trainer.close()
    own = add_adapter(load_model(config.model).model, config.model.lora)
    load_adapter(own, tmp_path / "saved" / "adapter")
    install_attention(own)
    assert torch.equal(logits(loaded.model), logits(own))
    assert not torch.equal(logits(own), untrained)


def _sharded_worker(rank: int, folder: Path) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        _check_sharded(rank, folder)
    finally:
        dist.destroy_process_group()


def _check_sharded(rank: int, folder: Path) -> None:
    whole, sharded = with_adapter(qwen()), with_adapter(qwen())
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    with adapter_off(sharded):
        assert torch.allclose(logits(sharded), logits(qwen()), rtol=0, atol=1e-12)
    optimizers = [
        MasterOptimizer(m.named_parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        for m in (whole, sharded)
    ]
    for model, optimizer in zip((whole, sharded), optimizers, strict=True):
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert optimizer.gradients().keys() == adapter_parameters(model).keys()
        optimizer.step(1e-2, 1.0)
    expected = dict(merged_weights(whole))
    actual = dict(merged_weights(sharded))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.allclose(value.full_tensor(), expected[name], rtol=0, atol=1e-12), name
    save_adapter(sharded, folder / "adapter", write=rank == 0)
    dist.barrier()
    other = add_adapter(qwen(), LoraConfig(rank=3, alpha=5.0), seed=9)
    load_adapter(other, folder / "adapter")
    assert torch.allclose(logits(other), logits(whole), rtol=0, atol=1e-12)
    for parameter in adapter_parameters(sharded).values():
        parameter.data.zero_()
    load_adapter(sharded, folder / "adapter")
    assert torch.allclose(logits(sharded), logits(whole), rtol=0, atol=1e-12)
