"""A job as a cluster plans with it, of a run's log."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from rollpacker.cluster.decide.job import ClusterJob, Iteration, Phase
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.profile.job_profile import (
    GIB,
    MAX_ITERATIONS,
    job_of_run,
    needs_of,
    read_profile,
    rounds_of,
    without_last,
    without_warm_up,
)
from rollpacker.config.load import load_config, save_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Commit, Leave
from rollpacker.core.records import POOL_SWITCH, Entry, Note, Record, encode
from tests.report.costed_run import CostedRun
from tests.report.pooled_log import simulated, with_waits

ROOT = Path(__file__).parents[2]


def iteration(step: int, seconds: float = 10.0, kind: str = "plain", **more: float) -> Iteration:
    settings = {"rollout_s": seconds, "between_s": 1.0, "train_s": seconds, "after_s": 0.5} | more
    return Iteration(step=step, kind=kind, **settings)


def run_folder(folder: Path, entries: Sequence[Entry], *overrides: str, weights: int = 0) -> Path:
    """As a run leaves it."""
    folder.mkdir(parents=True)
    config = load_config(ROOT / "configs/quickstart.yaml", overrides, RunConfig)
    save_config(config, folder / "config.yaml")
    (folder / "events.jsonl").write_text("".join(f"{encode(one)}\n" for one in entries))
    for step in (10, 9) if weights else ():
        for part, size in (("model", weights), ("trainer", 3 * weights)):
            place = folder / f"checkpoints/step_{step:06d}/{part}"
            place.mkdir(parents=True)
            (place / "all.safetensors").write_bytes(b"0" * (size if step == 10 else 1))
    return folder


def costed(steps: int) -> list[Entry]:
    run = CostedRun(lambda n, cached: 1e-3)
    run.run(steps)
    return run.entries


# -- iterations --------------------------------------------------------------------


def test_warm_up_is_left_out_and_a_long_round_is_not() -> None:
    slow = [iteration(1, 60.0), iteration(2, 18.0, train_s=10.0)]
    usual = [iteration(n, 10.0 + n % 3) for n in range(3, 12)]
    assert without_warm_up([*slow, *usual]) == usual
    long = iteration(1, 60.0, "long")
    assert without_warm_up([long, *usual]) == [long, *usual], "no other of its kind is known"
    assert without_warm_up([*usual, slow[0]]) == [*usual, slow[0]], "it comes later"
    ordinary_first = [usual[0], slow[0], *usual[1:]]
    assert without_warm_up(ordinary_first) == ordinary_first
    assert len(without_warm_up([iteration(n, 1000.0 / n) for n in range(1, 9)])) == 5
    many = [iteration(n) for n in range(2 * MAX_ITERATIONS)]
    assert without_warm_up(many) == many[-MAX_ITERATIONS:]


def test_an_empty_step_is_a_kind_of_its_own_and_not_the_end_of_the_warm_up() -> None:
    empty = iteration(2, 4.0, "empty", train_s=0.0, after_s=0.25)
    plain, other = rounds_of([iteration(1), empty, iteration(3), empty, iteration(5)])
    assert (plain.kind, plain.rollout_s) == ("plain", (10.0, 10.0, 10.0))
    assert (other.kind, other.share, other.mean) == ("empty", 0.4, (4.0, 1.0, 1e-6, 0.25))
    usual = [iteration(n) for n in range(3, 9)]
    assert without_warm_up([empty, iteration(2, 60.0), *usual]) == usual
    assert without_warm_up([empty, *usual]) == [empty, *usual]


def test_the_last_step_of_a_run_is_like_no_other(tmp_path: Path) -> None:
    entries = costed(5)
    at, last = next(
        (number, one)
        for number, one in enumerate(entries)
        if isinstance(one, Record) and any(c == Commit(step=5, last=False) for c in one.commands)
    )
    entries[at] = structs.replace(last, commands=(Commit(step=5, last=True),))
    ended = read_profile(run_folder(tmp_path / "ended", entries))
    going_on = read_profile(run_folder(tmp_path / "going_on", costed(5)))
    assert [one.kind for one in ended.rounds] == ["plain"]
    assert [one.kind for one in going_on.rounds] == ["plain", "plain+evaluation"]
    assert (ended.num_iterations, going_on.num_iterations) == (4, 5)
    few = [iteration(1), iteration(2), iteration(3)]
    assert without_last(few, 3) == few
    assert without_last([*few, iteration(4)], 4) == few


def test_rounds_are_told_by_kind() -> None:
    found = rounds_of(
        [iteration(1), iteration(2, 12.0, between_s=3.0), iteration(3, 40.0, "long"), iteration(4)]
    )
    plain, long = found
    assert (plain.kind, plain.share, plain.rollout_s) == ("plain", 0.75, (10.0, 10.0, 12.0))
    assert plain.between_s == pytest.approx(5 / 3)
    assert (long.kind, long.share, long.mean) == ("long", 0.25, (40.0, 1.0, 40.0, 0.5))


def test_memory_is_spread_over_nodes_and_switches_over_devices() -> None:
    needs = needs_of(
        model_bytes=16e9,
        trainer_bytes=112e9,
        devices={"rollout": 16, "train": 8},
        num_copies=4,
        pools=[pool("cheap", "rollout", 8), pool("fast", "train", 8)],
    )
    assert needs["rollout_memory_gib"] == pytest.approx(32e9 / GIB)
    assert needs["train_memory_gib"] == pytest.approx(112e9 / GIB)
    assert needs["rollout_switch_s"] == pytest.approx(2 * 4 / 25)
    assert needs["train_switch_s"] == pytest.approx(2 * 14 / 10)
    assert (needs["rollout_devices"], needs["train_devices"], needs["model_gb"]) == (16, 8, 16)


def pool(name: str, phase: Phase, devices_per_node: int, nodes: int = 9) -> Pool:
    kind = {"name": name, "phase": phase, "price_per_device_h": 1.0, "host_memory_gib": 100.0}
    return Pool(nodes=nodes, devices_per_node=devices_per_node, **kind)


def test_each_phase_has_nodes_of_its_own() -> None:
    """The first pool's say nothing of the other phase's; a job may ask for more than a node has."""

    def gib(*pools: Pool, devices: int = 16) -> tuple[float, float]:
        asked: dict[Phase, int] = {"rollout": devices, "train": devices}
        sizes = {"model_bytes": 16 * GIB, "trainer_bytes": 96 * GIB}
        needs = needs_of(**sizes, devices=asked, num_copies=4, pools=pools)
        return needs["rollout_memory_gib"], needs["train_memory_gib"]

    cheap, fast = pool("cheap", "rollout", 4), pool("fast", "train", 8)
    assert gib(cheap, fast) == gib(fast, cheap) == (16, 48)
    assert gib(cheap, fast, devices=4) == (64, 96)
    large = pool("large", "train", 16, nodes=1)
    assert gib(cheap, fast, large) == (16, 96), "where each of its nodes keeps the most"
    assert gib(cheap, fast, large, devices=32) == (8, 24), "the large one has not as many"
    assert gib() == (32, 48)


# -- folders -----------------------------------------------------------------------


def test_a_folder_becomes_a_job(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run",
        costed(8),
        *("rollout.engines=2", "train.processes=2", "train.steps=40"),
        weights=1000,
    )
    job = job_of_run(folder, name="mine", slo=1.3, priority=2, owner="alice")
    assert isinstance(job, ClusterJob)
    assert (job.name, job.slo, job.steps, job.priority, job.owner) == ("mine", 1.3, 40, 2, "alice")
    assert (job.rollout_devices, job.train_devices) == (2, 2)
    assert job.model_gb == pytest.approx(1e-6)
    assert job.rollout_memory_gib == pytest.approx(2000 / GIB)
    assert job.train_memory_gib == pytest.approx(3000 / GIB), "the newest checkpoint's"
    assert job.cold_start_s == pytest.approx(1.0), "what its start took"
    profile = read_profile(folder)
    assert profile.num_iterations == 8
    assert job.rounds == profile.rounds
    assert job_of_run(folder, name="a", slo=2, steps=7, train_memory_gib=5.0).steps == 7
    assert job_of_run(folder, name="a", slo=2, train_memory_gib=5.0).train_memory_gib == 5.0


def test_a_log_with_waits_says_the_same_and_what_switches_took(tmp_path: Path) -> None:
    alone = simulated(tmp_path, "stream_trainer.enabled=false")
    rng = random.Random(0)

    def wait(number: int) -> tuple[float, float]:
        return 3.0 + 10 * rng.random(), 1.5 if number % 2 else 3.0

    waited = with_waits(alone, wait)
    parked: list[Entry] = []
    first = read_profile(run_folder(tmp_path / "alone", alone))
    second = read_profile(run_folder(tmp_path / "shared", waited))
    assert len(first.rounds) > 1
    for one, other in zip(first.rounds, second.rounds, strict=True):
        assert (one.kind, one.share) == (other.kind, other.share)
        for part in ("rollout_s", "train_s"):
            assert getattr(one, part) == pytest.approx(getattr(other, part), abs=1e-4)
    assert first.switch_s == {}
    assert {*second.switch_s.values()} <= {1.5, 2.25, 3.0}
    for entry in waited:
        parked.append(entry)
        if isinstance(entry, Record) and any(isinstance(one, Leave) for one in entry.commands):
            parked.append(Note(time_s=entry.time_s, name=POOL_SWITCH, seconds=0.5, step=0))
    third = read_profile(run_folder(tmp_path / "parked", parked))
    assert third.switch_s == {pool: s + 0.5 for pool, s in second.switch_s.items()}
    assert job_of_run(tmp_path / "parked", name="a", slo=2, steps=9).model_gb == 0


def test_a_folder_that_tells_too_little(tmp_path: Path) -> None:
    few = run_folder(tmp_path / "few", costed(2))
    with pytest.raises(ValueError, match="has 2 whole iterations, and a profile takes 3 or more"):
        job_of_run(few, name="a", slo=2)
    with pytest.raises(ValueError, match="does not exist"):
        job_of_run(tmp_path / "none", name="a", slo=2)
    bare = run_folder(tmp_path / "bare", costed(4))
    (bare / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds no config.yaml.*give the folder of a run"):
        job_of_run(bare, name="a", slo=2)
    endless = run_folder(tmp_path / "endless", costed(4), "train.steps=null", "train.epochs=1")
    with pytest.raises(ValueError, match=r"how many steps the job takes is not known.*give steps"):
        job_of_run(endless, name="a", slo=2)
    assert job_of_run(endless, name="a", slo=2, steps=3).steps == 3


def test_a_profile_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", costed(4), "model.device=cpu")
    own = read_profile(folder).config
    same = load_config(folder / "config.yaml", ["train.steps=999", "seed=7"], RunConfig)
    assert job_of_run(folder, name="a", slo=2, config=same).steps == 999
    for change, told in (
        ("model.path=other/model", "it had model.path=.* and this one has other/model"),
        (
            f"rollout.max_response_tokens={own.rollout.max_response_tokens * 2}",
            "it had rollout.max_response_tokens=",
        ),
        ("rollout.dynamic_sampling.enabled=true", "dynamic_sampling.enabled=False, and this"),
        ("environment.tools=[tools.py:add]", "environment=nothing, and this one has one, which"),
        ("rollout.samples_per_prompt=2", "Run this one alone for 6 steps, and give its folder"),
    ):
        other = load_config(folder / "config.yaml", [change], RunConfig)
        with pytest.raises(ValueError, match=told):
            job_of_run(folder, name="a", slo=2, config=other)
    with pytest.raises(ValueError, match=r"was made on a CPU .* and the pools have GPUs"):
        job_of_run(folder, name="a", slo=2, on_gpus=True)
