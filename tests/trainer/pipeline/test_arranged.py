"""When the ranks of a pipeline are told what the overseer has arranged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.trainer.calls import codec
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.step_sums import StepSums
from rollpacker.trainer.trainer import ModelConfig, PipelineConfig, RanksLost, TrainConfig
from rollpacker.weights.buffer import BufferLayout
from tests.trainer.pipeline.test_overseer import ranks_times


class FakeRanks:
    """Two of them, which note what they are told."""

    num_processes = 2

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.told: list[Any] = []
        """The methods, and of `arrange` what was arranged."""
        self.slow = False
        self.lost = False

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], numbers: Sequence[int] = ()
    ) -> list[Any]:
        if self.lost:
            raise RanksLost("gone")
        self.told.append(arguments[0][0] if method == "arrange" else method)
        if method in ("score", "setup"):
            return [[], []]
        if method == "apply":
            times = ranks_times(2, slow_links=[(0, 0)] if self.slow else [])
            return [
                (
                    StepOutcome(
                        sums=StepSums(response_tokens=1),
                        grad_norm=1.0,
                        learning_rate=1.0,
                        critic_grad_norm=None,
                        peak_memory_bytes=1,
                        stage_times=one,
                    ),
                    None,
                )
                for one in times
            ]
        return [None, None]

    def send(self, method: str, calls: Sequence[bytes], numbers: Sequence[int] = ()) -> list[Any]:
        return self.call(method, [codec().decode(call)[1] for call in calls], numbers)

    def connect(self) -> None:
        self.told.append("connect")
        self.all = [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]

    can_start_anew = True
    order = (0, 1)

    def start_anew(self, order: Sequence[int] | None = None) -> None:
        self.told.append("start anew")
        self.all = []

    def hold(self, layout: BufferLayout) -> BufferLayout:
        return layout

    def close(self) -> None:
        pass


@pytest.fixture
def ranks() -> FakeRanks:
    return FakeRanks()


@pytest.fixture
def trainer(ranks):
    setup = LearnerSetup(
        model=ModelConfig(path="none"),
        train=TrainConfig(steps=9, processes=2, pipeline=PipelineConfig(stages=2)),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        total_steps=9,
    )
    found = ProcessTrainer(setup, ranks, [])
    ranks.told.clear()
    yield found
    found.close()


def step(trainer: ProcessTrainer, ranks: FakeRanks) -> list[Any]:
    """What was told in it."""
    ranks.told.clear()

    async def run() -> None:
        await trainer.score([])
        await trainer.accumulate([])
        await trainer.apply()

    asyncio.run(run())
    return ranks.told[:]


def test_ranks_are_told_before_they_compute_and_only_what_is_new(trainer, ranks):
    assert step(trainer, ranks) == ["score", "accumulate", "apply"]
    assert ranks.told == ["score", "accumulate", "apply"]  # not while the step is being applied
    arranged, *rest = step(trainer, ranks)
    assert rest == ["score", "accumulate", "apply"]
    assert arranged.links == "direct" and arranged.measured is not None
    assert step(trainer, ranks) == rest  # the same times: nothing is new
    ranks.slow = True
    assert step(trainer, ranks) == rest
    kinds = [step(trainer, ranks)[0].links for _ in range(2)]
    assert kinds == ["direct", "host"]


def test_others_in_their_place_are_told_the_same(trainer, ranks):
    for slow in (False, False, False, True, True):
        ranks.slow = slow
        step(trainer, ranks)
    arrangement = trainer.overseer.arrangement
    assert arrangement.links == "host"
    ranks.lost = True
    with pytest.raises(RanksLost):
        step(trainer, ranks)
    ranks.lost = False
    ranks.told.clear()
    asyncio.run(trainer.restore(None, lambda: None))
    assert ranks.told[:4] == ["start anew", "connect", "setup", "map_weights"]
    assert ranks.told[4] == arrangement
    assert ranks.told[5:] == ["accumulate", "apply"] * 5
    assert step(trainer, ranks) == ["score", "accumulate", "apply"]
