"""The estimate of --dry-run, against what training really does."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.data.dataset import DataConfig, DatasetConfig
from rollpacker.rewards.reward import RewardConfig
from rollpacker.trainer import logprobs
from rollpacker.trainer.activation_checkpointing import enable_checkpointing, layers_in_training
from rollpacker.trainer.estimate import CARRIED_TOKEN_BYTES, estimate
from rollpacker.trainer.lora import adapter_parameters, add_adapter
from rollpacker.trainer.micro_batch import Row, collate
from rollpacker.trainer.model import character_tokenizer, load_model, new_model
from rollpacker.trainer.model_shape import read_shape
from rollpacker.trainer.optimizer import build_optimizer
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.trainer import CriticConfig, LoraConfig, ModelConfig, TrainConfig
from rollpacker.trainer.training_memory import (
    LOGIT_BLOCK_ELEMENTS,
    chosen_tokens,
    micro_batch_choices,
)

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def run_config(path, *, algorithm=None, train=None, tail=None, **model) -> RunConfig:
    settings = {"steps": 7, "micro_batch_tokens": 512} | (train or {})
    return RunConfig(
        name="r",
        model=ModelConfig(path=str(path), **model),
        data=DataConfig(train=DatasetConfig(kind="jsonl", path="x"), max_prompt_tokens=28),
        rollout=RolloutConfig(prompts_per_step=8, samples_per_prompt=4, max_response_tokens=100),
        train=TrainConfig(**settings),
        algorithm=algorithm or AlgorithmConfig(),
        tail_batching=tail or TailBatchingConfig(selection="published"),
        rewards=(RewardConfig(function="m:f"),),
    )


@pytest.fixture
def folder(tmp_path):
    torch.set_num_threads(1)
    tokenizer = character_tokenizer("abcdefgh")
    tokenizer.save_pretrained(tmp_path)
    new_model(ARCHITECTURE, tokenizer, 0).save_pretrained(tmp_path)
    return tmp_path


def part(result, name):
    (found,) = [p.size_bytes for p in result.memory.parts if p.name == name]
    return found


def test_batch_arithmetic(folder):
    batch = estimate(run_config(folder), has_cuda=False).batch
    assert (batch.short_prompts, batch.short_samples_per_prompt, batch.short_samples) == (10, 5, 50)
    assert (batch.long_samples, batch.trained_samples, batch.trained_prompts) == (32, 32, 8)
    assert batch.max_trained_tokens == 32 * 128
    assert (batch.min_micro_batches, batch.max_micro_batches) == (1, 8)
    assert batch.steps == 7


def test_parameters_and_what_follows_from_them_are_exact(folder):
    model = load_model(ModelConfig(path=str(folder), device="cpu")).model
    count = sum(p.numel() for p in model.parameters())
    result = estimate(run_config(folder), has_cuda=False)
    assert result.num_parameters == count
    assert part(result, "weights") == sum(p.nbytes for p in model.parameters())
    assert part(result, "optimizer") == 2 * part(result, "gradients") == 8 * count
    low = estimate(run_config(folder), has_cuda=True)
    assert (low.dtype, low.device) == ("bfloat16", "cuda")
    assert part(low, "weights") == 2 * count and part(low, "master") == 4 * count


def kept_for_backward(model, rows, layers=()) -> int:
    """Bytes of everything that a forward pass saves, by counting storages."""
    policy = Policy(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    batch = collate(rows, 0, torch.device("cpu"))
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
    with layers_in_training(layers), hooks:
        policy(batch, 1.0)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_activations_are_within_three_percent_of_the_measured(folder, dtype, checkpointed):
    """Of one full micro-batch, all of it response; its logits are one block, which is kept."""
    model = load_model(ModelConfig(path=str(folder), device="cpu", dtype=dtype)).model
    layers = enable_checkpointing(model) if checkpointed else []
    measured = kept_for_backward(model, [Row((3,), tuple([4] * 128))] * 4, layers)
    result = estimate(
        run_config(folder, dtype=dtype, gradient_checkpointing=checkpointed), has_cuda=False
    )
    logits = 512 * model.config.vocab_size * 4
    assert part(result, "activations") + logits == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_under_adapters_are_within_three_percent_of_the_measured(folder, dtype):
    pytest.importorskip("peft")
    model = load_model(ModelConfig(path=str(folder), device="cpu", dtype=dtype)).model
    add_adapter(model, LoraConfig(rank=2))
    measured = kept_for_backward(model, [Row((3,), tuple([4] * 128))] * 4)
    result = estimate(run_config(folder, dtype=dtype, lora=LoraConfig(rank=2)), has_cuda=False)
    logits = 512 * model.config.vocab_size * 4
    assert part(result, "activations") + logits == pytest.approx(measured, rel=0.03)
    adapters = sum(p.nbytes for p in adapter_parameters(model).values())
    assert part(result, "adapters") == part(result, "gradients") == adapters
    assert part(result, "optimizer") == 2 * adapters
    assert part(result, "engine") == part(result, "weights") + adapters
    kl = AlgorithmConfig(kl_coef=0.1)
    penalized = estimate(
        run_config(folder, dtype=dtype, lora=LoraConfig(rank=2), algorithm=kl), has_cuda=False
    )
    assert penalized.total_bytes == result.total_bytes, "the reference is the model without them"


def test_only_named_modules_have_adapters(folder):
    one = estimate(
        run_config(folder, lora=LoraConfig(rank=2, target_modules=("q_proj",))), has_cuda=False
    )
    assert part(one, "adapters") == 4 * 3 * 2 * (64 + 64) and not one.notes
    strange = estimate(
        run_config(folder, lora=LoraConfig(rank=2, target_modules=("q_proj", "wqkv"))),
        has_cuda=False,
    )
    assert any("wqkv" in note for note in strange.notes)


def test_the_block_of_logits_is_the_trainer_s():
    assert LOGIT_BLOCK_ELEMENTS == logprobs.BLOCK_ELEMENTS


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizer_s_state_is_exact(folder, optimizer):
    model = load_model(ModelConfig(path=str(folder), device="cpu")).model
    config = run_config(folder, train={"optimizer": optimizer})
    built = build_optimizer(model.named_parameters(), config.train)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    built.step(1e-3, 1.0)
    moments = [v for name, v in built.state().items() if not name.startswith("step.")]
    result = estimate(config, has_cuda=False)
    assert part(result, "optimizer") == sum(value.nbytes for value in moments)


def test_checkpointing_a_reference_and_a_long_context(folder):
    plain = estimate(run_config(folder), has_cuda=False)
    assert not plain.notes
    saved = estimate(run_config(folder, gradient_checkpointing=True), has_cuda=False)
    assert part(saved, "activations") < part(plain, "activations") / 2
    with_kl = estimate(run_config(folder, algorithm=AlgorithmConfig(kl_coef=0.1)), has_cuda=False)
    assert part(with_kl, "reference") == part(plain, "weights")
    grown = with_kl.total_bytes - plain.total_bytes
    assert grown == part(plain, "weights")
    assert part(plain, "kv cache") == 50 * 128 * 2 * 3 * 32 * 4


def test_full_logits_are_not_in_it(folder):
    """Twice the micro-batch: the block of logits stays, what is per token doubles."""
    import json

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 200_000}))
    small, large = (
        estimate(run_config(folder, train={"micro_batch_tokens": n}), has_cuda=False)
        for n in (1024, 2048)
    )
    assert part(large, "activations") == pytest.approx(2 * part(small, "activations"), rel=0.01)
    block, full_logits = 2 * 4 * LOGIT_BLOCK_ELEMENTS["cpu"], 2048 * 200_000 * 4
    assert block < part(small, "backward") < part(large, "backward") < full_logits / 4


def test_a_critic_and_a_teacher(folder):
    plain = estimate(run_config(folder), has_cuda=False)
    ppo = estimate(run_config(folder, algorithm=AlgorithmConfig(name="ppo")), has_cuda=False)
    assert part(ppo, "critic") == part(plain, "weights"), "the output layer is the embeddings"
    assert part(ppo, "critic optimizer") == part(plain, "optimizer")
    assert part(ppo, "activations") == 2 * part(plain, "activations")
    own = {"critic": CriticConfig(path="some-org/value-0.5B")}
    other = estimate(
        run_config(folder, algorithm=AlgorithmConfig(name="ppo"), train=own), has_cuda=False
    )
    assert part(other, "critic") == 4 * 500_000_000
    taught = estimate(
        run_config(
            folder, algorithm=AlgorithmConfig(name="distillation"), teacher="some-org/Large-1.5B"
        ),
        has_cuda=False,
    )
    assert part(taught, "teacher") == 4 * 1_500_000_000


def test_processes_of_the_trainer_s_own(folder):
    plain = estimate(run_config(folder), has_cuda=False)
    weights, optimizer = part(plain, "weights"), part(plain, "optimizer")
    step, often = (
        estimate(run_config(folder, train={"processes": 4, "gradient_sync": sync}), has_cuda=False)
        for sync in ("step", "micro-batch")
    )
    assert {p.name for p in step.memory.parts} == {"engine", "hand-over", "kv cache"}
    assert part(step, "engine") == part(step, "hand-over") == weights
    of_process = {p.name: p.size_bytes for p in step.rank(0).parts}
    assert of_process["weights"] == weights // 4 and of_process["optimizer"] == optimizer // 4
    assert of_process["gradients"] == weights, "each process adds up whole gradients"
    assert {p.name: p.size_bytes for p in often.rank(0).parts}["gradients"] == weights // 4
    each = sum(of_process.values())
    assert step.total_bytes == step.memory.size_bytes + 4 * each
    assert "each of the trainer's 4 processes" in "\n".join(step.lines())
    adapted = estimate(
        run_config(folder, train={"processes": 2}, lora=LoraConfig(rank=2)), has_cuda=False
    )
    adapters = 2 * next(p.size_bytes for p in adapted.rank(0).parts if p.name == "adapters")
    assert part(adapted, "hand-over") == adapters, "of a model with adapters those alone"
    on_gpus = estimate(run_config(folder, train={"processes": 4}), has_cuda=True)
    assert on_gpus.total_bytes == on_gpus.memory.size_bytes
    assert {p.name for p in on_gpus.memory.parts} == {"engine", "kv cache"}
    assert any("host memory" in note for note in on_gpus.notes), "the hand-over is not on the GPU"
    shards = {p.name: p.size_bytes for p in on_gpus.rank(0).parts}
    assert shards["weights"] == weights // 4 and "master" not in shards, "float32 at rest"


def test_micro_batches_that_are_smaller_than_a_sample_are_noted(folder):
    result = estimate(run_config(folder, train={"micro_batch_tokens": 64}), has_cuda=False)
    (note,) = result.notes
    assert "micro_batch_tokens=64" in note and "127 tokens" in note
    assert "127 tokens" in next(p.formula for p in result.memory.parts if p.name == "activations")


def test_context_that_is_too_short_is_noted(folder):
    import json

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    assert "context is 100" in estimate(run_config(folder), has_cuda=False).notes[0]


def test_a_model_that_is_not_here():
    named = estimate(run_config("some-org/Some-Model-1.5B-Instruct"), has_cuda=True)
    assert named.num_parameters == 1_500_000_000
    assert part(named, "weights") == 3_000_000_000
    assert any("from its name" in note for note in named.notes)
    unknown = estimate(run_config("some-org/some-model"), has_cuda=True)
    assert unknown.num_parameters is None and unknown.memory.parts == ()
    assert any("cannot be known" in line for line in unknown.lines())
    assert unknown.batch.short_samples == 50


def test_lines_name_everything(folder):
    text = "\n".join(estimate(run_config(folder), has_cuda=False).lines())
    for word in ("10 prompts x 5 samples = 50", "long round", "weights", "activations", "kv cache"):
        assert word in text
    assert "besides torch and what the allocator keeps" in text


@pytest.mark.parametrize(
    ("tail", "prompts"),
    [
        (TailBatchingConfig(stragglers="pool", prompt_factor=1.25), 2),
        (TailBatchingConfig(stragglers="pool", prompt_factor=2.0), 8),
        (TailBatchingConfig(), 7 + 4),
        (TailBatchingConfig(look_ahead=1.0), 7 + 4 + 12),
        (TailBatchingConfig(prompt_factor=1.5, tiers=(Tier(prompt_factor=1.25),)), 9 + 7 + 4),
    ],
    ids=["pool", "wide pool", "queue", "look ahead", "tier"],
)
def test_what_deferred_prompts_carry_is_bounded(folder, tail, prompts):
    size = prompts * 4 * 100 * CARRIED_TOKEN_BYTES
    result = estimate(run_config(folder, tail=tail), has_cuda=False)
    assert part(result, "carried tokens") == size and result.batch.most_carried == prompts
    text = "\n".join(result.lines())
    assert f"at most {prompts} deferred prompts x 4 samples x 100 tokens x 12 bytes" in text
    assert ("the rest goes on in the next round" in text) == tail.pooled
    on_cuda = estimate(run_config(folder, tail=tail), has_cuda=True)
    assert any("of host memory" in note for note in on_cuda.notes)
    dropped = dataclasses.replace(tail, carry="none", look_ahead=0.0)
    without = estimate(run_config(folder, tail=dropped), has_cuda=False)
    assert without.total_bytes == result.total_bytes - size


def test_estimating_does_not_import_torch():
    code = "import sys, rollpacker.trainer.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tail_batching_and_streaming_are_in_the_arithmetic(folder):
    base = run_config(folder)
    tiers = (Tier(prompt_factor=1.1, sample_factor=2.0), Tier(prompt_factor=1.0, sample_factor=1.0))
    cascade = dataclasses.replace(
        base, tail_batching=TailBatchingConfig(selection="published", tiers=tiers, debias="moments")
    )
    result = estimate(cascade, has_cuda=False)
    assert result.batch.cascade_rounds == ((9, 8), (8, 4))
    assert result.batch.most_samples == 72
    assert part(result, "kv cache") == 72 * 128 * 2 * 3 * 32 * 4
    text = "\n".join(result.lines())
    assert "cascade 1     9 deferred prompts x 8 samples = 72" in text and "debias=moments" in text
    auto = TailBatchingConfig(selection="published", prompt_factor="auto", max_length_shift=0.2)
    stream = StreamConfig(enabled=True, reward_wait=True, max_share=0.5)
    chosen = dataclasses.replace(base, tail_batching=auto, stream_trainer=stream)
    result = estimate(chosen, has_cuda=False)
    assert (result.batch.short_prompts, result.batch.short_samples_per_prompt) == (10, 5)
    text = "\n".join(result.lines())
    assert "at most 20 % shorter" in text and "up to 16 of a step's samples" in text


def test_sources_are_balanced_where_rewards_name_tasks(folder):
    base = run_config(folder)
    tail = TailBatchingConfig(balance_sources=True)
    one = dataclasses.replace(base, tail_batching=tail)
    said = "balance_sources changes nothing"
    assert any(said in note for note in estimate(one, has_cuda=False).notes)
    routed = dataclasses.replace(
        one,
        rewards=tuple(RewardConfig(function="m:f", tasks=(task,)) for task in ("math", "code")),
    )
    assert not any(said in note for note in estimate(routed, has_cuda=False).notes)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_the_formula_of_activations_is_what_is_computed(folder, dtype, checkpointed, lora):
    result = estimate(
        run_config(folder, dtype=dtype, gradient_checkpointing=checkpointed, lora=lora),
        has_cuda=False,
    )
    found = next(part for part in result.memory.parts if part.name == "activations")
    shape = read_shape(folder, [])
    widths = {
        "hidden": shape.hidden,
        "query": shape.query,
        "kv": shape.key_value,
        "ffn": shape.feed_forward,
        "layers": shape.layers,
    }
    text = found.formula.replace(" tokens", "").replace(" bytes", "").replace(" x ", " * ")
    text = re.sub(r"(\d) ([a-z])", r"\1 * \2", text)
    assert eval(text, {}, widths) == found.size_bytes


def test_micro_batches_as_large_as_the_ranks_memory_has_room_for(folder):
    """Each choice is what --dry-run says of that size; all that there is to train goes in one."""
    many = RolloutConfig(prompts_per_step=64, samples_per_prompt=4, max_response_tokens=100)
    train = {"processes": 4, "micro_batch_tokens": "auto"}
    config = dataclasses.replace(run_config(folder, train=train), rollout=many)
    choices = micro_batch_choices(config, on_cuda=True)
    assert [tokens for tokens, _ in choices] == [4096, 8192, 16384, 256 * 127]
    sizes = [size for _, size in choices]
    assert sizes == sorted(set(sizes))
    fixed = dataclasses.replace(
        config, train=dataclasses.replace(config.train, micro_batch_tokens=8192)
    )
    assert estimate(fixed, has_cuda=True).rank(0).size_bytes == sizes[1]
    for room, expected in ((0, 4096), (sizes[2] / 0.9 - 1, 8192), (sizes[2] / 0.9 + 1, 16384)):
        assert chosen_tokens(choices, room) == expected
    assert chosen_tokens(choices, 1 << 40) == 256 * 127
    assert micro_batch_choices(fixed, on_cuda=True) == ()
    assert micro_batch_choices(config, on_cuda=False) == ()


def test_engines_in_processes_of_their_own_take_memory_there(folder):
    """And not in the run's process: that has weights on their way on a CPU, nothing on CUDA."""
    config = run_config(folder, train={"processes": 4})
    rollout = dataclasses.replace(config.rollout, engines=2)
    on_cpu, on_gpus = (
        estimate(dataclasses.replace(config, rollout=rollout), has_cuda=cuda)
        for cuda in (False, True)
    )
    weights = part(estimate(run_config(folder), has_cuda=False), "weights")
    assert {p.name for p in on_cpu.memory.parts} == {"hand-over"}
    assert part(on_cpu, "hand-over") == weights
    assert [p.name for p in on_cpu.engine.parts] == ["weights", "kv cache"]
    assert on_cpu.engine.parts[0].size_bytes == weights
    others = 2 * on_cpu.engine.size_bytes + 4 * on_cpu.rank(0).size_bytes
    assert on_cpu.total_bytes == weights + others
    assert on_gpus.memory.parts == () and on_gpus.engines == 2
    assert on_gpus.total_bytes == max(on_gpus.engine.size_bytes, on_gpus.rank(0).size_bytes)
    assert "on each device of the 2 engines" in "\n".join(on_gpus.lines())
    alone = dataclasses.replace(run_config(folder), rollout=rollout)
    assert part(estimate(alone, has_cuda=False), "hand-over") == weights
    assert "engine" not in {p.name for p in estimate(alone, has_cuda=False).memory.parts}
