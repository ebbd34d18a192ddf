"""What turns slow in a trainer in stages is named, in real processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollpacker.trainer.launch import RankPlace, Ranks
from rollpacker.trainer.model import load_model
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.trainer import PipelineConfig
from tests.trainer.pipeline.slowed_worker import MESSAGE_S, SLOWED, SlowedHost
from tests.trainer.test_process_trainer import folder, setup_of, step  # noqa: F401

WITHIN = 3
"""Steps."""


@pytest.fixture
def slowed(tmp_path: Path) -> Path:
    path = tmp_path / "slowed"
    path.write_text("")
    return path


@pytest.fixture
def trainer(folder: Path, slowed: Path) -> Iterator[ProcessTrainer]:  # noqa: F811
    setup = setup_of(folder)
    train = dataclasses.replace(
        setup.train,
        steps=500,
        micro_batch_tokens=200,
        processes=2,
        pipeline=PipelineConfig(stages=2),
    )
    places = [RankPlace(rank, SlowedHost(), {SLOWED: str(slowed)}) for rank in range(2)]
    model = load_model(setup.model).model
    found = ProcessTrainer(
        dataclasses.replace(setup, train=train), Ranks(2, places), model.named_parameters()
    )
    yield found
    found.close()


def steps_until(trainer: ProcessTrainer, there: Callable[[], bool], most: int) -> int:
    for number in range(1, most + 1):
        step(trainer, trainer.version)
        if there():
            return number
    raise AssertionError(f"not within {most} steps; found: {trainer.overseer.found}")


def test_a_slow_link_and_a_slow_stage_are_named_within_three_steps(trainer, slowed, caplog):
    """Compared with the same trainer's healthy steps: a busy machine may make it slow besides."""
    overseer = trainer.overseer

    def is_well() -> bool:
        return not (overseer.slow_links or overseer.slow_stages)

    def is_well_and_direct() -> bool:
        return trainer.version >= 5 and is_well() and overseer.arrangement.links == "direct"

    steps_until(trainer, is_well_and_direct, most=100)
    slowed.write_text("link")
    steps_until(trainer, lambda: 0 in overseer.slow_links, most=WITHIN)
    assert overseer.arrangement.links == "host"
    messages = [one.getMessage() for one in caplog.records]
    assert any("pipeline link 0-1 is slow" in message for message in messages)
    measured = overseer.arrangement.measured
    assert measured.links[0].seconds(round(200 * measured.bytes_per_token)) > MESSAGE_S / 2
    # Over host links, which nothing slows here, it is well again.
    steps_until(trainer, is_well, most=100)
    slowed.write_text("stage 1")
    steps_until(trainer, lambda: 1 in overseer.slow_stages, most=WITHIN)
    messages = [one.getMessage() for one in caplog.records]
    assert any("pipeline stage 1 is slow" in message for message in messages)
