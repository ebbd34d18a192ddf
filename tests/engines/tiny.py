"""Tiny random models and requests for the engine's tests."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import (
    Carried,
    EngineConfig,
    GenerationRequest,
    Response,
    SamplingParams,
)

SECOND_RUNNER = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether vLLM is tried with its second model runner, whose kernels Triton's interpreter runs."""
NOISE = "vllm" if SECOND_RUNNER else "auto"
END = 5
VOCABULARY = 48
WINDOW = 6
MODELS = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {"head_dim": 16, "sliding_window": WINDOW},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny_model(model_type: str = "qwen2", *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Two layers of width 32 in float32, with weights large enough for sharp distributions."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": END,
        **MODELS[model_type],
        **overrides,
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)).eval()


def moved(model: PreTrainedModel, amount: float, seed: int) -> PreTrainedModel:
    """The model with its weights changed a little, in place."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            change = torch.randn(weight.shape, generator=noise).to(weight)
            weight.add_(amount * weight.std(unbiased=False) * change)
    return model


def request(
    row: int,
    index: int = 0,
    *,
    prompt: Sequence[int] | None = None,
    forced_length: int | None = None,
    max_response_tokens: int = 24,
    **sampling: object,
) -> GenerationRequest:
    """One sample of prompt number `row`, whose tokens follow from the number unless given."""
    if prompt is None:
        prompt = [7 + (row * 5 + place * place) % 40 for place in range(1 + row % 9)]
    return GenerationRequest(
        sample=SampleId(PromptId("train", 0, row), index, 0),
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(max_response_tokens=max_response_tokens, **sampling),
        forced_length=forced_length,
    )


def group(row: int, size: int, **options: object) -> list[GenerationRequest]:
    return [request(row, index, **options) for index in range(size)]


def carrying(
    asked: GenerationRequest, old: Response, num_tokens: int, **options: object
) -> GenerationRequest:
    carried = Carried(
        tokens=old.tokens[:num_tokens], log_probs=old.log_probs[:num_tokens], **options
    )
    return dataclasses.replace(asked, carried=carried)


def make_engine(
    model: PreTrainedModel,
    *,
    tokenizer: object = None,
    **config: object,
) -> TorchEngine:
    return TorchEngine(
        model=model,
        tokenizer=tokenizer,
        config=EngineConfig(**{"noise": NOISE, **config}),
    )


def generate(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], **options: object
) -> list[Response]:
    """The responses of a fresh engine."""

    async def run() -> list[Response]:
        engine = make_engine(model, **options)
        try:
            return await collect(engine, requests)
        finally:
            await engine.close()

    return asyncio.run(run())
