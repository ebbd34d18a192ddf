"""What --dry-run says of pipeline stages, against stages of real models."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.cli import findings, trials
from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.data.dataset import DataConfig, DatasetConfig
from rollpacker.pipeline.stages.deferred import DeferredWeights
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.rewards.reward import RewardConfig
from rollpacker.trainer.estimate import Estimate, estimate
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.micro_batch import Row, collate
from rollpacker.trainer.model import character_tokenizer, load_model, new_model
from rollpacker.trainer.policy import Policy
from rollpacker.trainer.trainer import LoraConfig, ModelConfig, PipelineConfig, TrainConfig
from rollpacker.trainer.training_memory import Memory, rank_memory
from tests.trainer.pipeline.stages import in_stages

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
ROW = 127
"""Tokens of the longest sample that go through the model."""


def saved_model(folder: Path, letters: int = 8, **architecture: object) -> Path:
    torch.set_num_threads(1)
    tokenizer = character_tokenizer("".join(chr(0x100 + number) for number in range(letters)))
    tokenizer.save_pretrained(folder)
    new_model(ARCHITECTURE | architecture, tokenizer, 0).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_model(tmp_path)


def run_config(
    path: Path,
    *,
    processes: int = 2,
    algorithm: AlgorithmConfig | None = None,
    lora: LoraConfig | None = None,
    dtype: str = "float32",
    checkpointing: bool = False,
    prompts: int = 8,
    **pipeline: object,
) -> RunConfig:
    """Micro-batches of two of the longest samples."""
    return RunConfig(
        name="r",
        model=ModelConfig(
            path=str(path),
            lora=lora,
            dtype=dtype,
            device="cpu",
            gradient_checkpointing=checkpointing,
        ),
        data=DataConfig(train=DatasetConfig(kind="jsonl", path="x"), max_prompt_tokens=28),
        rollout=RolloutConfig(
            prompts_per_step=prompts, samples_per_prompt=4, max_response_tokens=100
        ),
        train=TrainConfig(
            steps=7,
            micro_batch_tokens=2 * ROW,
            processes=processes,
            pipeline=PipelineConfig(**({"stages": 2} | pipeline)),
        ),
        algorithm=algorithm or AlgorithmConfig(),
        rewards=(RewardConfig(function="m:f"),),
    )


def predicted(config: RunConfig) -> tuple[Memory, ...]:
    found = estimate(config, has_cuda=False).ranks
    assert found
    return found


def sizes(stage: Memory) -> dict[str, int]:
    return {part.name: part.size_bytes for part in stage.parts}


def parameters_of_stages(stage: Stage, whole: Any) -> tuple[int, int]:
    """Present layers of a real stage, and its parameters."""
    model = copy.deepcopy(whole)
    stage.policy(Policy(model))
    layers = [layer for layer in model.model.layers if any(True for _ in layer.parameters())]
    return len(layers), sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_a_stages_weights_and_what_follows_from_them_are_exact(tmp_path: Path, tied: bool) -> None:
    path = saved_model(tmp_path, tie_word_embeddings=tied)
    model = load_model(ModelConfig(path=str(path), device="cpu")).model
    real = in_stages((2, 1), lambda stage: parameters_of_stages(stage, model))
    assert [layers for layers, _ in real] == [2, 1]
    mirror = model.lm_head.weight.numel()
    for shards in (1, 2):
        found = predicted(run_config(path, processes=2 * shards, layers=(2, 1)))
        for index, (stage, (layers, count)) in enumerate(zip(found, real, strict=True)):
            own = sizes(stage)
            assert stage.layers == layers
            assert own["weights"] == 4 * count // shards
            assert own["gradients"] == own["gathered"] == 4 * count
            updated = count - (mirror if tied and index == 1 else 0)
            assert own["optimizer"] == 8 * updated // shards


def test_live_tokens_and_what_they_keep_by_hand(folder: Path) -> None:
    """Four stages' micro-batches of 254 tokens on the first of two, and two on the last."""
    first, last = predicted(run_config(folder, layers=(2, 1)))
    assert (first.live_tokens, last.live_tokens) == (4 * 254, 2 * 254)
    hidden, query, kv, ffn, heads = 64, 64, 32, 160, 4
    norms, rotations, sums = 2, 2 * 16, heads  # numbers besides what is as wide as the model
    layer = 4 * (6 * hidden + 2 * query + 2 * kv + 4 * ffn + norms + sums)
    assert sizes(first)["activations"] == pytest.approx(
        4 * 254 * (2 * layer + 4 * hidden), rel=0.02
    )
    end = 4 * (3 * hidden + norms + rotations)
    assert sizes(last)["activations"] == pytest.approx(254 * (layer + end), rel=0.02)
    assert sizes(last)["kept for W"] == 254 * 4 * (4 * hidden + 2 * query + 2 * kv + 3 * ffn)
    capped = predicted(run_config(folder, layers=(2, 1), live_tokens=300))
    assert [stage.live_tokens for stage in capped] == [300, 300]
    few = predicted(run_config(folder, layers=(2, 1), prompts=1, processes=4))
    assert [stage.live_tokens for stage in few] == [2 * ROW, 2 * ROW], "more than there are"


