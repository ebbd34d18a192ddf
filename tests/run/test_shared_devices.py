"""Engines and replicas on the same devices: never has one of them memory there beside the other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Release, StartGradients
from rollpacker.core.events import EngineLost, Event, Trained
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.engine import EngineError, GenerationRequest
from rollpacker.rewards.reward import Scored
from rollpacker.run.driver import Controller
from rollpacker.run.errors import EnginesLost
from rollpacker.run.ports.engines import Engines
from rollpacker.trainer.trainer import HandOver, ScoreRequest, TokenScores, TrainSample
from tests.run.fakes import FakeReward, FakeTrainer, Recorder, drive, make, run_config
from tests.run.test_engines import MortalEngine, commands, events, when


class Room:
    """The memory of each device, and whose it is."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._holders: list[set[str]] = [set() for _ in range(count)]
        self.quarrels: list[str] = []
        self.num_changes = 0

    def enter(self, device: int, who: str) -> None:
        with self._lock:
            if self._holders[device] - {who}:
                self.quarrels.append(f"{who} on device {device} of {self._holders[device]}")
            self._holders[device].add(who)
            self.num_changes += 1

    def leave(self, device: int, who: str) -> None:
        with self._lock:
            self._holders[device].discard(who)

    def needs(self, device: int, who: str) -> None:
        with self._lock:
            if who not in self._holders[device]:
                self.quarrels.append(f"{who} works on device {device} without its memory")


class Guest(MortalEngine):
    """An engine on one device. `breaks` says at which of its own reloads it dies, and how."""

    def __init__(self, room: Room, device: int, breaks: tuple[str, int] | None = None) -> None:
        super().__init__(step_s=0.0005)
        self._room, self._device = room, device
        self._breaks, self._num_reloads = breaks, 0
        self._is_gone = False
        """Its process is, and its memory with it."""
        self.who = f"engine {id(self)}"
        room.enter(device, self.who)

    def _need(self) -> None:
        with self._wake:
            if not self._is_gone:
                self._room.needs(self._device, self.who)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._need()
        super().submit(requests)

    async def update_weights(self, version: int, weights: object = None) -> None:
        self._need()
        await super().update_weights(version, weights)

    async def offload(self) -> None:
        self._check()
        if self._live:
            raise EngineError("samples run")
        if self._breaks == ("offload", self._num_reloads):
            raise EngineError("it keeps its memory")
        self._room.leave(self._device, self.who)

    async def reload(self) -> None:
        self._check()
        self._num_reloads += 1
        if self._breaks == ("reload", self._num_reloads):
            raise EngineError("it does not wake up")
        with self._wake:
            if not self._is_gone:
                self._room.enter(self._device, self.who)

    def kill(self, why: str = "it was killed") -> None:
        self._vanish()
        super().kill(why)

    async def close(self) -> None:
        self._vanish()
        await super().close()

    def _vanish(self) -> None:
        with self._wake:
            self._is_gone = True
            self._room.leave(self._device, self.who)


@dataclass
class Replicas(FakeTrainer):
    """One on each device, all of them let go of at the beginning."""

    room: Room = field(default_factory=lambda: Room(0))
    count: int = 2

    def _need(self, replicas: Sequence[int] | None) -> None:
        for number in range(self.count) if replicas is None else replicas:
            self.room.needs(number, f"replica {number}")

    async def offload(self) -> None:
        for number in range(self.count):
            self.room.leave(number, f"replica {number}")

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        for number in range(self.count) if replicas is None else replicas:
            self.room.enter(number, f"replica {number}")

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        self._need(replicas)
        return await super().score(requests, replicas)

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        self._need(replicas)
        await super().accumulate(samples, replicas)
        self._need(replicas)

    async def rescale(self, factor: float) -> None:
        self._need(None)
        await super().rescale(factor)

    async def apply(self) -> dict[str, float]:
        self._need(None)
        return await super().apply()

    async def hand_over(self) -> HandOver:
        self._need(None)
        return await super().hand_over()

    def save(self, folder: Path) -> None:
        self._need(None)
        super().save(folder)


@dataclass
class World:
    """A run of these, with what was seen of it."""

    controller: Controller
    recorder: Recorder
    room: Room
    trainer: Replicas
    made: dict[tuple[int, int], Guest]

    def newest(self, number: int) -> Guest:
        return self.made[max(key for key in self.made if key[0] == number)]


def colocated(count: int, steps: int, **tail: Any) -> RunConfig:
    config = run_config(steps=steps, generation_s=60.0)
    return replace(
        config,
        rollout=replace(config.rollout, engines=count, prompts_per_step=6),
        train=replace(
            config.train, processes=count, replicas=count, colocate=True, micro_batch_tokens=1
        ),
        tail_batching=TailBatchingConfig(**{"enabled": False, **tail}),
        stream_trainer=StreamConfig(enabled=True, kinds=("plain", "long", "flush")),
    )


