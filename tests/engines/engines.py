"""Every engine that can run the small model of these tests, one row each (`ENGINES`)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel

from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import (
    Engine,
    EngineConfig,
    EngineOutput,
    GenerationRequest,
)
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.run.parts.engines import engine_setup, make_engine
from rollpacker.trainer.model import load_model, new_model, write_character_tokenizer
from rollpacker.trainer.trainer import ModelConfig
from rollpacker.workers.host import Host, ThisHost

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-*/= .,?"
END = 1
"""The end token of the tokenizer."""
CONTEXT = 512


def write_model(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """Two layers of width 64 with two heads, in float32; weights large enough for sharp
    distributions."""
    architecture = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_character_tokenizer(ALPHABET, folder)
    new_model(architecture, tokenizer, seed).save_pretrained(folder)
    return folder


def model_of(folder: Path) -> PreTrainedModel:
    """The model as transformers runs it, with its own attention."""
    return load_model(config_of(folder)).model


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder), device="cpu", dtype="float32")


def embedded(folder: Path, config: EngineConfig) -> Engine:
    arguments = engine_setup(config_of(folder), config, threads=1).arguments
    return make_engine(config=config, **arguments)


def in_process(
    folder: Path,
    config: EngineConfig,
    tensor_parallel: int = 1,
    host: Callable[[], Host] = ThisHost,
) -> ProcessEngine:
    setup = engine_setup(
        config_of(folder), config, threads=tensor_parallel, tensor_parallel=tensor_parallel
    )
    return ProcessEngine(setup, host=host())


def vllm_in_process(
    folder: Path,
    config: EngineConfig,
    tensor_parallel: int = 1,
    kv_cache_gib: float = 0.05,
    host: Callable[[], Host] = ThisHost,
) -> ProcessEngine:
    config = replace(config, name="vllm", kv_cache_gib=kv_cache_gib)
    engine = in_process(folder, config, tensor_parallel, host)
    asyncio.run(engine.ready())  # which takes longer than any test waits for an output
    return engine


@dataclass(frozen=True)
class Implementation:
    make: Callable[[Path, EngineConfig], Engine]
    is_embedded: bool = True
    """Tokens and log-probs are those of the embedded engine bit for bit, whoever shares the batch;
    so carried tokens come out the same."""
    pid: Callable[[Engine], int] = lambda engine: os.getpid()
    """Where it computes."""


ENGINES = {
    "embedded": Implementation(embedded),
    "embedded in a process": Implementation(in_process, pid=lambda engine: engine.child.pid),
}
if find_spec("vllm") is not None:  # make test-vllm
    ENGINES["vLLM in a process"] = Implementation(
        vllm_in_process, is_embedded=False, pid=lambda engine: engine.child.pid
    )
    ENGINES["vLLM of two devices"] = Implementation(
        partial(vllm_in_process, tensor_parallel=2),
        is_embedded=False,
        pid=lambda engine: engine.child.pid,
    )


if kind := os.environ.get("ROLLPACKER_ENGINE_BEHIND_RAY"):  # tests/cluster, on one of its hosts
    from tests.cluster.behind_ray import another_host

    one = ENGINES[f"{kind} in a process"]
    ENGINES = {f"{kind} behind ray": replace(one, make=partial(one.make, host=another_host))}


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.errors: list[BaseException] = []
        self.error_s = 0.0
        """When the first one came, on the monotonic clock."""
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()

    def on_error(self, error: BaseException) -> None:
        with self._changed:
            self.error_s = self.error_s or time.monotonic()
            self.errors.append(error)
            self._changed.notify_all()

    def wait(self, there: Callable[[], object], timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(there, timeout_s), "nothing came"

    def wait_for(self, number: int) -> list[EngineOutput]:
        self.wait(lambda: len(self.outputs) >= number or self.errors)
        assert not self.errors, self.errors
        return self.outputs

    def wait_for_error(self) -> str:
        self.wait(lambda: self.errors)
        return str(self.errors[0])


def serve(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[SampleId, EngineOutput]:
    """What becomes of these."""
    heard = Heard()
    engine.start(heard, heard.on_error)
    engine.submit(requests)
    outputs = heard.wait_for(len(requests))
    assert len(outputs) == len(requests)
    return {output.event.sample: output for output in outputs}
