"""An engine of vLLM on two devices: its processes, its memory, and numbers that are none. What it
generates is in `test_conformance.py`.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollpacker.core.events import SampleFailed, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import EngineConfig, GenerationRequest, SamplingParams
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.weights.buffer import WeightBuffer
from rollpacker.workers.child import children
from tests.engines.engines import Heard, model_of, serve, vllm_in_process, write_model
from tests.engines.with_vllm import needs_vllm

pytestmark = needs_vllm

BLOCK_BYTES = 2 * 2 * 32 * 2 * 32 * 4
"""Of the model of these tests: layers, keys and values, tokens, heads, their size, bytes."""
POISON = 31
"""A token that the prompt of one sample alone has; not the one that the engine compares weights by,
whose keys and values would stay in its cache."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ProcessEngine]:
    """Each device has memory for 12 blocks of 32 tokens, at degree 1; cut in two, for 24."""
    kv_cache_gib = 12 * BLOCK_BYTES / 2**30
    config = EngineConfig(max_slots=12)
    engine = vllm_in_process(folder, config, tensor_parallel=2, kv_cache_gib=kv_cache_gib)
    yield engine
    asyncio.run(engine.close())


def asked(row: int, *prompt: int, length: int = 20) -> GenerationRequest:
    return GenerationRequest(
        sample=SampleId(PromptId("train", 0, row), 0, 0),
        prompt_tokens=prompt or (5 + row, 6, 7),
        sampling=SamplingParams(max_response_tokens=length),
        forced_length=length,
    )


def family(pid: int) -> list[int]:
    """The process and all below it."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm_", "sem."))}


def test_cut_in_two_a_cache_holds_twice_as_much_and_who_is_put_back_is_counted(
    engine: ProcessEngine,
) -> None:
    """Five samples of 103 tokens need 20 blocks of the 23 that vLLM gives away, twelve 48."""
    few = serve(engine, [asked(row, length=100) for row in range(5)])
    many = serve(engine, [asked(row, length=100) for row in range(12)])
    assert sum(output.event.preemptions for output in few.values()) == 0
    assert sum(output.event.preemptions for output in many.values()) > 0
    same = sum(many[sample].response.tokens == one.response.tokens for sample, one in few.items())
    assert same >= 4  # but for near ties


def test_a_sample_whose_logits_are_no_numbers_fails_alone(
    engine: ProcessEngine, folder: Path
) -> None:
    """Both devices say so when it is over."""
    model = model_of(folder)
    buffer = WeightBuffer.create(model.named_parameters())
    with torch.no_grad(), buffer.writing(1) as tensors:
        for name, value in model.named_parameters():
            tensors[name].copy_(value)
        tensors["model.embed_tokens.weight"][POISON] = float("nan")
    asyncio.run(engine.update_weights(1, buffer.layout.source(1)))
    good, bad = asked(0, 5, 6, length=5), asked(1, 5, POISON, 6)
    found = serve(engine, [good, bad])
    assert isinstance(found[good.sample].event, SampleGenerated)
    failed = found[bad.sample].event
    assert isinstance(failed, SampleFailed)
    assert "not numbers at response token 0" in failed.reason


def test_it_is_lost_with_one_of_its_processes_and_leaves_nothing(engine: ProcessEngine) -> None:
    """The last test of this engine. The memory that its processes share has no name any more, so
    that it goes with them, however they end."""
    heard = Heard()
    engine.start(heard, heard.on_error)
    processes = family(engine.child.process.pid)
    before = shared_memory()
    engine.submit([asked(row, length=400) for row in range(4)])
    worker = next(one for one in processes if "Worker_TP1" in command(one))
    mapped = Path(f"/proc/{worker}/maps").read_text()
    assert "(deleted)" in mapped
    assert not any(f"/dev/shm/{name}\n" in mapped for name in before)
    os.kill(worker, signal.SIGKILL)
    assert "of vLLM's" in heard.wait_for_error()
    until = time.monotonic() + 30
    while any(map(is_there, processes)):
        assert time.monotonic() < until, "processes are left"
        time.sleep(0.02)


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
