"""What an engine in a process of its own costs, and whether anything is left of what it did.

speed    the same requests to the embedded engine and to one in a process, in turn: tokens/s of
         each, and the ratio of each pair
churn    ten thousand requests with random aborts: memory and descriptors of the engine's
         process, and of this one, at every tenth of them
ends     how long after a SIGKILL, and after a SIGSTOP with a heartbeat of 5 s, `on_error` comes
weights  seconds of an update from a shared buffer, by its size

python benchmarks/engine_process.py [--requests 10000] [--pairs 7]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import write_result

from rollpacker.core.events import SampleAborted
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import (
    Engine,
    EngineConfig,
    EngineOutput,
    GenerationRequest,
    SamplingParams,
)
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.run.parts.engines import engine_setup, make_engine
from rollpacker.trainer.model import load_model, new_model, write_character_tokenizer
from rollpacker.trainer.trainer import ModelConfig
from rollpacker.weights.buffer import WeightBuffer

ARCHITECTURE = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-*/= .,?"
SLOTS = 64


class Heard:
    """A listener that counts."""

    def __init__(self) -> None:
        self.ended: set[SampleId] = set()
        self.num_outputs = self.num_aborted = self.num_tokens = 0
        self.error: BaseException | None = None
        self.error_s = 0.0
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            self.num_outputs += len(outputs)
            self.num_aborted += sum(isinstance(o.event, SampleAborted) for o in outputs)
            self.num_tokens += sum(len(o.response.tokens) for o in outputs if o.response)
            self.ended.update(output.event.sample for output in outputs)
            self._changed.notify_all()

    def on_error(self, error: BaseException) -> None:
        with self._changed:
            self.error, self.error_s = error, time.monotonic()
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_outputs >= number, 600), "nothing came"

    def wait_for_error(self) -> float:
        """When it came, on the monotonic clock."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.error is not None, 60), "not noticed"
        return self.error_s


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


def rate(engine: Engine) -> float:
    """Tokens/s of 64 rows of different lengths."""
    heard = Heard()
    engine.start(heard, heard.on_error)
    requests = [request(row, i, 100 + 20 * i) for row in range(16) for i in range(4)]
    start_s = time.perf_counter()
    engine.submit(requests)
    heard.wait_for(len(requests))
    return heard.num_tokens / (time.perf_counter() - start_s)


def speed(model: ModelConfig, num_pairs: int) -> dict[str, Any]:
    config = EngineConfig(max_slots=SLOTS)
    setup = engine_setup(model, config, threads=1)
    apart = ProcessEngine(setup)
    embedded = make_engine(config=config, **setup.arguments)
    asyncio.run(apart.ready())
    for engine in (embedded, apart):
        rate(engine)
    pairs = [(rate(embedded), rate(apart)) for _ in range(num_pairs)]
    for engine in (embedded, apart):
        asyncio.run(engine.close())
    return {
        "tokens_per_s": {
            "embedded": statistics.median(one for one, _ in pairs),
            "in a process": statistics.median(other for _, other in pairs),
        },
        "ratio_of_pairs": [other / one for one, other in pairs],
    }


def size_of(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = next(line for line in status if line.startswith("VmRSS:"))
    return {
        "resident_mib": int(resident.split()[1]) / 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def churn(model: ModelConfig, num_requests: int) -> dict[str, Any]:
    """One request in three is aborted, at any time after it was made."""
    engine = ProcessEngine(engine_setup(model, EngineConfig(max_slots=SLOTS), threads=1))
    heard = Heard()
    engine.start(heard, heard.on_error)
    asyncio.run(engine.ready())
    draw = random.Random(0)
    live: list[SampleId] = []
    sizes = []
    num_submitted = 0
    while num_submitted < num_requests:
        batch = [request(num_submitted + i, 0, draw.randint(1, 60)) for i in range(50)]
        num_submitted += len(batch)
        engine.submit(batch)
        live = [one for one in live if one not in heard.ended] + [one.sample for one in batch]
        engine.abort(draw.sample(live, min(len(live), len(batch) // 3)))
        heard.wait_for(num_submitted - 150)
        if num_submitted % (num_requests // 10) == 0:
            heard.wait_for(num_submitted)
            sizes.append({"engine": size_of(engine.child.pid), "run": size_of(os.getpid())})
    status = engine.status()
    asyncio.run(engine.close())
    assert len(heard.ended) == heard.num_outputs == num_requests and heard.error is None
    return {
        "requests": num_requests,
        "aborted": heard.num_aborted,
        "left": status.num_running + status.num_waiting,
        "after_each_tenth": sizes,
        "grown_mib": {
            name: sizes[-1][name]["resident_mib"] - sizes[0][name]["resident_mib"]
            for name in ("engine", "run")
        },
    }


def seconds_to_notice(model: ModelConfig, number: int) -> float:
    engine = ProcessEngine(engine_setup(model, EngineConfig(max_slots=SLOTS), threads=1))
    heard = Heard()
    engine.start(heard, heard.on_error)
    asyncio.run(engine.ready())
    engine.submit([request(row, 0, 400) for row in range(8)])
    time.sleep(0.5)
    sent_s = time.monotonic()
    os.kill(engine.child.pid, number)
    noticed_s = heard.wait_for_error() - sent_s
    asyncio.run(engine.close())
    return noticed_s


def weights(folder: Path) -> list[dict[str, float]]:
    """From the call to its answer, of models of several sizes."""
    found = []
    for width in (64, 512, 2048):
        model = write_model(folder / str(width), width)
        engine = ProcessEngine(engine_setup(model, EngineConfig(max_slots=SLOTS), threads=1))
        named = dict(load_model(model).model.named_parameters())
        buffer = WeightBuffer.create(named.items())
        asyncio.run(engine.ready())
        seconds = []
        for version in range(1, 8):
            with torch.no_grad(), buffer.writing(version) as tensors:
                for name, value in named.items():
                    tensors[name].copy_(value)
            start_s = time.perf_counter()
            asyncio.run(engine.update_weights(version, buffer.source(version)))
            seconds.append(time.perf_counter() - start_s)
        asyncio.run(engine.close())
        size_mib = buffer.layout.size_bytes / 2**20
        found.append({"size_mib": size_mib, "median_s": statistics.median(seconds)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_model(folder)
        payload = {
            "churn": churn(model, given.requests),
            "speed": speed(model, given.pairs),
            "seconds_to_notice": {
                "SIGKILL": [seconds_to_notice(model, signal.SIGKILL) for _ in range(3)],
                "SIGSTOP": [seconds_to_notice(model, signal.SIGSTOP) for _ in range(3)],
            },
            "weights": weights(folder),
        }
    print(write_result("engine_process", payload))


if __name__ == "__main__":
    main()
