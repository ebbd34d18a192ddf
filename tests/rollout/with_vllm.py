"""What the tests of vLLM as an engine share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.rollout.collect import collect
from rollpacker.rollout.engine import EngineConfig, EngineOutput, GenerationRequest, Response
from rollpacker.rollout.vllm_engine import VllmEngine
from tests.rollout.test_engine import Recorder
from tests.rollout.tiny import tiny_model

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="needs vLLM: make vllm, then make test-vllm"
)

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of size 32, the smallest of vLLM's on a CPU."""
TIE = 1e-4
"""Log-probabilities that are closer may change places."""


def model_of(seed: int = 0, *, tied: bool = True) -> PreTrainedModel:
    return tiny_model(seed=seed, tie_word_embeddings=tied, **SHAPE)


def made(model: PreTrainedModel, *, tokenizer: object = None, **config: object) -> VllmEngine:
    settings = {"name": "vllm", "kv_cache_gib": 0.02, **config}
    return VllmEngine(model=model, tokenizer=tokenizer, config=EngineConfig(**settings))


def responses(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> list[Response]:
    return asyncio.run(collect(engine, requests))


def served(
    engine: VllmEngine,
    requests: Sequence[GenerationRequest],
    answer: Callable[[Sequence[EngineOutput]], None] | None = None,
    wanted: int | None = None,
) -> list[EngineOutput]:
    recorder = Recorder(wanted or len(requests), answer)
    engine.start(recorder, recorder.on_error)
    engine.submit(requests)
    recorder.wait()
    assert not recorder.errors
    return recorder.outputs


def says(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of a full forward pass, before each of these."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


def is_tie(log_probs: torch.Tensor) -> bool:
    first, second = log_probs.topk(2).values.tolist()
    return first - second < TIE
