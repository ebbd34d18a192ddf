"""What the benchmark of real stages compares computes the same, and differs in what it should."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.pipeline_real import ARMS, COMPUTE, PACKED, QUICK, SLOW, StageProcess
from rollpacker.pipeline.links.host_receiver import LOOPBACK
from rollpacker.trainer.sharding import Shards
from tests.trainer.ranks import Ranks

Answers = Mapping[tuple[str, str], list[dict[str, Any]]]
"""By part and arm, of each stage."""


def as_rank(shards: Shards, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """A step of every arm, also of those that have a slow link elsewhere."""
    own, found = StageProcess(QUICK, LOOPBACK), {}
    for part, arms in ARMS.items():
        for how in arms:
            if how.stages or shards.rank == 0:
                path = folder / f"{part} {how.name} {shards.rank}.pt"
                found[part, how.name] = own.step(part, how, path) | {"gradients": path}
    own.close()
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    with Ranks(2, timeout_s=180.0) as ranks:
        first, last = ranks.run(2, as_rank, tmp_path_factory.mktemp("gradients"))
    return {arm: [one[arm] for one in (first, last) if arm in one] for arm in first}


def gradient_of(of_stages: list[dict[str, Any]]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for answer in of_stages:
        whole |= torch.load(answer["gradients"], weights_only=True)
    return whole


@pytest.mark.parametrize("part", ARMS)
def test_all_arms_have_the_same_gradient(part: str, answers: Answers) -> None:
    first, *others = [gradient_of(answers[part, how.name]) for how in ARMS[part]]
    bound = 1e-5 * max(gradient.abs().max().item() for gradient in first.values())
    assert bound > 0
    for other in others:
        assert first.keys() == other.keys()
        for name, gradient in first.items():
            torch.testing.assert_close(other[name], gradient, rtol=0, atol=bound, msg=name)


def test_micro_batches_have_one_shape_where_they_should(answers: Answers) -> None:
    shapes = {how.name: answers[PACKED, how.name][0]["shapes"] for how in ARMS[PACKED]}
    largest = 2 * QUICK.micro_batch_tokens
    assert len(shapes["packed"]) == len(shapes["padded"]) > len(shapes["refilled"])
    assert max(shapes["packed"]) == largest and min(shapes["packed"]) < largest / 2
    assert set(shapes["padded"]) == set(shapes["refilled"]) == {largest}


def test_only_blocking_sends_are_waited_for(answers: Answers) -> None:
    blocking, ready = (answers[SLOW, how.name] for how in ARMS[SLOW])
    assert all(len(answer["waited_s"]) == len(answer["shapes"]) for answer in blocking)
    assert all(answer["waited_s"] == [] for answer in ready)


def test_one_process_has_the_whole_model(answers: Answers) -> None:
    whole, staged = (answers[COMPUTE, how.name] for how in ARMS[COMPUTE])
    assert len(whole) == 1 and whole[0]["ops"] == []
    assert whole[0]["parameters"] == sum(answer["parameters"] for answer in staged)
    assert all(len(answer["ops"]) == 3 * len(answer["shapes"]) for answer in staged)
