"""A machine of eight made-up GPUs: which of them each process of a run is given."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.placement.roles import Host, PlacementError
from rollpacker.run.parts import hosts, placement
from rollpacker.run.parts.hosts import Hosts
from rollpacker.run.parts.this_host import THIS_HOST
from rollpacker.workers.host import ThisHost, variables_of

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
NODE = Host(name=THIS_HOST, cores=64, memory_bytes=1000 * GIB, gpu_bytes=(80 * GIB,) * 8)
SPLIT = ("rollout.engines=4", "train.processes=4")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that the run's own process was told to compute on, in order."""
    chosen: list[int] = []
    monkeypatch.setattr(placement, "this_host", lambda kind: NODE)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in hosts.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    return chosen


def opened(*overrides: str, lines: Mapping[str, object] | None = None) -> tuple[RunConfig, Hosts]:
    """The quickstart on CUDA with these settings, and what becomes of the machine."""
    given = ["model.device=cuda", "model.path=nowhere", "rollout.engine.name=vllm"]
    if lines is not None:
        given.append(f"placement={json.dumps(lines)}")
    config = load_config(ROOT / "configs/quickstart.yaml", [*given, *overrides], RunConfig)
    return hosts.open_hosts(config)


def seen(environments: Sequence[Mapping[str, str]]) -> list[str]:
    """What a child that this host starts with each of these environments says that it sees."""
    return [said_by_child(variables_of(ThisHost(), one)) for one in environments]


def said_by_child(variables: Mapping[str, str]) -> str:
    """The GPUs that a child with these environment variables, and no others, says that it sees."""
    say = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    command = [sys.executable, "-S", "-c", say]
    return subprocess.run(command, env=variables, capture_output=True, text=True).stdout.strip()


def engines_see(config: RunConfig, found: Hosts) -> list[str]:
    degree = config.parallelism_planner.initial
    return seen([found.of_engine(n, degree)[1] for n in range(config.rollout.engines)])


def ranks_see(found: Hosts) -> list[str]:
    places = found.of_ranks()
    assert [place.local_rank for place in places] == [0] * len(places)
    assert {p.environment["PYTORCH_ALLOC_CONF"] for p in places} == {"expandable_segments:True"}
    return seen([place.environment for place in places])


@pytest.mark.parametrize(("engines", "ranks"), [(4, 4), (6, 2), (1, 7)])
def test_engines_have_the_first_gpus_and_ranks_those_after(
    own: list[int], engines: int, ranks: int
) -> None:
    config, found = opened(f"rollout.engines={engines}", f"train.processes={ranks}")
    assert engines_see(config, found) == [str(n) for n in range(engines)]
    assert ranks_see(found) == [str(n) for n in range(engines, engines + ranks)]
    assert own == ([0] if engines == 1 else [])  # one engine is in the run's process


def test_lines_may_say_otherwise(own: list[int]) -> None:
    lines = {"rollout": {"devices": "4-7", "per_engine": 2}, "train": {"devices": "0-3"}}
    config, found = opened(lines=lines)
    assert engines_see(config, found) == ["4,5", "6,7"]
    assert ranks_see(found) == ["0", "1", "2", "3"]


def test_a_trainer_in_the_runs_process_has_a_gpu_of_its_own(own: list[int]) -> None:
    config, found = opened("rollout.engines=3")
    assert engines_see(config, found) == ["0", "1", "2"]
    assert own == [3]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_engines_and_ranks_by_turns_have_the_same(own: list[int], degree: int) -> None:
    config, found = opened(
        f"rollout.engines={8 // degree}",
        f"parallelism_planner={{initial: {degree}, degrees: [{degree}]}}",
        "train.processes=8",
        "train.colocate=true",
    )
    numbers = [str(n) for n in range(8)]
    assert ",".join(engines_see(config, found)).split(",") == numbers == ranks_see(found)
    assert own == []


