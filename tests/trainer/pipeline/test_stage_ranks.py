"""Stages in processes of their own, each of them whole or sharded, over both kinds of links."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rollpacker.core.pipeline import StageState
from rollpacker.trainer.pipeline.connect import Connected, new_chooser
from rollpacker.trainer.pipeline.cut import Place
from rollpacker.trainer.pipeline.peers import GroupPeers
from rollpacker.trainer.pipeline.stage import Stage
from rollpacker.trainer.sharding import Shards
from rollpacker.trainer.trainer import PipelineConfig
from tests.trainer.pipeline.test_stages import case_of, of_stage, scores_of, union, updated
from tests.trainer.ranks import Ranks
from tests.trainer.test_partition import CASES, Partition, assert_equal

Kind = Literal["host", "direct"]


def as_rank(
    world: Shards, layers: Sequence[int], kind: Kind, function: Callable[..., Any], settings: dict
) -> Any:
    """As many pipelines side by side as there are ranks for; each has a shard of every stage."""
    count = len(layers)
    num_shards = world.size // count
    mesh = init_device_mesh("cpu", (count, num_shards), mesh_dim_names=("stage", "shard"))
    connected = Connected(mesh.mesh.T.tolist(), kind=kind, device=world.device, timeout_s=60.0)
    stage = Stage(
        connected.place,
        layers=layers,
        peers=GroupPeers(mesh.get_group("stage")),
        executor=connected.executor,
        new_chooser=partial(new_chooser, connected.place, PipelineConfig(stages=count)),
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


def test_live_tokens_are_capped():
    """auto: two of the largest micro-batches for each stage from this one on."""
    first, last = (Place(index=index, count=2) for index in range(2))
    for place, expected in ((first, 4), (last, 2)):
        state = StageState(stage=0, num_stages=2)
        state.add([10] * 9)
        state.close()
        chooser = new_chooser(place, PipelineConfig(stages=2), [10] * 9)
        while (op := chooser.choose(state)) is not None:
            state.done(op)
        assert state.num_f == expected
    with pytest.raises(ValueError, match="live_tokens=9 is less than a micro-batch of 10 tokens"):
        new_chooser(first, PipelineConfig(stages=2, live_tokens=9), [3, 10])
