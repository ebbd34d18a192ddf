"""Ranks that read no more of a model than their shards have the weights of one that is loaded."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.trainer import memory
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.model import load_model, write_character_tokenizer
from rollpacker.trainer.saved_weights import reads_later
from rollpacker.trainer.setup import LearnerSetup, build_learner
from rollpacker.trainer.sharding import Shards, full_tensors
from rollpacker.trainer.trainer import (
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ScoreRequest,
    TrainConfig,
)
from tests.memory import Watch
from tests.trainer.ranks import Ranks
from tests.trainer.tiny import samples

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 8},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3},  # fused when loaded
    "rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "hybrid": {"model_type": "qwen3_5_text"} | DELTA_NET,  # it is tried with padding
}


def write(
    folder: Path, model: str, seed: int = 0, dtype: torch.dtype = torch.float32, **more: object
) -> Path:
    write_character_tokenizer("0123456789+-=; abcde", folder)
    torch.manual_seed(seed)
    settings = SHAPE | MODELS[model] | more
    kind = settings.pop("model_type")
    config = AutoConfig.for_model(kind, **settings)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def setup_of(folder: Path, *, algorithm: AlgorithmConfig | None = None, **model: Any):
    train = {name: model.pop(name) for name in ("replicas", "critic") if name in model}
    return LearnerSetup(
        model=ModelConfig(path=str(folder), device="cpu", **model),
        train=TrainConfig(steps=8, processes=4, micro_batch_tokens=64, **train),
        algorithm=algorithm or AlgorithmConfig(kl_coef=0.1, kl_in="reward"),
        temperature=0.7,
        total_steps=8,
        threads=1,
    )


REQUESTS = [
    ScoreRequest(
        sample=one.sample, prompt_tokens=one.prompt_tokens, response_tokens=one.response_tokens
    )
    for one in samples()[:3]
]


def tensors_of(learner: Learner, shards: Shards | None) -> dict[str, Tensor]:
    """All tensors of all models by name, with buffers."""
    named = {
        f"{number}.{name}": value
        for number, module in enumerate(learner._modules)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    assert not any(value.is_meta for value in named.values())
    return {name: value.clone() for name, value in full_tensors(named.items(), shards)}


def built(shards: Shards | None, setup: LearnerSetup) -> tuple[dict[str, Tensor], Any, bool]:
    if shards is not None:  # a model that is loaded as a whole would be the same
        assert reads_later(load_model(setup.model, weights_later=True).model)
    learner = build_learner(setup, shards=shards)
    parameters = list(learner.model.parameters())
    tensors = tensors_of(learner, shards)
    return tensors, learner.score(REQUESTS), all(isinstance(p, DTensor) for p in parameters)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys() and got
    for name, value in expected.items():
        assert torch.equal(got[name].to(value.dtype), value), name


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as group:
        yield group


def check(ranks: Ranks, setup: LearnerSetup, size: int = 2) -> None:
    expected, scores, _ = built(None, setup)
    answers = ranks.run(size, built, setup, replicas=setup.train.replicas)
    assert_equal(answers[0][0], expected)
    for _, got, sharded in answers:
        assert sharded
        for one, other in zip(got, scores, strict=True):
            for a, b in zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True):
                assert (a is None) == (b is None)
                assert a is None or a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("model", list(MODELS))
def test_shards_are_those_of_a_loaded_model(ranks, tmp_path, model):
    """Three processes get shards of unequal size, and of experts one each."""
    check(ranks, setup_of(write(tmp_path, model)), size=3)


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "bfloat16"},
        {"lora": LoraConfig(rank=2)},
        {"algorithm": AlgorithmConfig(name="ppo")},
        {"replicas": 2},
    ],
    ids=["half precision", "adapters", "a critic", "replicas"],
)
def test_other_kinds_of_models(ranks, tmp_path, kind):
    size = 4 if "replicas" in kind else 2
    setup = setup_of(write(tmp_path, "qwen2"), **kind)
    if "dtype" in kind:  # numbers in bfloat16 differ with the order of sums
        expected = built(None, setup)[0]
        assert_equal(ranks.run(size, built, setup)[0][0], expected)
    else:
        check(ranks, setup, size)


def test_a_teacher_and_a_critic_of_other_folders(ranks, tmp_path):
    folder, other, third = (tmp_path / name for name in ("policy", "teacher", "critic"))
    write(folder, "qwen2")
    teacher = str(write(other, "qwen3", seed=1))
    check(ranks, setup_of(folder, teacher=teacher, algorithm=AlgorithmConfig(name="distillation")))
    critic = CriticConfig(path=str(write(third, "qwen3", seed=2)))
    check(ranks, setup_of(folder, critic=critic, algorithm=AlgorithmConfig(name="ppo")))


def peak_of(shards: Shards, small: LearnerSetup, large: LearnerSetup) -> tuple[int, int]:
    """Bytes of memory of this process's own, at the peak of making a learner; and of its model."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once
    build_learner(small, shards=shards)  # code that loading imports
    with Watch() as watch:
        learner = build_learner(large, shards=shards)
    model = sum(4 * value.numel() for value in learner.model.parameters())
    return watch.peak_bytes - watch.first_bytes, model


M_MMAP_THRESHOLD = -3
"""The C library's number of its setting for the size from which memory is mapped by itself."""


def test_no_rank_holds_more_than_its_shard_and_a_layer(ranks, tmp_path):
    """A model of 200 MB. Its files are in half precision, so that no weight is a file's page."""
    small, large = tmp_path / "small", tmp_path / "large"
    write(small, "qwen2")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    write(large, "qwen2", dtype=torch.bfloat16, **sizes)
    grpo = AlgorithmConfig()
    setups = [setup_of(folder, dtype="float32", algorithm=grpo) for folder in (small, large)]
    for peak, model in ranks.run(4, peak_of, *setups):
        assert model > 190e6
        assert peak < 0.4 * model, (peak, model)


def tokens_that_fit(shards: Shards, setup: LearnerSetup, rooms: list[int]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "room_bytes", lambda device: rooms[shards.rank])
        learner = build_learner(setup, shards=shards)
    return learner._passes._batcher._max_tokens


def test_all_ranks_take_the_micro_batches_for_which_the_fullest_has_room(ranks, tmp_path):
    setup = setup_of(write(tmp_path, "qwen2"))
    train = dataclasses.replace(setup.train, micro_batch_tokens="auto")
    choices = ((4096, 100), (8192, 200), (16384, 400))
    setup = dataclasses.replace(setup, train=train, micro_batch_choices=choices)
    assert ranks.run(2, tokens_that_fit, setup, [500, 300]) == [8192, 8192]
