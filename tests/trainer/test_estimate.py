"""The estimate of --dry-run, against what training really does."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from rollpacker.algo.base import AlgorithmConfig
from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.core.rounds import TailBatchingConfig, Tier
from rollpacker.core.stream_plan import StreamConfig
from rollpacker.data.base import DataConfig, DatasetConfig
from rollpacker.rewards.base import RewardConfig
from rollpacker.trainer.base import ModelConfig, TrainConfig
from rollpacker.trainer.batches import collate
from rollpacker.trainer.estimate import estimate
from rollpacker.trainer.logprobs import response_log_probs
from rollpacker.trainer.model import character_tokenizer, load_model, new_model

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


def run_config(path, *, algorithm=None, **model) -> RunConfig:
    return RunConfig(
        name="r",
        model=ModelConfig(path=str(path), **model),
        data=DataConfig(train=DatasetConfig(kind="jsonl", path="x"), max_prompt_tokens=28),
        rollout=RolloutConfig(prompts_per_step=8, samples_per_prompt=4, max_response_tokens=100),
        train=TrainConfig(steps=7, micro_batch_tokens=512),
        algorithm=algorithm or AlgorithmConfig(),
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
    (found,) = [p.size_bytes for p in result.memory if p.name == name]
    return found


def test_batch_arithmetic(folder):
    batch = estimate(run_config(folder), has_cuda=False).batch
    assert (batch.short_prompts, batch.short_samples_per_prompt, batch.short_samples) == (10, 5, 50)
    assert (batch.long_samples, batch.trained_samples, batch.trained_prompts) == (32, 32, 8)
    assert batch.max_trained_tokens == 32 * 128
    assert (batch.min_micro_batches, batch.max_micro_batches) == (1, 8)
    assert batch.optimizer_steps == 7


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_and_logits_are_within_a_tenth_of_the_measured(folder, dtype):
    """Everything that backward keeps of one full micro-batch, by counting storages."""
    model = load_model(ModelConfig(path=str(folder), device="cpu", dtype=dtype)).model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    rows = [((3,), tuple([4] * 128))] * 4
    batch = collate(rows, 0, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        response_log_probs(model, batch, 1.0)
    measured = sum(size for size, _ in kept.values())
    result = estimate(run_config(folder, dtype=dtype), has_cuda=False)
    element = 2 if dtype == "bfloat16" else 4
    vocabulary = model.config.vocab_size
    logits = 512 * vocabulary * element
    assert part(result, "logits") == 2 * logits + 8 * 512 * vocabulary
    assert part(result, "activations") + logits == pytest.approx(measured, rel=0.1)


def test_checkpointing_a_reference_and_a_long_context(folder):
    plain = estimate(run_config(folder), has_cuda=False)
    assert not plain.notes
    saved = estimate(run_config(folder, gradient_checkpointing=True), has_cuda=False)
    assert part(saved, "activations") < part(plain, "activations") / 2
    with_kl = estimate(run_config(folder, algorithm=AlgorithmConfig(kl_coef=0.1)), has_cuda=False)
    assert with_kl.total_bytes - plain.total_bytes == part(plain, "weights")
    assert part(plain, "kv cache") == 50 * 128 * 2 * 3 * 32 * 4


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
    assert unknown.num_parameters is None and unknown.memory == ()
    assert any("cannot be known" in line for line in unknown.lines())
    assert unknown.batch.short_samples == 50


def test_lines_name_everything(folder):
    text = "\n".join(estimate(run_config(folder), has_cuda=False).lines())
    for word in ("10 prompts x 5 samples = 50", "long round", "weights", "activations", "kv cache"):
        assert word in text


def test_estimating_does_not_import_torch():
    code = "import sys, rollpacker.trainer.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tail_batching_and_streaming_are_in_the_arithmetic(folder):
    base = run_config(folder)
    tiers = (Tier(prompt_factor=1.1, sample_factor=2.0), Tier(prompt_factor=1.0, sample_factor=1.0))
    cascade = dataclasses.replace(
        base, tail_batching=TailBatchingConfig(tiers=tiers, debias="moments")
    )
    result = estimate(cascade, has_cuda=False)
    assert result.batch.cascade_rounds == ((9, 8), (8, 4))
    assert result.batch.most_samples == 72
    assert part(result, "kv cache") == 72 * 128 * 2 * 3 * 32 * 4
    text = "\n".join(result.lines())
    assert "cascade 1     9 deferred prompts x 8 samples = 72" in text and "debias=moments" in text
    auto = TailBatchingConfig(prompt_factor="auto", sample_factor="auto", max_length_shift=0.2)
    stream = StreamConfig(enabled=True, reward_wait=True, max_share=0.5)
    chosen = dataclasses.replace(base, tail_batching=auto, stream_trainer=stream)
    result = estimate(chosen, has_cuda=False)
    assert (result.batch.short_prompts, result.batch.short_samples_per_prompt) == (10, 5)
    text = "\n".join(result.lines())
    assert "at most 20 % shorter" in text and "up to 16 of a step's samples" in text