def world(
    folder: Path,
    config: RunConfig,
    breaks: Callable[[int, int], tuple[str, int] | None] = lambda number, incarnation: None,
    **options: Any,
) -> World:
    count = config.rollout.engines
    room = Room(count)
    made: dict[tuple[int, int], Guest] = {}

    def make_engine(number: int, incarnation: int, tensor_parallel: int = 1) -> Guest:
        engine = Guest(room, number, breaks(number, incarnation))
        made[number, incarnation] = engine
        return engine

    engines = Engines([make_engine(number, 0) for number in range(count)], make_engine)
    trainer = Replicas(room=room, count=count)
    controller, recorder = make(folder, config, engines=engines, trainer=trainer, **options)
    return World(controller, recorder, room, trainer, made)


def check(one: World, steps: int) -> None:
    assert drive(one.controller) == "every step is done"
    assert one.room.quarrels == []
    assert one.trainer.version == steps


def test_devices_change_sides_and_nobody_shares_them(tmp_path: Path) -> None:
    """With releases, evaluations and checkpoints, each of which needs one of the two sides."""
    one = world(tmp_path, colocated(2, steps=4))
    check(one, 4)
    assert commands(one.recorder, Release) and commands(one.recorder, StartGradients)
    assert one.room.num_changes > 2 + 4 * 4  # both sides, on both devices, in every step
    seconds = [event.metrics for event in events(one.recorder, Trained)]
    assert len(seconds) == 4
    for metrics in seconds:
        assert metrics["perf/devices/to_trainer_s"] >= 0
        assert metrics["perf/devices/to_engines_s"] >= 0


@pytest.mark.parametrize("breaks", ["offload", "reload"])
def test_an_engine_that_does_not_hand_over_is_lost_and_replaced(
    tmp_path: Path, breaks: str
) -> None:
    def of(number: int, incarnation: int) -> tuple[str, int] | None:
        return (breaks, 1) if (number, incarnation) == (1, 0) else None

    one = world(tmp_path, colocated(2, steps=5), of)
    check(one, 5)
    (lost,) = events(one.recorder, EngineLost)
    said = {"offload": "it keeps its memory", "reload": "it does not wake up"}[breaks]
    assert lost.engine == 1 and said in lost.reason
    assert (1, 1) in one.made


def test_an_engine_that_is_lost_while_it_is_away_is_made_anew_when_its_device_is_free(
    tmp_path: Path,
) -> None:
    """The new one is asked for at once, and must not load beside the replica."""
    one = world(tmp_path, colocated(2, steps=4))
    original, killed = one.trainer.accumulate, []

    async def accumulate(samples: Any, replicas: Any = None) -> None:
        await original(samples, replicas)
        if replicas is None and not killed:
            killed.append(0)
            one.newest(0).kill("killed in its sleep")
            while not any(t.name == "rollpacker-new-engine" for t in threading.enumerate()):
                assert (0, 1) not in one.made
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)  # time to do what it must not
            assert (0, 1) not in one.made

    one.trainer.accumulate = accumulate  # type: ignore[method-assign]
    check(one, 4)
    (lost,) = events(one.recorder, EngineLost)
    assert lost.engine == 0 and "killed in its sleep" in lost.reason and (0, 1) in one.made


def test_a_refill_wakes_the_engines_whose_devices_replicas_have(tmp_path: Path) -> None:
    """Groups without signal are replaced by another round in the same step, whose launch reaches
    engines that are away: what they are told waits for them."""
    config = colocated(2, steps=3)
    rollout = replace(config.rollout, dynamic_sampling=DynamicSamplingConfig(enabled=True))
    config = replace(config, rollout=rollout)
    asked: list[Any] = []

    def verdict(sample: Any) -> Scored:
        asked.append(sample)
        same = len(asked) % 7 < 4  # now and then a group has no signal
        return Scored(value=0.0 if same else float(len(asked) % 2), parts={"fake": 0.0})

    one = world(tmp_path, config, reward=FakeReward(verdict=verdict))
    check(one, 3)


@settings(max_examples=8, deadline=None)
@given(
    count=st.integers(2, 3),
    enabled=st.booleans(),
    refills=st.booleans(),
    kills=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2)), max_size=2),
    broken=st.dictionaries(
        st.tuples(st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.sampled_from(["offload", "reload"]), st.integers(1, 4)),
        max_size=1,
    ),
)
def test_whatever_is_lost_and_when_no_device_is_shared(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    enabled: bool,
    refills: bool,
    kills: list[tuple[int, int]],
    broken: dict[tuple[int, int], tuple[str, int]],
) -> None:
    """The run goes on, unless three losses came without a step between them."""
    config = colocated(count, steps=4, enabled=enabled)
    if refills:
        sampling = DynamicSamplingConfig(enabled=True)
        config = replace(config, rollout=replace(config.rollout, dynamic_sampling=sampling))
    folder = tmp_path_factory.mktemp("run")
    one = world(folder, config, lambda number, incarnation: broken.get((number, incarnation)))
    for at, number in kills:
        seen: list[Event] = []

        def happens(event: Event, at: int = at, seen: list[Event] = seen) -> bool:
            seen.append(event)
            return len(seen) == at

        when(one.recorder, happens, lambda n=number: one.newest(n % count).kill())
    with contextlib.suppress(EnginesLost):
        assert drive(one.controller) in ("every step is done", "the data ended")
    assert one.room.quarrels == []
