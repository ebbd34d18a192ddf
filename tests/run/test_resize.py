"""Engines get another number of devices between rounds, and the run goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Launch, Resize
from rollpacker.core.events import EngineLost, EngineReady, SampleGenerated
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.core.job.job import Job
from rollpacker.engines.engine import EngineConfig, EngineError, EngineOutput, GenerationRequest
from rollpacker.report.summary import summarize_entries
from rollpacker.run.folder.checkpoint import newest_checkpoint
from rollpacker.run.ports.engines import Engines
from tests.run.fakes import FakeEngine, FakeTrainer, drive, make, run_config
from tests.run.test_engines import MortalEngine, commands, events, is_whole, when


class Scarce(MortalEngine):
    """On one device it puts every sample back once; on more, none."""

    def __init__(self, tensor_parallel: int) -> None:
        super().__init__(step_s=0.001)
        self.tensor_parallel = tensor_parallel

    def _finished(self, sample: Any, request: GenerationRequest, length: int) -> EngineOutput:
        output = super()._finished(sample, request, length)
        preemptions = 1 if self.tensor_parallel == 1 else 0
        return replace(output, event=structs.replace(output.event, preemptions=preemptions))


class Devices:
    """So many devices, and the engines on them. Two engines on one device are a mistake."""

    def __init__(
        self,
        count: int,
        initial: int = 1,
        make: Callable[[int, int, int], FakeEngine] = lambda number, incarnation, d: Scarce(d),
    ) -> None:
        self.on: list[FakeEngine | None] = [None] * count
        self.made: list[tuple[int, int, int]] = []
        self._make, self._lock = make, threading.Lock()
        first = [self.make(number, 0, initial) for number in range(count // initial)]
        self.engines = Engines(first, self.make, initial)

    def make(self, number: int, incarnation: int, tensor_parallel: int) -> FakeEngine:
        engine = self._make(number, incarnation, tensor_parallel)
        with self._lock:
            self.made.append((number, incarnation, tensor_parallel))
            for device in range(number * tensor_parallel, (number + 1) * tensor_parallel):
                before = self.on[device]
                assert before is None or before._closed, f"two engines on device {device}"
                self.on[device] = engine
        return engine


def elastic(steps: int, engines: int = 2, initial: int = 1, **planner: Any) -> RunConfig:
    config = run_config(steps=steps)
    rollout = replace(config.rollout, engines=engines, engine=EngineConfig(name="vllm"))
    tail = replace(config.tail_batching, enabled=False, carry="none")
    settings = {"degrees": (1, 2), "calm_rounds": 1, "initial": initial, **planner}
    planner_config = ParallelismConfig(enabled=True, **settings)
    return replace(config, rollout=rollout, tail_batching=tail, parallelism_planner=planner_config)


def test_the_planner_gives_engines_more_devices_and_takes_them_back(tmp_path: Path) -> None:
    devices = Devices(2)
    controller, recorder = make(tmp_path, elastic(steps=12), engines=devices.engines)
    assert drive(controller) == "every step is done"
    is_whole(tmp_path)
    degrees = [launch.tensor_parallel for launch in commands(recorder, Launch)]
    # A failed degree is tried again after 4 calm rounds, then after 8.
    assert degrees == [1, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2]
    sizes = [(one.tensor_parallel, one.incarnations) for one in commands(recorder, Resize)]
    assert sizes == [(2, (1,)), (1, (2, 2)), (2, (3,))]
    ready = [(one.engine, one.incarnation) for one in events(recorder, EngineReady)]
    assert ready[0] == (0, 1) and sorted(ready[1:3]) == [(0, 2), (1, 2)] and ready[3:] == [(0, 3)]
    assert devices.made == [(0, 0, 1), (1, 0, 1), (0, 1, 2), *devices.made[3:5], (0, 3, 2)]
    assert not events(recorder, EngineLost)
    assert {e.engine for e in events(recorder, SampleGenerated) if e.incarnation == 2} == {0, 1}
    newest: Any = devices.on[1]
    assert newest.version == controller.parts.trainer.version == 12
    switches = summarize_entries(recorder.entries)["switches"]
    assert [(one["before_step"], one["tensor_parallel"]) for one in switches] == [
        *((2, 2), (6, 1), (7, 2)),
    ]
    assert all(one["seconds"] > 0 for one in switches)


def test_one_engine_of_two_devices_becomes_two(tmp_path: Path) -> None:
    """Of a run that begins with fewer engines than it may come to have."""
    devices = Devices(2, initial=2)
    config = elastic(steps=3, engines=1, initial=2)
    controller, recorder = make(tmp_path, config, engines=devices.engines)
    assert drive(controller) == "every step is done"
    is_whole(tmp_path)
    degrees = [launch.tensor_parallel for launch in commands(recorder, Launch)]
    assert degrees == [2, 1, 2]


def test_an_engine_that_is_lost_while_all_are_laid_out_is_replaced_there(tmp_path: Path) -> None:
    """Its samples begin on the others, if there are any."""

    def failing(number: int, incarnation: int, tensor_parallel: int) -> FakeEngine:
        if (number, incarnation) == (1, 2):
            raise EngineError("its device is gone")
        return Scarce(tensor_parallel)

    devices = Devices(2, make=failing)
    controller, recorder = make(tmp_path, elastic(steps=7), engines=devices.engines)
    assert drive(controller) == "every step is done"
    is_whole(tmp_path)
    (lost,) = events(recorder, EngineLost)
    assert (lost.engine, lost.incarnation) == (1, 2)
    assert "its device is gone" in lost.reason
    assert commands(recorder, Resize)[1].incarnations == (2, 2)


def test_a_replacement_on_its_way_is_not_waited_for(tmp_path: Path) -> None:
    """Its devices are others' by the time it is there."""
    may_come = threading.Event()

    class Late(Scarce):
        async def update_weights(self, version: int, weights: object = None) -> None:
            await asyncio.to_thread(may_come.wait, 20)
            await super().update_weights(version, weights)

    def slow(number: int, incarnation: int, tensor_parallel: int) -> FakeEngine:
        is_replacement = (number, incarnation, tensor_parallel) == (1, 1, 1)
        return Late(tensor_parallel) if is_replacement else Scarce(tensor_parallel)

    devices = Devices(2, make=slow)
    controller, recorder = make(tmp_path, elastic(steps=4), engines=devices.engines)
    second: Any = devices.on[1]
    when(recorder, lambda event: isinstance(event, SampleGenerated), second.kill)
    when(
        recorder,
        lambda event: isinstance(event, SampleGenerated) and event.incarnation == 2,
        may_come.set,
    )
    assert drive(controller) == "every step is done"
    is_whole(tmp_path)
    (resize,) = commands(recorder, Resize)
    assert resize.tensor_parallel == 2
    assert [(e.engine, e.incarnation) for e in events(recorder, EngineLost)] == [(1, 0)]


