"""Stages in processes of their own, each of them whole or sharded, over both kinds of links."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.pipeline.plan.choosers import StageState
from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.connect import Connected
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.orders import Orders, Ready
from rollpacker.pipeline.stages.overseer import Arrangement
from rollpacker.pipeline.stages.peers import GroupPeers, round_trips
from rollpacker.pipeline.stages.stage import Stage
from rollpacker.pipeline.stages.times import StageTimes
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.sharding import Shards, full_tensors
from rollpacker.trainer.trainer import (
    NonFiniteError,
    PipelineConfig,
    ScoreRequest,
    TrainConfig,
    TrainSample,
)
from tests.trainer.pipeline.test_stages import case_of, of_stage, scores_of, union, updated
from tests.trainer.ranks import Ranks
from tests.trainer.test_partition import (
    CASES,
    Case,
    Partition,
    assert_equal,
    built,
    learner_of,
    step_groups,
)
from tests.trainer.tiny import samples, tiny_model

Kind = Literal["host", "direct"]


def as_rank(
    world: Shards, layers: Sequence[int], kind: Kind, function: Callable[..., Any], settings: dict
) -> Any:
    """As many pipelines side by side as there are ranks for; each has a shard of every stage."""
    count = len(layers)
    num_shards = world.size // count
    mesh = init_device_mesh("cpu", (count, num_shards), mesh_dim_names=("stage", "shard"))
    connected = Connected(mesh.mesh.T.tolist(), kind=kind, device=world.device, timeout_s=60.0)
    peers = GroupPeers(mesh.get_group("stage"))
    orders = Orders(connected.place, PipelineConfig(stages=count), peers=peers)
    stage = Stage(
        connected.place,
        layers=layers,
        peers=peers,
        executor=connected.executor,
        new_chooser=orders.new_chooser,
        links=connected,
    )
    shards = None
    if num_shards > 1:
        own = mesh["shard"]
        shards = Shards(rank=own.get_local_rank(), size=num_shards, mesh=own, device=world.device)
    try:
        return function(stage, **settings, shards=shards)
    finally:
        connected.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, timeout_s=180.0) as started:
        yield started


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_stages_in_processes_give_the_gradient_of_the_whole_model(name, num_shards, ranks):
    """Streamed or not. Shards have different numbers of micro-batches, also none."""
    case, scores = case_of(name, 2), scores_of(name, 2)
    whole, outcome = of_stage(None, case, Partition(), scores)
    draw = random.Random(f"{name} {num_shards}")
    kind = draw.choice(("host", "direct"))
    how = Partition(
        layout=draw.choice(("packed", "sorted")),
        budget=draw.choice((1, 40, 100)),
        num_early=0 if case.algorithm.needs_whole_batch else draw.choice((0, 2)),
        seed=draw.randrange(1000),
    )
    settings = {"case": case, "how": how, "scores": scores}
    answers = ranks.run(2 * num_shards, as_rank, (1, 1), kind, of_stage, settings)
    assert_equal(union([gradients for gradients, _ in answers]), whole)
    loss = sum(of_one.sums.totals["loss"] for _, of_one in answers)
    assert loss == pytest.approx(outcome.sums.totals["loss"], rel=1e-10, abs=1e-12)
    for _, of_one in answers:
        assert of_one.grad_norm == pytest.approx(outcome.grad_norm, rel=1e-10)


def asked_of(sample: TrainSample) -> ScoreRequest:
    prompt, response = sample.prompt_tokens, sample.response_tokens
    return ScoreRequest(sample=sample.sample, prompt_tokens=prompt, response_tokens=response)


def updated_over(
    stage: Stage, *, kinds: Sequence[Kind], shards: Shards | None
) -> tuple[dict[str, Tensor], list[StageTimes]]:
    """Weights and optimizer state after a step over links of each kind, and what the steps took."""
    model = tiny_model(num_layers=3)
    learner = Learner(
        model=model,
        tokenizer=None,
        pad_token_id=0,
        config=TrainConfig(
            steps=9,
            learning_rate=1e-2,
            micro_batch_tokens=40,
            updates_per_round=2,
            gradient_sync="step",  # as with stages by default
        ),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        total_steps=None,
        stage=stage,
        shards=shards,
    )
    rank, size = (0, 1) if shards is None else (shards.rank, shards.size)
    times = []
    for seed, kind in enumerate(kinds):
        learner.arrange(Arrangement(links=kind, measured=None))
        dist.barrier()  # the run's process waits for all
        own = samples(seed)[rank::size]
        learner.score([asked_of(sample) for sample in own])
        learner.accumulate(own[:3])
        learner.accumulate(own[3:])
        found = learner.apply().stage_times
        assert found is not None
        times.append(found)
    state = learner.trained["actor"].optimizer.state()
    tensors = full_tensors([*state.items(), *model.named_parameters()], shards)
    return {name: value.detach().clone() for name, value in tensors}, times


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_switch_between_links_changes_no_bit_and_each_message_is_timed(num_shards, ranks):
    """Those of sweeps with gradients alone. Both kinds are made when they are first needed."""
    runs = []
    for kinds in (("host",) * 4, ("direct", "host", "host", "direct")):
        settings = {"kinds": kinds}
        runs.append(ranks.run(2 * num_shards, as_rank, (1, 2), kinds[0], updated_over, settings))
    for (expected, _), (found, _) in zip(*runs, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for rank, (_, times) in enumerate(runs[1]):
        stage = rank // num_shards
        for one in times:
            counts = {kind: len(timed) for kind, timed in one.ops.items()}
            assert one.stage == stage and one.num_layers == stage + 1
            assert counts["F"] == counts["I"] == counts["W"] > 1
            assert len(one.from_previous) == (counts["F"] if stage else 0)
            assert len(one.from_next) == (0 if stage else counts["I"])
            assert all(size > 0 for size, _ in (*one.from_previous, *one.from_next))
            tokens = [load.tokens for load, _ in one.ops["F"]]
            assert max(tokens) <= one.peak_live_tokens <= sum(tokens)
            spent_s = math.fsum(seconds for timed in one.ops.values() for _, seconds in timed)
            assert one.busy_s > spent_s > 0  # the forward passes of scores are not among these
            assert one.waiting_s > 0


def test_bfloat16_gradients_of_shards_are_summed_in_full_precision(ranks):
    """A row is a micro-batch, so that the sums alone can differ. bfloat16 sums would, by 2^-8."""
    settings = {"num_updates": 1, "budget": 1}
    whole = updated(None, **settings)
    answers = ranks.run(4, as_rank, (1, 2), "host", updated, settings)
    found = {name: value for part in answers for name, value in part.items()}
    for name, value in whole.items():
        if name.startswith("exp_avg."):
            bound = 1e-4 * value.abs().max().item()
            torch.testing.assert_close(found[name], value, rtol=0, atol=bound, msg=name)


def refused(stage: Stage, case: Case, broken: int, shards: Shards) -> str:
    """What is said of a step with a loss that is not finite, streamed in two parts; the next step
    is a sound one."""
    learner = learner_of(case, Partition(layout="packed", budget=1), shards, stage=stage)
    samples = built(step_groups(), case, {})[0]
    one = samples[broken]
    nan = (math.nan,) * len(one.response_tokens)
    spoilt = [*samples]
    spoilt[broken] = dataclasses.replace(one, rollout_log_probs=nan)
    own = (slice(0, 9), slice(9, 12))[shards.rank]
    learner.accumulate(spoilt[own][:2])
    learner.rescale(2.0)
    learner.accumulate(spoilt[own][2:])
    with pytest.raises(NonFiniteError) as error:
        learner.apply()
    learner.accumulate(samples[own])
    assert math.isfinite(learner.apply().grad_norm)
    return str(error.value)


@pytest.mark.parametrize("broken", [8, 9])
def test_a_loss_that_is_not_finite_is_found_though_shards_have_unequal_work(broken, ranks):
    """Nine micro-batches here and three there: the ninth of the one, or the first of the other."""
    case = case_of("grpo", 2)
    said = ranks.run(4, as_rank, (1, 1), "host", refused, {"case": case, "broken": broken})
    sample = built(step_groups(), case, {})[0][broken].sample
    naming = [text for text in said if f"samples: {sample}" in text]
    assert naming == [said[2 + (broken == 9)]]  # the last stage's shard that has it
    assert sum("not finite in another process" in text for text in said) == 3


def trips(world: Shards) -> tuple[tuple[int, float], ...]:
    return round_trips(world.own_replica)


def test_every_two_shards_are_timed_once(ranks):
    answers = ranks.run(3, trips)
    assert [[other for other, _ in found] for found in answers] == [[1, 2], [2], []]
    assert all(0 < seconds < 60 for found in answers for _, seconds in found)


def test_live_tokens_are_capped():
    """auto: two of the largest micro-batches for each stage from this one on."""
    first, last = (Place(index=index, count=2) for index in range(2))
    for place, expected in ((first, 4), (last, 2)):
        state = StageState(stage=0, num_stages=2)
        state.add([10] * 9)
        state.close()
        chooser = Ready(place, PipelineConfig(stages=2))
        chooser.add([Load.of([10])] * 9)
        while (op := chooser.choose(state)) is not None:
            state.done(op)
        assert state.num_f == expected
    with pytest.raises(ValueError, match="live_tokens=9 is less than a micro-batch of 10 tokens"):
        Ready(first, PipelineConfig(stages=2, live_tokens=9)).add([Load.of([3]), Load.of([10])])
