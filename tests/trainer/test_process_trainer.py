"""The trainer in processes of its own, against the one in the run's process; and what is left when
one of them dies."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.resume import write_model
from rollpacker.algo import AlgorithmConfig
from rollpacker.engines.engine import Response
from rollpacker.trainer.launch import Ranks
from rollpacker.trainer.model import ModelError, load_model
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.setup import LearnerSetup, build_learner
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.trainer.trainer import (
    ModelConfig,
    NonFiniteError,
    ScoreRequest,
    TrainConfig,
    TrainerError,
    TrainerProcessError,
    TrainSample,
)
from rollpacker.weights.buffer import StaleWeightsError, WeightReader, WeightSource
from rollpacker.workers import group
from tests.trainer.tiny import largest_difference, responses

ALGORITHM = AlgorithmConfig(kl_coef=0.1, kl_in="reward", old_logprobs="rollout")
END_S = 20.0
"""Within which a process must be gone."""

Either = ProcessTrainer | TorchTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def setup_of(folder: Path) -> LearnerSetup:
    return LearnerSetup(
        model=ModelConfig(path=str(folder), device="cpu"),
        # A larger eps: gradients that are zero but for rounding must not decide a whole step.
        train=TrainConfig(steps=8, learning_rate=1e-3, eps=1e-4, micro_batch_tokens=64),
        algorithm=ALGORITHM,
        temperature=0.7,
        total_steps=8,
        threads=1,
    )


def process_trainer(folder: Path, size: int, replicas: int = 1) -> ProcessTrainer:
    engine = load_model(ModelConfig(path=str(folder), device="cpu")).model
    setup = setup_of(folder)
    train = dataclasses.replace(setup.train, processes=size, replicas=replicas)
    setup = dataclasses.replace(setup, train=train)
    return ProcessTrainer(setup, Ranks(size), engine.named_parameters())


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[ProcessTrainer]:
    trainer = process_trainer(folder, 1)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[ProcessTrainer]:
    trainer = process_trainer(folder, 2)
    yield trainer
    trainer.close()


@pytest.fixture
def first(folder: Path, tmp_path: Path) -> Path:
    """A checkpoint of a trainer before its first step."""
    TorchTrainer(build_learner(setup_of(folder))).save(tmp_path)
    return tmp_path


async def samples_of(trainer: Either, seed: int) -> list[TrainSample]:
    groups = responses(seed)
    requests = requests_of(groups)
    found = await trainer.score(requests)
    scores = {r.sample: s for r, s in zip(requests, found, strict=True)}
    return build_train_samples(groups, ALGORITHM, scores=scores)[0]


def requests_of(groups: Sequence[Sequence[tuple[Response, float]]]) -> list[ScoreRequest]:
    return [
        ScoreRequest(sample=r.sample, prompt_tokens=r.prompt_tokens, response_tokens=r.tokens)
        for group in groups
        for r, _ in group
    ]


def step(trainer: Either, seed: int, *, streamed: int = 0) -> dict[str, float]:
    """One step without what depends on the clock; the first samples with provisional weights."""

    async def run() -> dict[str, float]:
        samples = await samples_of(trainer, seed)
        if streamed:
            early = [dataclasses.replace(s, token_weight=1.0) for s in samples[:streamed]]
            await trainer.accumulate(early)
            await trainer.rescale(samples[0].token_weight)
        await trainer.accumulate(samples[streamed:])
        return dict(await trainer.apply())

    metrics = asyncio.run(run())
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def weights(trainer: Either) -> tuple[dict[str, Tensor], str]:
    hand_over = asyncio.run(trainer.hand_over())
    assert hand_over.weights is not None
    if isinstance(hand_over.weights, WeightSource):
        with WeightReader().reading(hand_over.weights) as named:
            return {name: value.clone() for name, value in named.items()}, hand_over.probe
    return {name: value.clone() for name, value in hand_over.weights.items()}, hand_over.probe


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pids: list[int], within_s: float = END_S) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


# --- the same steps -------------------------------------------------------------------------------


def test_one_and_two_processes_take_the_steps_of_the_runs_own(folder, first, one, two):
    own = TorchTrainer(build_learner(setup_of(folder)), in_place=False)
    for trainer in (one, two):
        trainer.load(first)
    for number in range(3):
        streamed = 4 * number
        expected = step(own, number, streamed=streamed)
        assert step(one, number, streamed=streamed) == expected
        found = step(two, number, streamed=streamed)
        sums = found.keys() - {"train/padded_tokens", "train/micro_batches"}
        for name in sums:
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        assert one.version == two.version == own.version == number + 1
    (plain, probe), (of_one, probe_1), (of_two, probe_2) = map(weights, (own, one, two))
    assert probe == probe_1 and all(torch.equal(plain[n], of_one[n]) for n in plain)
    assert largest_difference(plain, of_two) < 1e-6
    started, _ = weights(TorchTrainer(build_learner(setup_of(folder)), in_place=False))
    assert largest_difference(plain, started) > 1e-3
    assert probe_2


def test_the_runs_own_trainer_can_write_weights_for_engines_in_other_processes(folder):
    plain, shared = (
        TorchTrainer(build_learner(setup_of(folder)), in_place=False, shared=shared)
        for shared in (False, True)
    )
    assert_same_weights(plain, shared, 0)
    earlier = asyncio.run(shared.hand_over()).weights
    for trainer in (plain, shared):
        step(trainer, 0)
    with WeightReader().reading(earlier):  # still what an engine that joins now must have
        pass
    assert_same_weights(plain, shared, 1)
    with pytest.raises(StaleWeightsError, match="of version 1, not 0"):
        WeightReader().reading(earlier).__enter__()


def assert_same_weights(plain: TorchTrainer, shared: TorchTrainer, version: int) -> None:
    (expected, probe), (found, found_probe) = weights(plain), weights(shared)
    assert probe == found_probe and expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert asyncio.run(shared.hand_over()).weights.version == version


@pytest.mark.parametrize("kind", ["one to two", "two to one", "two to two"])
def test_a_checkpoint_goes_on_at_any_number_of_processes(tmp_path, first, one, two, kind):
    writer, reader = {"one to two": (one, two), "two to one": (two, one)}.get(kind, (two, two))
    writer.load(first)
    step(writer, 0)
    writer.save(tmp_path / "saved")
    step(writer, 1)
    expected, probe = weights(writer)
    hashes = writer._all("hashes")[0]
    step(writer, 2)  # lets the reader begin with something else, if it is the same
    reader.load(tmp_path / "saved")
    assert reader.version == 1
    step(reader, 1)
    found, found_probe = weights(reader)
    if writer is reader:
        assert found_probe == probe and reader._all("hashes")[0] == hashes
    assert largest_difference(found, expected) < 1e-6


def test_what_is_not_finite_in_one_process_is_refused_and_all_go_on(first, two):
    two.load(first)
    step(two, 0)
    before = two._all("hashes")[0]
    samples = asyncio.run(samples_of(two, 1))
    bad = max(samples, key=lambda s: len(s.response_tokens))
    for change in (
        {"advantage": math.nan},
        {"rollout_log_probs": (-math.inf,) * len(bad.response_tokens), "advantage": -1.0},
    ):
        broken = [dataclasses.replace(s, **change) if s is bad else s for s in samples]
        with pytest.raises(NonFiniteError, match=str(bad.sample)):
            asyncio.run(two.accumulate(broken))
    with pytest.raises(TrainerError, match="without a sample"):
        asyncio.run(two.apply())
    assert two._all("hashes")[0] == before and two.version == 1
    step(two, 1)
    hashes = two._all("hashes")[0]
    two.load(first)
    step(two, 0)
    step(two, 1)
    assert two._all("hashes")[0] == hashes


def test_a_checkpoint_that_lacks_a_part_is_refused_by_all(tmp_path, first, two):
    two.load(first)
    step(two, 0)
    two.save(tmp_path / "saved")
    part = min((tmp_path / "saved" / "trainer").glob("*.safetensors"))
    part.unlink()
    with pytest.raises(TrainerError, match=part.name):
        two.load(tmp_path / "saved")
    step(two, 1)


# --- the end of a process -------------------------------------------------------------------------


def test_a_process_that_is_killed_while_idle_ends_the_trainer(folder):
    trainer = process_trainer(folder, 1)
    (pid,) = trainer.pids
    os.kill(pid, signal.SIGKILL)
    assert ended([pid])
    with pytest.raises(TrainerProcessError, match=rf"process 0 .*{pid}.*SIGKILL.*--resume"):
        step(trainer, 0)
    trainer.close()
    trainer.close()


def test_a_process_that_is_killed_at_work_ends_them_all(folder):
    trainer = process_trainer(folder, 2)
    pids = trainer.pids
    assert len(set(pids)) == 2

    async def run() -> None:
        samples = await samples_of(trainer, 0)
        work = asyncio.ensure_future(trainer.accumulate(samples * 200))
        await asyncio.sleep(0.5)
        assert not work.done()
        os.kill(pids[1], signal.SIGKILL)
        await asyncio.wait_for(work, END_S)

    with pytest.raises(TrainerProcessError, match=rf"process 1 .*{pids[1]}.*SIGKILL"):
        asyncio.run(run())
    trainer.close()
    assert ended(pids)


_RUN = """
import sys, time
from pathlib import Path
from tests.trainer.test_process_trainer import process_trainer
if __name__ == "__main__":
    trainer = process_trainer(Path(sys.argv[1]), 1)
    print(*trainer.pids, flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_its_run(folder):
    run = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout is not None
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 1 and is_alive(pids[0])
    finally:
        run.kill()
        run.wait()
    assert ended(pids)


def test_a_model_that_cannot_be_loaded_is_one_message(folder, tmp_path):
    engine = load_model(ModelConfig(path=str(folder), device="cpu")).model
    (tmp_path / "config.json").write_text("{}")
    setup = dataclasses.replace(setup_of(tmp_path))
    ranks = Ranks(1)
    with pytest.raises(ModelError, match=str(tmp_path)):
        ProcessTrainer(setup, ranks, engine.named_parameters())
    assert ended([rank.pid for rank in ranks.all])


def test_processes_that_were_never_connected_end_at_once():
    ranks = Ranks(2)
    pids = [rank.pid for rank in ranks._started]
    began = time.monotonic()
    ranks.close()
    assert ended(pids) and time.monotonic() - began < 0.8 * END_S


def test_an_error_of_one_process_alone_ends_the_others_that_wait_for_it(two, monkeypatch):
    """The last test with these processes."""
    monkeypatch.setattr(group, "GRACE_S", 1.0)
    samples = asyncio.run(samples_of(two, 0))
    pids = two.pids
    with pytest.raises(TrainerError, match="process 1 of the trainer failed: AttributeError"):
        two._ranks.call("accumulate", [(samples,), (["no sample"],)])
    assert ended(pids)
    with pytest.raises(TrainerProcessError, match=r"process [01] .*(ended|SIGKILL)"):
        step(two, 0)