@pytest.mark.parametrize("degree", [2, 4])
def test_an_engine_of_several_gpus_sees_them_all(own: list[int], degree: int) -> None:
    config, found = opened(
        f"rollout.engines={4 // degree}",
        f"parallelism_planner={{initial: {degree}, degrees: [{degree}]}}",
        "train.processes=4",
    )
    assert ",".join(engines_see(config, found)) == "0,1,2,3"
    assert [len(one.split(",")) for one in engines_see(config, found)] == [degree] * (4 // degree)
    assert ranks_see(found) == ["4", "5", "6", "7"]


def test_of_a_parents_gpus_alone(own: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"GPU-{letter}" for letter in "hgfedcba"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ", ".join(names))
    config, found = opened(*SPLIT)
    assert engines_see(config, found) == names[:4]
    assert ranks_see(found) == names[4:]


def test_too_few_gpus_are_refused_before_anything_starts(own: list[int]) -> None:
    with pytest.raises(PlacementError, match=r"at least 10 devices, and there are 8 on this host"):
        opened("rollout.engines=6", "train.processes=4")
    with pytest.raises(PlacementError, match=r"both have 1 device, 0, and nothing says that they"):
        opened(lines={"rollout": {"devices": "0-3"}, "train": {"devices": "0-0"}})


JUDGED = {
    "rollout": {"devices": "0-3"},
    "train": {"devices": "4-5"},
    "reward": {"devices": "6-7", "memory_gib": 20},
}
MODEL = 'rewards=[{"function": "reward_model", "arguments": {"model_path": "nowhere"}}]'


def judges_see(found: Hosts) -> list[str]:
    return [said_by_child(one) for one in found.of_reward_models()]


def test_reward_models_have_gpus_of_their_own(
    own: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, found = opened(MODEL, lines=JUDGED)
    assert engines_see(config, found) == ["0", "1", "2", "3"] and ranks_see(found) == ["4", "5"]
    assert judges_see(found) == ["6", "7"]
    _, without = opened(MODEL, *SPLIT)
    assert judges_see(without) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert judges_see(opened(MODEL, lines=JUDGED)[1]) == ["1", "0"]


def test_reward_models_may_have_those_of_another_role_and_stay_there(own: list[int]) -> None:
    """No turn takes a reward model off its device, so that its memory counts beside the other's."""
    beside = JUDGED | {"colocate": ["train", "reward"], "reward": {"devices": "4-5"}}
    assert judges_see(opened(MODEL, lines=beside)[1]) == ["4", "5"]
    full = beside | {"train": {"devices": "4-5", "memory_gib": 61}}
    full["reward"] = {"devices": "4-5", "memory_gib": 20}
    with pytest.raises(PlacementError, match=r"80.0 GiB, while what would be there takes 81.0 GiB"):
        opened(MODEL, lines=full)


def test_a_reward_model_that_is_in_the_way_is_refused(own: list[int]) -> None:
    overlap = JUDGED | {"reward": {"devices": "5-6"}}
    with pytest.raises(
        PlacementError, match=r"placement.train .* and placement.reward .* 1 device"
    ):
        opened(MODEL, lines=overlap)
    with pytest.raises(PlacementError, match=r"device 6 on this host has 80.0 GiB, .*90.0 GiB"):
        opened(MODEL, lines=JUDGED | {"reward": {"devices": "6-7", "memory_gib": 90}})
    with pytest.raises(
        ValueError, match=r"has devices, and no reward is a reward_model that could be"
    ):
        opened(lines=JUDGED)
    for key, message in (
        ("reference", r"placement.reference .* Allowed: .train."),
        ("referense", r'placement.referense .* no known key. Did you mean "reference"\?'),
        ("criticc", r'Did you mean "critic"\?'),
    ):
        with pytest.raises(ValueError, match=message):
            opened(MODEL, lines=JUDGED | {key: {"devices": 1}})


def test_torchruns_ranks_have_the_first(own: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the GPU of its number by itself."""
    monkeypatch.setattr(placement, "_is_under_torchrun", lambda: True)
    config, found = opened(*SPLIT)
    assert engines_see(config, found) == ["4", "5", "6", "7"]
    lines = {"rollout": {"devices": "0-3"}, "train": {"devices": "4-7"}}
    with pytest.raises(ValueError, match=re.escape("and torchrun puts the trainer's processes on")):
        opened(lines=lines)


def test_a_run_that_does_all_itself_is_not_placed(own: list[int]) -> None:
    _, found = opened()
    assert found.plan is None and own == []