def test_what_waits_for_w_is_what_the_estimate_says(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder), device="cpu")).model
    policy, deferred = Policy(model), DeferredWeights()
    deferred.attach(policy)
    rows = [Row((3,), tuple([4] * ROW))] * 2
    log_probs, _ = policy(collate(rows, 0, torch.device("cpu")), 1.0)
    with deferred.collected() as products:
        log_probs.sum().backward()
    tensors = [tensor for _, entered, gradient in products for tensor in (entered, gradient)]
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    _, last = predicted(run_config(folder, layers=(2, 1)))
    assert sizes(last)["kept for W"] == pytest.approx(sum(kept.values()) / 3, rel=0.02)


def test_with_checkpointing_what_w_needs_is_more_than_what_f_leaves(folder: Path) -> None:
    plain, _ = predicted(run_config(folder))
    checkpointed, _ = predicted(run_config(folder, checkpointing=True))
    layer = 4 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 160)
    assert sizes(checkpointed)["activations"] == 4 * 254 * plain.layers * layer


def test_further_models_have_their_part_of_each_stage(folder: Path) -> None:
    plain = predicted(run_config(folder, layers=(1, 2)))
    penalized = predicted(
        run_config(folder, layers=(1, 2), algorithm=AlgorithmConfig(kl_coef=0.1, kl_in="loss"))
    )
    critic = predicted(run_config(folder, layers=(1, 2), algorithm=AlgorithmConfig(name="ppo")))
    low = predicted(
        run_config(
            folder,
            layers=(1, 2),
            processes=4,
            dtype="bfloat16",
            algorithm=AlgorithmConfig(kl_coef=0.1, kl_in="loss"),
        )
    )
    for before, with_reference, with_critic, halves in zip(
        plain, penalized, critic, low, strict=True
    ):
        weights = sizes(before)["weights"]
        assert sizes(with_reference)["reference"] == weights
        assert sizes(with_reference)["gathered"] == 2 * weights
        assert sizes(halves)["reference"] == weights // 4, "frozen shards stay bfloat16"
        assert sizes(halves)["weights"] == weights // 2
        assert sizes(with_critic)["activations"] > 1.8 * sizes(before)["activations"]
    assert sizes(critic[0])["critic"] == sizes(plain[0])["weights"]
    head = sizes(plain[1])["weights"] - sizes(critic[1])["critic"]
    model = load_model(ModelConfig(path=str(folder), device="cpu")).model
    assert head == 4 * model.lm_head.weight.numel(), "the critic's body has no output layer"


def test_adapters_are_those_of_a_stages_layers(folder: Path) -> None:
    first, last = predicted(run_config(folder, layers=(2, 1), lora=LoraConfig(rank=2)))
    assert sizes(first)["adapters"] == 2 * sizes(last)["adapters"] == sizes(first)["gradients"]
    assert sizes(first)["optimizer"] == 2 * sizes(first)["adapters"]


