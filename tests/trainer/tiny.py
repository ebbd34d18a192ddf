"""Tiny models and samples for the trainer's tests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import Response
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.trainer.trainer import TrainConfig

VOCABULARY = 23
TEMPERATURE = 0.7


def tiny_model(
    seed: int = 0, dtype: torch.dtype = torch.float64, *, num_layers: int = 2, tied: bool = True
) -> Qwen2ForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        attention_dropout=0.3,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def responses(
    seed: int, num_groups: int = 4, group_size: int = 3
) -> list[list[tuple[Response, float]]]:
    """Groups of responses of ragged lengths with made-up log-probs and rewards."""
    draw = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    groups = []
    for row in range(num_groups):
        prompt = tuple(integer(3, VOCABULARY) for _ in range(integer(1, 6)))
        group = []
        for index in range(group_size):
            length = integer(1, 30)
            response = Response(
                sample=SampleId(PromptId("train", 0, row), index, 0),
                prompt_tokens=prompt,
                tokens=tuple(integer(3, VOCABULARY) for _ in range(length)),
                log_probs=tuple((-3.5 * torch.rand(length, generator=draw)).tolist()),
                finish_reason="stop",
                version=0,
            )
            group.append((response, float(integer(0, 4))))
        groups.append(group)
    return groups


def samples(seed: int = 0, config: AlgorithmConfig | None = None):
    return build_train_samples(responses(seed), config or AlgorithmConfig())[0]


def trainer(
    model: Qwen2ForCausalLM | None = None,
    *,
    algorithm: AlgorithmConfig | None = None,
    total_steps: int | None = 10,
    gradient_checkpointing: bool = False,
    **settings: object,
) -> TorchTrainer:
    settings = {"steps": 10, "learning_rate": 1e-2, "micro_batch_tokens": 64} | settings
    learner = Learner(
        model=model if model is not None else tiny_model(),
        tokenizer=None,
        pad_token_id=0,
        config=TrainConfig(**settings),
        algorithm=algorithm or AlgorithmConfig(),
        temperature=TEMPERATURE,
        total_steps=total_steps,
        gradient_checkpointing=gradient_checkpointing,
    )
    return TorchTrainer(learner)


def gradient_of(t: TorchTrainer, parts: Sequence[Sequence]) -> dict[str, torch.Tensor]:
    async def run() -> None:
        for part in parts:
            await t.accumulate(part)

    asyncio.run(run())
    return {name: g.detach().clone() for name, g in t.learner.gradients().items()}


def step(t: TorchTrainer, batch: Sequence) -> dict[str, float]:
    async def run() -> dict[str, float]:
        await t.accumulate(batch)
        return dict(await t.apply())

    return asyncio.run(run())


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys() and a
    return max((a[n].double() - b[n].double()).abs().max().item() for n in a)


def largest(a: dict[str, torch.Tensor]) -> float:
    value = max(v.abs().max().item() for v in a.values())
    assert math.isfinite(value)
    return value
