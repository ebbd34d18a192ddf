"""A hundred faults: servers that fail on a response or abort it unasked, and workers that are
killed, which end the run, and it goes on from its last checkpoint. What is verl's own and what is
faked, `without_models.py` says. Takes some minutes."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

import ray
import transfer_queue
from omegaconf import OmegaConf

from tests.integrations_verl.speed import config_of
from tests.integrations_verl.training import write_inputs
from tests.integrations_verl.without_models import Faked, trained

pytestmark = pytest.mark.timeout(1800)

PROMPTS, SAMPLES, STEPS, KILLS = 8, 2, 12, 4
GIVEN = Namespace(mode="on", prompts=PROMPTS, samples=SAMPLES, steps=STEPS, seed=0)


class Killed:
    """Kills a worker while a step generates, at steps that the dice choose."""

    def __init__(self, dice: random.Random) -> None:
        self.at = set(dice.sample(range(2, STEPS + 1), KILLS))
        self.num_killed = 0

    def begun(self, trainer: Any) -> None:
        if trainer.global_steps in self.at:
            self.at.discard(trainer.global_steps)
            worker = trainer.agent_loop_manager.agent_loop_workers[0]
            threading.Timer(0.02, ray.kill, (worker,)).start()
            self.num_killed += 1


def test_nothing_is_lost_or_trained_twice(tmp_path: Path) -> None:
    write_inputs(tmp_path, num_prompts=PROMPTS * STEPS)
    config = config_of(
        Namespace(**vars(GIVEN), set=["prompt_factor=1.5"]),
        tmp_path,
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
    )
    OmegaConf.resolve(config)
    killed, steps, responses = Killed(random.Random(5)), [], {}
    num_faults = 0
    ray.init(num_cpus=16, include_dashboard=False, logging_level="error")
    transfer_queue.init(config.transfer_queue)
    try:
        while not steps or steps[-1] < STEPS:
            trainers: list[Any] = []

            def prepared(trainer: Any, trainers: list[Any] = trainers) -> dict[str, float]:
                trainers.append(trainer)
                killed.begun(trainer)
                return Faked.prepare_step(trainer)

            own = {"prepare_step": prepared, "token_s": 0.002, "fault_rate": 0.6}
            own["said"] = lambda trainer, line: steps.append(line["step"])
            with contextlib.suppress(ray.exceptions.RayActorError):
                trained(copy.deepcopy(config), **own)
            trainer = trainers[0]
            num_faults += trainer.num_faults
            assert not responses.keys() & trainer.responses.keys()
            responses |= trainer.responses
    finally:
        transfer_queue.close()
        ray.shutdown()
    assert steps == list(range(1, STEPS + 1))
    rows = {int(name.partition("/")[0]) for name in responses}
    assert rows == set(range(PROMPTS * STEPS)) and len(responses) == PROMPTS * SAMPLES * STEPS
    assert killed.num_killed == KILLS and num_faults + KILLS >= 100
