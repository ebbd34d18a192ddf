"""Two engines against one: seconds of a rollout of 64 prompts x 8 samples, on two cores.

Embedded engines in processes of their own, over the same model: one with one thread of torch's, one
with two, and two with one each, to which samples go in turn. Lengths are drawn once, long-tailed,
and the same in every arm; arms take turns.

    python benchmarks/two_engines.py [--rounds 7]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import bench, turns

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import EngineConfig, EngineOutput, GenerationRequest, SamplingParams
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.run.parts.engines import engine_setup
from rollpacker.trainer.model import new_model, write_character_tokenizer
from rollpacker.trainer.trainer import ModelConfig

PROMPTS, SAMPLES = 64, 8
LONGEST = 400
WIDTH = 128
ARMS = {"one, 1 thread": (1, 1), "one, 2 threads": (1, 2), "two, 1 thread each": (2, 1)}
"""Engines, and threads of each."""
ARCHITECTURE = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-*/= .,?"


class Heard:
    """A listener that counts what has ended."""

    def __init__(self) -> None:
        self._num_outputs = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            self._num_outputs += len(outputs)
            self._changed.notify_all()

    def on_error(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._num_outputs >= number)
        assert self._error is None, self._error


def write_model(folder: Path, width: int = 64) -> ModelConfig:
    tokenizer = write_character_tokenizer(ALPHABET, folder)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width}
    new_model({**ARCHITECTURE, **sizes}, tokenizer, seed=0).save_pretrained(folder)
    return ModelConfig(path=str(folder), device="cpu", dtype="float32")


def request(row: int, index: int, length: int) -> GenerationRequest:
    return GenerationRequest(
        sample=SampleId(PromptId("train", 0, row), index, 0),
        prompt_tokens=tuple(3 + (row * 5 + place) % 40 for place in range(12)),
        sampling=SamplingParams(max_response_tokens=length),
        forced_length=length,
    )


def requests() -> list[GenerationRequest]:
    draw = random.Random(0)
    lengths = [min(int(draw.lognormvariate(4.0, 0.8)) + 1, LONGEST) for _ in range(PROMPTS)]
    return [
        request(row, index, min(max(int(length * draw.uniform(0.5, 1.5)), 1), LONGEST))
        for row, length in enumerate(lengths)
        for index in range(SAMPLES)
    ]


def rollout_s(engines: Sequence[ProcessEngine], asked: Sequence[GenerationRequest]) -> float:
    heard = Heard()
    for engine in engines:
        engine.start(heard, heard.on_error)
    start_s = time.perf_counter()
    for number, engine in enumerate(engines):
        engine.submit(asked[number :: len(engines)])
    heard.wait_for(len(asked))
    return time.perf_counter() - start_s


def main(rounds: int = 7) -> dict[str, Any]:
    asked = requests()
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), WIDTH)
        arms = {
            name: [
                ProcessEngine(engine_setup(model, EngineConfig(), threads=threads))
                for _ in range(number)
            ]
            for name, (number, threads) in ARMS.items()
        }
        every = [engine for engines in arms.values() for engine in engines]
        for engine in every:
            asyncio.run(engine.ready())
        for engines in arms.values():
            rollout_s(engines, asked)  # warms up
        for _, name in turns(arms, rounds):
            seconds[name].append(rollout_s(arms[name], asked))
        for engine in every:
            asyncio.run(engine.close())
    medians = {name: statistics.median(one) for name, one in seconds.items()}
    two = medians.pop("two, 1 thread each")
    return {
        "samples": len(asked),
        "tokens": sum(one.forced_length or 0 for one in asked),
        "rollout_s": seconds,
        "faster_than": {name: one / two for name, one in medians.items()},
    }


if __name__ == "__main__":
    bench(main)