def test_a_resumed_run_goes_on_at_the_degree_that_it_had(tmp_path: Path) -> None:
    """Its first engines are those of the beginning: they are laid out before its first round."""
    first_folder, second_folder = tmp_path / "first", tmp_path / "second"
    first_folder.mkdir()
    second_folder.mkdir()
    first, _ = make(first_folder, elastic(steps=2), engines=Devices(2).engines)
    drive(first)
    checkpoint = newest_checkpoint(first_folder / "checkpoints")
    more = replace(first.parts.job.config, max_steps=4)
    job = Job.restore(more, checkpoint.state["job"])
    trainer = FakeTrainer(version=2)
    resumed, recorder = make(
        second_folder, elastic(steps=4), engines=Devices(2).engines, job=job, trainer=trainer
    )
    assert drive(resumed) == "every step is done"
    assert [launch.tensor_parallel for launch in commands(recorder, Launch)] == [2, 2]
    assert [one.tensor_parallel for one in commands(recorder, Resize)] == [2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engines": 3}, "degrees has 2, which does not divide the 3 devices"),
        ({"degrees": (1,)}, "leaves nothing to choose"),
    ],
)
def test_degrees_that_the_devices_cannot_have_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        elastic(steps=3, **settings)


def test_the_embedded_engine_cannot_be_planned_by_preemptions() -> None:
    config = elastic(steps=3)
    with pytest.raises(ValueError, match=r"rollout.engine.name=torch.*Set rollout.engine.name=vl"):
        replace(config, rollout=replace(config.rollout, engine=EngineConfig()))
