"""One rank and several alike: faults after a rescale, adapters in bfloat16, errors on their way to
the run's process; and a trainer that hangs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollpacker.run.error_messages import classify
from rollpacker.trainer import launch
from rollpacker.trainer.calls import error_bytes
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.schedule import check_schedule
from rollpacker.trainer.sharding import Shards, full_tensors, join
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.trainer.trainer import TrainConfig
from rollpacker.workers.group import Member
from rollpacker.workers.kinds import ERROR
from rollpacker.workers.line import Line
from tests.trainer.ranks import Ranks
from tests.trainer.test_learner import (
    GRPO,
    PPO,
    BadGradient,
    learner_of,
    of_rank,
    samples_for,
    weights,
)
from tests.trainer.tiny import tiny_model


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def spoil_gradient(learner: Learner, calls: list[int]) -> None:
    """In these backward passes of this rank."""
    bad = BadGradient(calls)

    def hook(_module: object, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(bad)

    learner.model.model.norm.register_forward_hook(hook)


def streamed_steps(shards: Shards | None, name: str, gradient_sync: str, calls: list[int]) -> Any:
    """Two steps with provisional weights, the first with a passing fault on the last rank."""
    algorithm = {"grpo": GRPO, "ppo": dataclasses.replace(PPO, whiten=False)}[name]
    learner = learner_of(
        algorithm, shards=shards, gradient_sync=gradient_sync, micro_batch_tokens=40
    )
    if shards is None or shards.rank == shards.size - 1:
        spoil_gradient(learner, calls)
    recomputed = 0
    for number in range(2):
        batch = samples_for(learner, algorithm, number)
        for part, factor in ((batch[:5], 8.0), (batch[5:9], 0.5)):
            early = [dataclasses.replace(s, token_weight=s.token_weight * factor) for s in part]
            learner.accumulate(early if shards is None else of_rank(early, shards))
            learner.rescale(1 / factor)
        late = batch[9:]
        learner.accumulate(late if shards is None else of_rank(late, shards))
        recomputed += learner.apply().sums.recomputed_micro_batches
    return weights(learner), recomputed


@pytest.mark.parametrize("gradient_sync", ["step", "micro-batch"])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_streamed_step_of_several_ranks_is_computed_again(ranks, name, gradient_sync):
    expected, _ = streamed_steps(None, name, gradient_sync, [])
    found, recomputed = ranks.run(2, streamed_steps, name, gradient_sync, [1])[0]
    assert recomputed > 0
    for parameter, value in expected.items():
        torch.testing.assert_close(found[parameter], value, rtol=1e-8, atol=1e-10)


def adapter_checkpoint(
    shards: Shards | None, folder: Path, *, load: bool
) -> tuple[dict[str, Tensor], int]:
    learner = learner_of(model=tiny_model(dtype=torch.bfloat16), lora=True, shards=shards, eps=1e-4)
    if load:
        learner.load(folder)
    else:
        batch = samples_for(learner, GRPO, 0)
        learner.accumulate(batch if shards is None else of_rank(batch, shards))
        learner.apply()
        learner.save(folder)
    adapter = {n: p for n, p in learner.model.named_parameters() if p.requires_grad}
    return dict(full_tensors(adapter.items(), shards)), learner.version


def read_back(shards: Shards | None, folder: Path) -> Any:
    return adapter_checkpoint(shards, folder, load=True)


def write(shards: Shards | None, folder: Path) -> Any:
    return adapter_checkpoint(shards, folder, load=False)


@pytest.mark.parametrize("writers, readers", [(1, 2), (2, 1), (2, 2)])
def test_a_bfloat16_models_adapter_goes_on_at_any_number_of_ranks(
    ranks, tmp_path, writers, readers
):
    def run(size: int, function: Any) -> Any:
        return function(None, tmp_path) if size == 1 else ranks.run(2, function, tmp_path)[0]

    saved, _ = run(writers, write)
    found, version = run(readers, read_back)
    assert version == 1 and saved.keys() == found.keys() and saved
    assert all(torch.equal(saved[name], found[name]) for name in saved)


def raised(work: Any) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize(
    "fails",
    [
        no_memory,
        lambda: Path("/nowhere/at/all").write_text(""),
        lambda: check_schedule(TrainConfig(steps=1, schedule="sawtooth")),
        lambda: torch.zeros(2).view(3),
        lambda: (1).real_part,
        lambda: json.loads("{"),
        lambda: math.sqrt(-1),
    ],
)
def test_an_error_of_a_process_has_the_exit_code_of_the_runs_own(fails, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    own = classify(raised(fails))
    ours, theirs = Line.pair()
    Line(theirs).send(ERROR, payload=error_bytes(raised(fails)))
    several = object.__new__(launch.Ranks)
    several._calling = threading.Lock()
    several.all = [Member(name="process 0", number=0, pid=0, line=ours, child=None)]
    received = raised(lambda: several.call("accumulate", [()]))
    code, message = classify(received)
    assert code == own[0]
    if code == 1:  # a bug: its traceback must have been printed where it happened
        assert "Traceback" in capfd.readouterr().err and "process 1" in str(received)
    else:
        assert message == own[1]


def test_more_processes_than_gpus_is_one_message(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, message = classify(raised(lambda: join(torch.device("cuda"))))
    assert code == 2 and "train.processes" in message


class Hanging:
    """A learner whose call does not return before `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def accumulate(self, _samples: object) -> None:
        self.release.wait(100)


def test_a_trainer_that_hangs_can_be_closed():
    """Else a run whose deadline has passed would not end."""
    learner = Hanging()
    trainer = TorchTrainer(learner)

    async def run() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trainer.accumulate([]), 0.1)
        began = time.monotonic()
        trainer.close()
        return time.monotonic() - began

    try:
        assert asyncio.run(run()) < 50
    finally:
        learner.release.set()
