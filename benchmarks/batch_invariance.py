"""How often another batch composition changes a token, and by how much log-probabilities differ.

The noise of a sample depends on nothing but the sample, yet logits depend on who shares the batch:
other shapes, other order of summation. A token changes when its noise falls between two such
results. The same requests are run with 512 slots in order (the reference) and with other numbers of
slots and another order; tokens are compared up to a sample's first difference, after which it is
another response.

    python benchmarks/batch_invariance.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lab import bench
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig, GenerationRequest, Response, SamplingParams

END = 1
ARMS = ((512, True), (64, False), (64, True), (16, False), (1, False))
"""(slots, shuffled)"""


def make_model(**changed: Any) -> Qwen2ForCausalLM:
    """The shape of the quickstart's model; weights wide enough for medium entropy."""
    torch.manual_seed(0)
    shape = {
        **{"vocab_size": 48, "hidden_size": 64, "intermediate_size": 128, "eos_token_id": END},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 512, "tie_word_embeddings": True},
        "initializer_range": 0.15,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(shape | changed))).eval()


def make_requests(num_prompts: int, samples_per_prompt: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    requests = []
    for row in range(num_prompts):
        prompt = tuple(rng.integers(2, 48, rng.integers(4, 24)).tolist())
        requests += [
            GenerationRequest(
                sample=SampleId(PromptId("train", 0, row), index, 0),
                prompt_tokens=prompt,
                sampling=SamplingParams(max_response_tokens=256),
            )
            for index in range(samples_per_prompt)
        ]
    return requests


def respond(
    model: Qwen2ForCausalLM, requests: Sequence[GenerationRequest], slots: int, shuffled: bool
) -> dict[SampleId, Response]:
    order = (
        np.random.default_rng(1).permutation(len(requests)) if shuffled else range(len(requests))
    )

    async def run() -> list[Response]:
        engine = TorchEngine(model=model, tokenizer=None, config=EngineConfig(max_slots=slots))
        try:
            return await collect(engine, [requests[place] for place in order])
        finally:
            await engine.close()

    return {response.sample: response for response in asyncio.run(run())}


def compare(
    reference: dict[SampleId, Response], other: dict[SampleId, Response]
) -> dict[str, object]:
    num_compared = num_changed = num_other_bits = 0
    differences = [0.0]
    for sample, wanted in reference.items():
        response = other[sample]
        pairs = list(zip(wanted.tokens, response.tokens, strict=False))
        same = next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))
        num_changed += same < len(pairs)
        num_compared += min(same + 1, len(pairs))
        for one, two in zip(wanted.log_probs[:same], response.log_probs[:same], strict=True):
            num_other_bits += one != two
            differences.append(abs(one - two))
    return {
        "tokens_compared": num_compared,
        "tokens_changed": num_changed,
        "most_changes_per_million_tokens_95_percent": round(
            _poisson_bound(num_changed, num_compared)
        ),
        "log_probs_with_other_bits": round(num_other_bits / num_compared, 4),
        "largest_log_prob_difference": max(differences),
    }


def _poisson_bound(count: int, trials: int) -> float:
    """Upper end of the one-sided 95 % interval of a Poisson rate, per million trials."""
    rate = float(count)
    while _poisson_cdf(count, rate) > 0.05:
        rate += 0.01
    return rate / trials * 1e6


def _poisson_cdf(count: int, rate: float) -> float:
    terms = np.cumprod([1.0, *(rate / k for k in range(1, count + 1))])
    return float(np.exp(-rate) * terms.sum())


def main(prompts: int = 128, samples_per_prompt: int = 8, dtype: str = "float32") -> dict[str, Any]:
    torch.set_num_threads(1)
    model = make_model().to(getattr(torch, dtype))
    requests = make_requests(prompts, samples_per_prompt)
    reference = respond(model, requests, 512, shuffled=False)
    repeat = respond(model, requests, 512, shuffled=False)
    lengths = [len(response.tokens) for response in reference.values()]
    return {
        "samples": len(requests),
        "tokens": sum(lengths),
        "mean_length": round(float(np.mean(lengths)), 1),
        "reference": "512 slots, in order",
        "reference_repeats_bit_for_bit": repeat == reference,
        "arms": {
            f"{slots} slots" + ", shuffled" * shuffled: compare(
                reference, respond(model, requests, slots, shuffled)
            )
            for slots, shuffled in ARMS
        },
    }


if __name__ == "__main__":
    bench(main)
