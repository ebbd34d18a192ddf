"""The trainer in processes, with its model in stages, against the one in the run's process."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.trainer.launch import Ranks
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.model import load_model
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.setup import LearnerSetup, build_learner
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.trainer.trainer import (
    LoraConfig,
    ModelConfig,
    NonFiniteError,
    PipelineConfig,
    TrainConfig,
    TrainerProcessError,
    TrainSample,
)
from tests.trainer import test_process_trainer as processes
from tests.trainer.test_process_trainer import ended, folder, setup_of, step, weights  # noqa: F401
from tests.trainer.tiny import largest_difference


def trainer_of(setup: LearnerSetup, size: int, pipeline: PipelineConfig) -> ProcessTrainer:
    model = load_model(setup.model).model
    if setup.model.lora is not None:
        add_adapter(model, setup.model.lora)
    engine = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    train = dataclasses.replace(setup.train, processes=size, pipeline=pipeline)
    return ProcessTrainer(dataclasses.replace(setup, train=train), Ranks(size), engine)


@pytest.fixture(scope="module")
def staged(folder: Path) -> Iterator[ProcessTrainer]:  # noqa: F811
    """Two stages of two shards."""
    trainer = trainer_of(setup_of(folder), 4, PipelineConfig(stages=2))
    yield trainer
    trainer.close()


def begun(setup: LearnerSetup, folder: Path) -> tuple[TorchTrainer, Path]:  # noqa: F811
    """The trainer in this process, and its first checkpoint."""
    own = TorchTrainer(build_learner(setup), in_place=False)
    own.save(folder)
    return own, folder


def test_stages_take_the_steps_of_one_process(folder, staged, tmp_path):  # noqa: F811
    """Streamed or not; what an engine gets is the whole model."""
    own, first = begun(setup_of(folder), tmp_path)
    staged.load(first)
    for number in range(3):
        streamed = 4 * number
        expected, found = (step(one, number, streamed=streamed) for one in (own, staged))
        for name in found.keys() - {"train/padded_tokens", "train/micro_batches"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert found["train/response_tokens"] == expected["train/response_tokens"]
    (plain, _), (found_weights, _) = weights(own), weights(staged)
    assert largest_difference(plain, found_weights) < 1e-6


@pytest.mark.parametrize("kind", ["whole to stages", "stages to whole", "stages to stages"])
def test_a_checkpoint_goes_on_at_any_number_of_stages(tmp_path, folder, staged, kind):  # noqa: F811
    own, first = begun(setup_of(folder), tmp_path / "first")
    staged.load(first)
    writer, reader = {
        "whole to stages": (own, staged),
        "stages to whole": (staged, own),
        "stages to stages": (staged, staged),
    }[kind]
    step(writer, 0)
    writer.save(tmp_path / "saved")
    step(writer, 1)
    expected, probe = weights(writer)
    hashes = staged._all("hashes")[0]
    step(writer, 2)
    reader.load(tmp_path / "saved")
    assert reader.version == 1
    step(reader, 1)
    found, found_probe = weights(reader)
    if writer is reader:
        assert found_probe == probe and staged._all("hashes")[0] == hashes
    assert largest_difference(found, expected) < 1e-6
    with torch.no_grad():  # a folder that transformers reads
        loaded = load_model(ModelConfig(path=str(tmp_path / "saved" / "model"), device="cpu"))
    assert {name for name, _ in loaded.model.named_parameters()} == found.keys()


def test_what_is_not_finite_is_refused_and_all_stages_go_on(folder, staged, tmp_path):  # noqa: F811
    _, first = begun(setup_of(folder), tmp_path)
    staged.load(first)
    before = staged._all("hashes")[0]
    samples = asyncio.run(processes.samples_of(staged, 1))
    bad = dataclasses.replace(samples[3], rollout_log_probs=(math.nan,) * 50)
    bad = dataclasses.replace(bad, rollout_log_probs=(math.nan,) * len(bad.response_tokens))
    with pytest.raises(NonFiniteError, match=str(bad.sample)):
        asyncio.run(trained_on(staged, [*samples[:3], bad, *samples[4:]]))
    assert staged._all("hashes")[0] == before
    step(staged, 1)


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [(AlgorithmConfig(name="ppo", kl_coef=0.1), None), (AlgorithmConfig(), LoraConfig(rank=2))],
    ids=["critic", "adapters"],
)
def test_critics_and_adapters_are_saved_and_loaded(folder, tmp_path, algorithm, lora):  # noqa: F811
    """Over direct links, with as many layers as told; a sharded one of one process each."""
    setup = setup_of(folder)
    setup = dataclasses.replace(
        setup,
        algorithm=dataclasses.replace(algorithm, old_logprobs="rollout"),
        model=dataclasses.replace(setup.model, lora=lora),
    )
    own, first = begun(setup, tmp_path / "first")
    layers = (1, load_model(setup.model).model.config.num_hidden_layers - 1)
    trainer = trainer_of(setup, 2, PipelineConfig(stages=2, layers=layers, links="direct"))
    try:
        trainer.load(first)
        for number in range(2):
            expected, found = (taken(one, number, setup) for one in (own, trainer))
            for name in found.keys() - {"train/padded_tokens", "train/micro_batches"}:
                assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        trainer.save(tmp_path / "saved")
        again = TorchTrainer(build_learner(setup), in_place=False)
        again.load(tmp_path / "saved")
        for one in (again, trainer):
            taken(one, 2, setup)
        (wanted, _), (got, _) = weights(again), weights(trainer)
        assert largest_difference(wanted, got) < 1e-6
    finally:
        trainer.close()


def taken(trainer: processes.Either, seed: int, setup: LearnerSetup) -> dict[str, float]:
    """A step with the algorithm's own advantages."""

    async def run() -> dict[str, float]:
        groups = processes.responses(seed)
        scores = {}
        if setup.algorithm.needs_scores:
            requests = processes.requests_of(groups)
            found = await trainer.score(requests)
            scores = {r.sample: s for r, s in zip(requests, found, strict=True)}
        samples = processes.build_train_samples(groups, setup.algorithm, scores=scores)[0]
        await trainer.accumulate(samples)
        return dict(await trainer.apply())

    metrics = asyncio.run(run())
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"processes": 3}, r"pipeline\.stages \(2\) must divide train\.processes \(3\)"),
        ({}, "not set"),
        ({"processes": 4, "replicas": 2}, "replicas=2 does not go with"),
        ({"processes": 4, "compile": True}, "compile=True does not go with"),
        ({"processes": 4, "gradient_sync": "micro-batch"}, "gradient_sync=micro-batch does not go"),
    ],
)
def test_settings_that_do_not_go_with_stages_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        TrainConfig(steps=1, pipeline=PipelineConfig(stages=2), **settings)
    with pytest.raises(ValueError, match="a number for each of the 2 stages"):
        PipelineConfig(stages=2, layers=(1,))


async def trained_on(trainer: ProcessTrainer, samples: list[TrainSample]) -> None:
    await trainer.accumulate(samples)
    await trainer.apply()


def test_a_stage_that_is_killed_ends_the_trainer(folder, staged, tmp_path):  # noqa: F811
    """The last test with these processes. Others in their place are told of a streamed step once
    more, and come to the same bits."""
    _, first = begun(setup_of(folder), tmp_path)
    staged.load(first)
    step(staged, 1, streamed=4)
    before, probe = weights(staged)
    pids = staged.pids

    async def run() -> None:
        samples = await processes.samples_of(staged, 0)
        work = asyncio.ensure_future(trained_on(staged, samples * 200))
        await asyncio.sleep(0.5)
        assert not work.done()
        os.kill(pids[3], signal.SIGKILL)
        await work

    with pytest.raises(TrainerProcessError, match="--resume"):
        asyncio.run(run())
    assert ended(pids)
    asyncio.run(staged.restore(first, lambda: None))
    after, probe_after = weights(staged)
    assert probe_after == probe and all(
        torch.equal(after[name], one) for name, one in before.items()
    )