@pytest.mark.parametrize("letters", [8, 300, 1200])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_layers_are_split_as_the_run_splits_them(
    tmp_path: Path, letters: int, has_adapter: bool
) -> None:
    """The more words, the fewer layers beside the output layer."""
    pytest.importorskip("peft")
    path = saved_model(tmp_path, letters, num_hidden_layers=6)
    lora = LoraConfig(rank=2) if has_adapter else None
    loaded = load_model(ModelConfig(path=str(path), device="cpu")).model

    def own_layers(stage: Stage) -> int:
        model = copy.deepcopy(loaded)
        decoder = model.model
        stage.policy(Policy(model if lora is None else add_adapter(model, lora)))
        return sum(any(True for _ in layer.parameters()) for layer in decoder.layers)

    real = in_stages((3, 3), own_layers, given=())
    assert [stage.layers for stage in predicted(run_config(path, lora=lora))] == real


def lines_of(config: RunConfig) -> str:
    return "\n".join(estimate(config, has_cuda=False).lines())


def test_each_stage_has_a_line_with_layers_live_tokens_and_memory(folder: Path) -> None:
    found = estimate(run_config(folder, layers=(2, 1), processes=4), has_cuda=False)
    text = "\n".join(found.lines())
    assert "2 layers, at most 1,016 live tokens, in each of its 2 processes:" in text
    assert "1 layer, at most 508 live tokens" in text
    assert "in sweeps of at most 8 micro-batches" in text
    assert found.sweep is not None and 0 < found.sweep.bubble_share < 0.5
    first, last = found.ranks
    assert [found.rank(number).size_bytes for number in range(4)] == [
        *(first.size_bytes, first.size_bytes, last.size_bytes, last.size_bytes)
    ]
    assert found.total_bytes == found.memory.size_bytes + 2 * first.size_bytes + 2 * last.size_bytes


def test_fewer_micro_batches_than_stages_are_noted_with_the_bubble(folder: Path) -> None:
    text = lines_of(run_config(folder, stages=3, processes=3, prompts=1))
    assert "2 micro-batches at most for 3 pipeline stages, which idle for " in text
    assert "lower train.micro_batch_tokens" in text
    assert "micro-batches at most" not in lines_of(run_config(folder, stages=3, processes=3))


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"stages": 4}, "4 stages need as many layers, and the model has 3"),
        ({"layers": (2, 2)}, r"train.pipeline.layers=\[2, 2\] adds up to 4, but the model has 3"),
        ({"layers": (3, 0)}, "every stage needs a layer"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_it(folder: Path, pipeline, message) -> None:
    config = run_config(folder, processes=4, **pipeline)
    with pytest.raises(ValueError, match=message):
        estimate(config, has_cuda=False)
    with pytest.raises(ValueError, match=message):
        rank_memory(config, on_cuda=False)


def test_a_model_that_is_not_here_has_no_stages(tmp_path: Path) -> None:
    found = estimate(run_config(Path("nobody/model-7B")), has_cuda=False)
    assert found.ranks == () and found.sweep is None and found.total_bytes is None
    assert "memory of pipeline stages are not known" in "\n".join(found.lines())


def test_a_device_is_given_the_largest_stage_and_a_host_all_of_them(folder: Path) -> None:
    config = run_config(folder, layers=(2, 1))
    found = estimate(config, has_cuda=False).ranks
    on_host, on_gpu = rank_memory(config, on_cuda=False), rank_memory(config, on_cuda=True)
    assert on_host is not None and on_gpu is not None and on_gpu.name == "stage 0"
    together = sum(stage.size_bytes for stage in found)
    assert 2 * (on_host.stays_bytes + on_host.turn_bytes) == pytest.approx(together, abs=100)


def test_doctor_names_the_stage_that_takes_the_most(tmp_path: Path) -> None:
    """Of a model that no machine has the memory for."""
    shape = ARCHITECTURE | {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (found,) = trials.fit(run_config(tmp_path, layers=(1, 2)))
    assert found.level == "warn" and "stage 1 takes the most" in found.text
    assert findings.memory().details["free_bytes"] > 0
    assert isinstance(estimate(run_config(tmp_path)), Estimate)
    (fits,) = trials.fit(replace(run_config(saved_model(tmp_path / "small"))))
    assert fits.level == "ok"
