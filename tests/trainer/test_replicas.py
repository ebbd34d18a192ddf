"""Several whole copies of a model, each of which computes gradients alone until the end of a step.

What is compared with is one process that does all of it, in float64.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.resume import write_model
from rollpacker import algo
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.setup import build_learner
from rollpacker.trainer.sharding import Shards, any_of_replica, any_rank, full_tensors, shard
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.trainer.trainer import NonFiniteError, TrainConfig, TrainerError
from rollpacker.weights.host_store import HostStore, local
from tests.trainer.ranks import Ranks
from tests.trainer.test_checkpoint import assert_equal, load_all, save_after_a_step
from tests.trainer.test_learner import GRPO, Faulty, learner_of, samples_for, weights
from tests.trainer.test_process_trainer import process_trainer, samples_of, setup_of, step
from tests.trainer.test_process_trainer import weights as handed_over
from tests.trainer.test_sharding import (
    accumulate,
    build,
    dealt,
    loss_of,
    plain_gradients,
    relative_difference,
)
from tests.trainer.tiny import largest_difference

SYNCS = pytest.mark.parametrize("gradient_sync", ["step", "micro-batch"])
MESHES = pytest.mark.parametrize(("size", "replicas"), [(2, 2), (4, 2), (4, 4)])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


# --- gradients ------------------------------------------------------------------------------------


def steps(shards: Shards, works: Sequence[Sequence[int]], gradient_sync: str) -> list[Any]:
    """The gradients of each step; `works` has the micro-batches of each rank."""
    scorer = build()
    gradients = shard(scorer, shards, param_dtype=None, gradient_sync=gradient_sync)
    found = []
    for work in works:
        accumulate(scorer, gradients, dealt(work, shards.size)[shards.rank], shards)
        named = [(n, p.grad) for n, p in scorer.model.named_parameters()]
        found.append({n: value.clone() for n, value in full_tensors(named, shards)})
        gradients.forget()
    return found


@MESHES
@SYNCS
def test_uneven_work_gives_the_gradient_of_one_process(ranks, size, replicas, gradient_sync):
    """Five against two, against none, and none against three, one step after the other."""
    works = {
        2: [(5, 2), (5, 0), (0, 3)],
        4: [(3, 2, 1, 1), (5, 4, 0, 0), (0, 0, 1, 2)],
    }[size]
    answers = ranks.run(size, steps, works, gradient_sync, replicas=replicas)
    for work, found in zip(works, answers[0], strict=True):
        assert relative_difference(found, plain_gradients(work)) < 1e-12
    assert all(found == {} for answer in answers[1:] for found in answer)


def one_after_the_other(shards: Shards, gradient_sync: str) -> dict[str, Tensor]:
    """The second replica begins when the first one is done."""
    scorer = build()
    gradients = shard(scorer, shards, param_dtype=None, gradient_sync=gradient_sync)
    first = shards.rank < shards.size // 2
    for is_first in (True, False):
        if first == is_first:
            for index in dealt((2, 1, 1, 3), shards.size)[shards.rank]:
                loss_of(scorer, index).backward()
            for _ in range({0: 0, 1: 1, 2: 2, 3: 0}[shards.rank]):  # as many as the other has more
                (loss_of(scorer, 0) * 0).backward()
            assert not any_of_replica(False, shards)
        dist.barrier()
    assert all(p.grad is None for p in scorer.parameters())
    gradients.finish(lambda: (loss_of(scorer, 0) * 0).backward())
    return dict(full_tensors([(n, p.grad) for n, p in scorer.model.named_parameters()], shards))


@SYNCS
def test_a_replica_waits_for_no_other_before_the_end(ranks, gradient_sync):
    found = ranks.run(4, one_after_the_other, gradient_sync, replicas=2)[0]
    assert relative_difference(found, plain_gradients((2, 1, 1, 3))) < 1e-12


def dropped(shards: Shards, gradient_sync: str) -> tuple[list[list[str]], dict[str, Tensor]]:
    scorer = build()
    gradients = shard(scorer, shards, param_dtype=None, gradient_sync=gradient_sync)
    if shards.rank == 0:
        (loss_of(scorer, 1) * math.nan).backward()
    bad = [gradients.non_finite()]
    gradients.forget()
    bad.append(gradients.non_finite())
    accumulate(scorer, gradients, [shards.rank], shards)
    named = [(n, p.grad) for n, p in scorer.model.named_parameters()]
    return bad, dict(full_tensors(named, shards))


@SYNCS
def test_what_a_replica_has_summed_is_looked_at_and_dropped(ranks, gradient_sync):
    answers = ranks.run(2, dropped, gradient_sync, replicas=2)
    (spoilt, gone), found = answers[0]
    assert len(spoilt) > 1 and gone == [] and answers[1][0] == [[], []]
    assert relative_difference(found, plain_gradients((2,))) < 1e-12


def asked(shards: Shards) -> tuple[bool, bool, int]:
    mine = shards.rank == 1
    return any_of_replica(mine, shards), any_rank(mine, shards), shards.replicas


def test_small_numbers_are_those_of_a_replica_or_of_all(ranks):
    first, second = (True, True, 2), (False, True, 2)
    assert ranks.run(4, asked, replicas=2) == [first, first, second, second]


# --- faults ---------------------------------------------------------------------------------------


def step_with_a_fault(shards: Shards | None, gradient_sync: str, faulty: bool) -> Any:
    """A step begun by the last replica alone, whose second call has a passing fault."""
    learner = learner_of(shards=shards, gradient_sync=gradient_sync, micro_batch_tokens=1)
    batch = samples_for(learner, GRPO, 0)
    is_last = shards is None or shards.rank == shards.size - 1
    early = [dataclasses.replace(s, token_weight=s.token_weight * 8) for s in batch[:5]]
    if is_last:
        learner.accumulate(early)
    learner.rescale(1 / 8)
    original = algo.token_loss
    if faulty and is_last:
        algo.token_loss = Faulty(calls=[1])
    if is_last:
        learner.accumulate(batch[5:8])
    algo.token_loss = original
    if shards is None:
        learner.accumulate(batch[8:])
    else:
        learner.accumulate(batch[8:][shards.rank :: shards.size])
    recomputed = learner.apply().sums.recomputed_micro_batches
    return weights(learner), recomputed


@SYNCS
def test_a_replica_computes_alone_again_what_was_begun_provisionally(ranks, gradient_sync):
    expected, _ = step_with_a_fault(None, gradient_sync, False)
    answers = ranks.run(2, step_with_a_fault, gradient_sync, True, replicas=2)
    assert answers[1][1] == 8 and answers[0][1] == 0
    for name, value in expected.items():
        torch.testing.assert_close(answers[0][0][name], value, rtol=1e-8, atol=1e-10)


def gradient_that_stays_bad(shards: Shards, gradient_sync: str) -> tuple[bool, str, bool]:
    """In the last replica alone; whether nothing was applied, and whether the next step is well."""
    learner = learner_of(shards=shards, gradient_sync=gradient_sync, micro_batch_tokens=1)
    batch = samples_for(learner, GRPO, 0)[shards.rank :: shards.size]
    learner.accumulate(batch)
    learner.apply()
    before = learner.state_hashes()
    hooked = learner.model.model.layers[1].mlp.register_full_backward_hook(
        lambda _module, gradients, _output: tuple(g * math.nan for g in gradients)
    )
    if shards.rank == 0:
        hooked.remove()
    learner.accumulate(batch[:1])
    if shards.rank == 1:  # a call more than the other
        learner.accumulate(batch[1:])
    try:
        learner.apply()
        message = "it was not refused"
    except NonFiniteError as error:
        message = str(error)
    hooked.remove()
    unchanged = learner.state_hashes() == before and learner.version == 1
    learner.accumulate(batch)
    return unchanged, message, math.isfinite(learner.apply().grad_norm)


@SYNCS
def test_a_gradient_of_one_replica_that_is_not_finite_is_refused_by_all(ranks, gradient_sync):
    answers = ranks.run(2, gradient_that_stays_bad, gradient_sync, replicas=2)
    assert all(unchanged and well for unchanged, _, well in answers)
    assert "in another replica" in answers[0][1]
    assert "the gradient is not finite, first in" in answers[1][1] and "train/0/" in answers[1][1]


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((4, 2), (2, 1)), ((2, 1), (4, 2)), ((4, 2), (2, 2))],
)
def test_any_mesh_reads_what_another_wrote(ranks, tmp_path, before, after):
    saved = ranks.run(before[0], save_after_a_step, tmp_path, True, replicas=before[1])[0]
    found = ranks.run(after[0], load_all, tmp_path, True, replicas=after[1])[0]
    assert_equal(found, saved)


def test_replicas_must_divide_the_processes():
    for settings in ({"processes": 3, "replicas": 2}, {"replicas": 2}, {"replicas": 0}):
        with pytest.raises(ValueError, match=r"replicas \(\d\) must divide train.processes"):
            TrainConfig(steps=1, **settings)
    assert TrainConfig(steps=1, processes=4, replicas=2).replicas == 2


# --- in processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[ProcessTrainer]:
    trainer = process_trainer(folder, 2, replicas=2)
    yield trainer
    trainer.close()


@pytest.fixture
def own(folder: Path) -> TorchTrainer:
    return TorchTrainer(build_learner(setup_of(folder)), in_place=False)


def begun_by_one(trainer: ProcessTrainer | TorchTrainer, seed: int) -> dict[str, float]:
    """A step that the last replica begins, in portions and with provisional weights."""

    async def run() -> dict[str, float]:
        samples = await samples_of(trainer, seed)
        for part in (samples[:3], samples[3:5]):
            early = [dataclasses.replace(s, token_weight=1.0) for s in part]
            await trainer.accumulate(early, replicas=[1])
        await trainer.rescale(samples[0].token_weight)
        await trainer.accumulate(samples[5:])
        return dict(await trainer.apply())

    metrics = asyncio.run(run())
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_steps_begun_by_one_replica_are_those_of_one_process(folder, own, two, tmp_path):
    """Before and after both have gone on from the checkpoint of the other."""
    own.save(tmp_path / "first")
    two.load(tmp_path / "first")
    for number in range(2):
        expected, found = begun_by_one(own, number), begun_by_one(two, number)
        for name in found.keys() - {"train/padded_tokens", "train/micro_batches"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert_same_weights(own, two)
    own.save(tmp_path / "of one")
    two.save(tmp_path / "of two")
    own.load(tmp_path / "of two")
    two.load(tmp_path / "of one")
    assert own.version == two.version == 2
    step(own, 2)
    step(two, 2)
    assert_same_weights(own, two)


def assert_same_weights(one: TorchTrainer, other: ProcessTrainer) -> None:
    assert largest_difference(handed_over(one)[0], handed_over(other)[0]) < 1e-6


def test_some_replicas_can_be_asked_for_scores(two, own, tmp_path):
    own.save(tmp_path)
    two.load(tmp_path)
    samples = asyncio.run(samples_of(own, 0))  # these have the shape of requests
    expected = asyncio.run(own.score(samples))
    for replicas in ([0], [1], None):
        found = asyncio.run(two.score(samples, replicas=replicas))
        for one, other in zip(found, expected, strict=True):
            assert len(other.ref_log_probs) > 0
            assert one.ref_log_probs == pytest.approx(other.ref_log_probs, abs=1e-5)


def test_what_one_replica_refuses_all_forget(two, own, tmp_path):
    own.save(tmp_path)
    two.load(tmp_path)
    samples = asyncio.run(samples_of(two, 1))
    asyncio.run(two.accumulate(samples[:4], replicas=[0]))
    broken = [dataclasses.replace(samples[4], advantage=math.nan)]
    with pytest.raises(NonFiniteError, match=str(samples[4].sample)):
        asyncio.run(two.accumulate(broken, replicas=[1]))
    with pytest.raises(TrainerError, match="without a sample"):
        asyncio.run(two.apply())
    step(two, 1)
    step(own, 1)
    assert_same_weights(own, two)


# --- devices that are lent to an engine -----------------------------------------------------------


def two_steps(shards: Shards, gradient_sync: str, lets_go: bool) -> list[Any]:
    """Gradient norms of two steps, and the weights after them. The first of several replicas begins
    each alone.
    `lets_go`: between any two calls all is in host memory, which plays the device's part."""
    learner = learner_of(shards=shards, gradient_sync=gradient_sync, micro_batch_tokens=16)
    learner._host = HostStore("cpu")

    def between() -> None:
        if lets_go:
            learner.offload()
            moved = [p for m in learner._modules for p in m.parameters()]
            moved += [t for one in learner.trained.values() for t in one.tensors()]
            assert not any(local(tensor).untyped_storage().nbytes() for tensor in moved)
            learner.reload()

    norms = []
    for number in range(2):
        batch = samples_for(learner, GRPO, number)[shards.rank :: shards.size]
        if shards.replicas == 1 or 2 * shards.rank < shards.size:
            learner.accumulate(batch[:1])
            batch = batch[1:]
        between()
        learner.accumulate(batch)
        between()
        norms.append(learner.apply().grad_norm)
        between()
    if lets_go:
        learner.offload()
    with learner._host.readable():  # as for a checkpoint of a parked trainer
        return [norms, dict(learner.weights()), learner.state_hashes()]


@SYNCS
@pytest.mark.parametrize(("size", "replicas"), [(2, 2), (2, 1)])
def test_letting_go_of_devices_changes_no_bit(ranks, size, replicas, gradient_sync):
    kept, lent = (
        ranks.run(size, two_steps, gradient_sync, lets_go, replicas=replicas)[0]
        for lets_go in (False, True)
    )
    assert kept[0] == lent[0]
    assert kept[1].keys() == lent[1].keys()
    assert all(torch.equal(kept[1][name], lent[1][name]) for name in kept[1])
    assert kept[2] == lent[2] and kept[2].keys() == {"weights", "optimizer"}
