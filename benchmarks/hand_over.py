"""Two engines get a 400 MB model from the trainer at least three times faster straight from its
processes (`broadcast`, `ipc`) than through host memory, and never generate under wrong weights.

    python benchmarks/hand_over.py              # seconds by carrier, arms interleaved
    python benchmarks/hand_over.py --faults 100 # and faults in hand-overs of a small model

`host` is the code that was there before the other two. A hand-over of a random float32 model ends
when two engine processes have the trainer's hash. `host_bytes` count writes to host memory with
room for the whole model that is neither the trainer's nor an engine's; buckets, on a GPU in its
memory, do not count. A fault is an engine killed in the middle, a torn bucket or buffer, or another
version. After each, the trainer computes the log-probs of what each engine generates.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab import bench, earlier, turns

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.engines.engine import Engine, EngineConfig, EngineError
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.run.parts.engines import engine_setup, make_engine
from rollpacker.run.ports.deliveries import Deliveries
from rollpacker.run.ports.engines import Engines, Weights
from rollpacker.run.ports.hand_over import bring_up_to_date, hand_over_weights
from rollpacker.run.ports.held import Handle
from rollpacker.run.ports.waiting import failures
from rollpacker.trainer.launch import Ranks, store_at
from rollpacker.trainer.model import load_model, new_model, write_character_tokenizer
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.trainer import ModelConfig, TrainConfig
from rollpacker.weights import delivery
from rollpacker.weights.buffer import WeightBuffer, WeightSource
from tests.engines.engines import Heard, write_model
from tests.engines.tiny import request
from tests.trainer.tiny import samples

CARRIERS = ("host", "broadcast", "ipc")
FAULTS = ("torn", "stale", "kill", "torn", "stale")
TORN = "ROLLPACKER_BENCHMARK_TORN"
"""Environment variable with the path of a file; while it is there, an engine spoils a bucket."""
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}


def large_model(folder: Path) -> Path:
    tokenizer = write_character_tokenizer("abcdefghijklmnopqrstuvwxyz ", folder)
    new_model({"model_type": "qwen2", **SIZES}, tokenizer, 0).save_pretrained(folder)
    return folder


def spoiling(**arguments: Any) -> Engine:
    """The embedded engine, in a process that tears a bucket while the file `TORN` is there."""
    stamp = delivery.stamp_of

    def torn(data: Any, version: int, bucket: int) -> Any:
        if bucket == 1 and Path(os.environ[TORN]).exists():
            data[3] ^= 1
        return stamp(data, version, bucket)

    delivery.stamp_of = torn
    return make_engine(**arguments)


def engine_of(model: ModelConfig, torn: Path) -> ProcessEngine:
    setup = replace(
        engine_setup(model, EngineConfig(), threads=1), make="benchmarks.hand_over:spoiling"
    )
    return ProcessEngine(setup, environment={TORN: str(torn)})


@contextmanager
def run(path: Path, ranks: int, torn: Path) -> Iterator[tuple[ProcessTrainer, Engines]]:
    model = ModelConfig(path=str(path), device="cpu", dtype="float32")
    train = TrainConfig(steps=1000, learning_rate=1e-3, processes=ranks, micro_batch_tokens=64)
    rest = {"algorithm": AlgorithmConfig(), "temperature": 1.0, "total_steps": 1000, "threads": 1}
    setup = LearnerSetup(model=model, train=train, **rest)
    engines = Engines([engine_of(model, torn) for _ in range(2)])
    names = load_model(model, without_weights=True).model.named_parameters()
    trainer = ProcessTrainer(setup, Ranks(ranks), names)
    try:
        for handle in engines.living:
            asyncio.run(handle.engine.ready())
        yield trainer, engines
    finally:
        trainer.close()
        asyncio.run(engines.close())


def ways_of() -> dict[str, Deliveries | None]:
    return {"host": None} | {one: Deliveries(one, "127.0.0.1", store_at) for one in CARRIERS[1:]}


def timed(path: Path, ranks: int, repetitions: int) -> dict[str, Any]:
    """Seconds of hand-overs by carrier, without each one's first, which makes groups and memory."""
    seconds: dict[str, list[float]] = {carrier: [] for carrier in CARRIERS}
    host_bytes = dict.fromkeys(CARRIERS, 0)
    ways = ways_of()
    with run(path, ranks, path / "never") as (trainer, engines):
        for _, carrier in turns(CARRIERS, repetitions + 1):
            engines.deliveries = ways[carrier]
            began = time.perf_counter()
            asyncio.run(hand_over_weights(trainer, engines, 0))
            seconds[carrier].append(time.perf_counter() - began)
            given = engines.weights.hand_over
            assert given is not None and engines.weights.is_delivered == (carrier != "host")
            host_bytes[carrier] = given.host_bytes
    later = {one: [round(s, 3) for s in found[1:]] for one, found in seconds.items()}
    pairs = {one: zip(later["host"], later[one], strict=True) for one in CARRIERS}
    return {
        "seconds": later,
        "median_s": {one: statistics.median(found) for one, found in later.items()},
        "times_faster": {
            one: round(statistics.median(a / b for a, b in pair), 2) for one, pair in pairs.items()
        },
        "host_bytes": host_bytes,
    }


def faulty(path: Path, count: int) -> dict[str, Any]:
    """Make faults by all carriers in turn, and look for responses that are not the trainer's."""
    draw, torn = random.Random(0), path / "torn"
    model = ModelConfig(path=str(path), device="cpu", dtype="float32")
    done = {f"{carrier} {fault}": 0 for carrier in CARRIERS for fault in sorted({*FAULTS})}
    told = {"responses": 0, "wrong_responses": 0, "refused": 0, "lost_engines": 0}
    ways = ways_of()
    with run(path, 2, torn) as (trainer, engines):
        spare = engine_of(model, torn)
        for number in range(count):
            carrier, fault = CARRIERS[number % 3], FAULTS[number // 3 % len(FAULTS)]
            engines.deliveries = ways[carrier]
            asyncio.run(step(trainer))
            handles = engines.living
            if fault == "torn":
                torn.touch()
            if fault == "kill":
                pid = handles[0].engine.child.pid
                after_s = draw.uniform(0, 0.05)
                threading.Timer(after_s, os.kill, (pid, signal.SIGKILL)).start()
            if fault == "stale" or (carrier, fault) == ("host", "torn"):
                asyncio.run(refused(trainer, engines, fault))
                told["refused"] += sum(not accepts(handle.engine) for handle in handles)
            failed = asyncio.run(bring(trainer, engines))
            torn.unlink(missing_ok=True)
            told["lost_engines"] += len(failed)
            for handle in engines.living:
                if handle in failed:
                    assert not accepts(handle.engine), "it lacks the weights"
                    continue
                try:
                    told["wrong_responses"] += distance(trainer, handle, number) > 1e-3
                    told["responses"] += 1
                except EngineError as error:  # it was killed meanwhile
                    failed[handle] = error
            if fault == "kill":
                asyncio.run(spare.ready())
                asyncio.run(handles[0].engine.close())
                engines.handles[0] = Handle(0, handles[0].incarnation + 1, spare)
                spare = engine_of(model, torn)
                told["lost_engines"] += handles[0] not in failed
            done[f"{carrier} {fault}"] += 1
        asyncio.run(spare.close())
    return {"faults": done, **told}


async def step(trainer: ProcessTrainer) -> None:
    await trainer.accumulate(samples(trainer.version))
    await trainer.apply()


async def bring(trainer: ProcessTrainer, engines: Engines) -> dict[Handle, BaseException]:
    """As a run does it (`HandingOver`), but for its deadlines; the engines that failed."""
    living, version, straight = engines.living, trainer.version, engines.deliveries
    way = straight.bring(trainer, living, version, 1, None) if straight else trainer.hand_over()
    weights = Weights(version, await way)
    todo = {handle: (handle.engine, weights) for handle in engines.expect(weights)}
    return await failures(bring_up_to_date, todo, "take new weights", None)


async def refused(trainer: ProcessTrainer, engines: Engines, fault: str) -> None:
    """Hand over weights that every engine must refuse."""
    version = trainer.version + (fault == "stale")
    if engines.deliveries is not None:
        told = engines.deliveries._told(engines.living, version, trainer.holders, 1)
        arguments = {one: (one.engine, version, delivery) for one, delivery in told.items()}
        sending = trainer.hand_over(next(iter(told.values())))
        engines.deliveries._members = None
    else:
        source = (await trainer.hand_over()).weights
        assert isinstance(source, WeightSource)
        if fault == "torn":
            WeightBuffer(source.layout)._before[0] += 1
        source = replace(source, version=version)
        arguments = {one: (one.engine, version, source) for one in engines.living}
        sending = asyncio.sleep(0)
    taking = failures(update, arguments, "take new weights", None)
    _, failed = await asyncio.gather(sending, taking, return_exceptions=True)
    assert isinstance(failed, dict) and len(failed) == len(arguments), failed


def update(engine: Engine, version: int, weights: Any) -> None:
    asyncio.run(engine.update_weights(version, weights))


def accepts(engine: Engine) -> bool:
    try:
        engine.submit([request(0, prompt=[5, 6, 7])])
    except EngineError:
        return False
    return True


def distance(trainer: ProcessTrainer, handle: Handle, number: int) -> float:
    """Largest difference between an engine's log-probs of its response and the trainer's. Raises
    `EngineError` if the engine is lost."""
    heard = Heard()
    handle.engine.start(heard, heard.on_error)
    handle.engine.submit([request(number, prompt=[5, 9, number % 20], forced_length=12)])
    heard.wait(lambda: heard.outputs or heard.errors)
    if heard.errors:
        raise EngineError(str(heard.errors[0]))
    response = heard.outputs[0].response
    assert response is not None and response.version == trainer.version
    said = trainer._all("log_probs_of", (*response.prompt_tokens, *response.tokens))[-1]
    said = said[len(response.prompt_tokens) - 1 :]
    return max(abs(a - b) for a, b in zip(said, response.log_probs, strict=True))


def main(faults: int = 0, repetitions: int = 7, only_faults: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if only_faults:
            found = {f"trainer_of_{one}": earlier(main, f"trainer_of_{one}") for one in (2, 1)}
        else:
            path = large_model(Path(folder))
            found["megabytes"] = round((path / "model.safetensors").stat().st_size / 1e6)
            for ranks in (2, 1):
                found[f"trainer_of_{ranks}"] = timed(path, ranks, repetitions)
        if faults:
            found["faulty"] = faulty(write_model(Path(folder) / "small", tied=False), faults)
    return found


if __name__ == "__main__":
    bench(
        main,
        holds=lambda found: (
            found.get("faulty", {}).get("wrong_responses", 0) == 0
            and min(found["trainer_of_2"]["times_faster"][one] for one in CARRIERS[1:]) >= 3
        ),
    )
