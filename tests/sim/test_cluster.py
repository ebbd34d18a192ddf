"""Jobs on shared pools in virtual time: what a policy costs, against bounds and by hand."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollpacker.cli.main import main
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from rollpacker.cluster.profile.job_profile import read_profile
from rollpacker.cluster.sim.jobs import Arrival, arrivals, read_trace
from rollpacker.cluster.sim.policies import POLICIES
from rollpacker.cluster.sim.result import PolicyResult
from rollpacker.cluster.sim.simulation import Simulation
from rollpacker.cluster.sim.spec import ClusterSpec, load_cluster
from rollpacker.config.load import ConfigError
from tests.report.test_job_profile import costed, run_folder

ROOT = Path(__file__).parents[2]
MIXED = ROOT / "configs/clusters/mixed.yaml"
FEW = ("jobs.count=25", "jobs.hours=60", "jobs.mean_hours=6")


def spec_of(*overrides: str) -> ClusterSpec:
    return load_cluster(MIXED, overrides)


def simulated(spec: ClusterSpec, name: str, jobs: Sequence[Arrival] = ()) -> PolicyResult:
    jobs = jobs or arrivals(spec)
    return Simulation(spec, jobs, name).run()


def job(name: str, rollout_s: float, train_s: float, steps: int, slo: float = 2.0) -> ClusterJob:
    rounds = (RoundTimes(rollout_s=(rollout_s,), train_s=(train_s,)),)
    return ClusterJob(name=name, rounds=rounds, steps=steps, slo=slo)


@pytest.fixture(scope="module")
def results() -> dict[str, PolicyResult]:
    spec = spec_of(*FEW)
    return {name: simulated(spec, name) for name in POLICIES}


def test_every_policy_runs_all_jobs(
    results: dict[str, PolicyResult],
) -> None:
    for name, result in results.items():
        assert len(result.jobs) == 25
        assert all(one.slowdown >= 1 - 1e-9 for one in result.jobs), name
        assert all(0 < busy <= 1 + 1e-9 for busy in result.busy.values()), name
    assert results["rollpacker"].price_per_h < results["dedicated"].price_per_h
    assert results["random"].slo_kept < results["rollmux"].slo_kept


def test_who_shares_nothing_waits_for_nothing(results: dict[str, PolicyResult]) -> None:
    for name in ("dedicated", "colocated"):
        assert results[name].slowdown_mean == pytest.approx(1)
        assert results[name].slo_kept == 1
    assert [*results["colocated"].peak_devices] == ["fast"]
    assert results["colocated"].busy["fast"] > 0.9


def test_the_same_seed_is_the_same_result(results: dict[str, PolicyResult]) -> None:
    for name in ("rollmux", "random"):
        assert simulated(spec_of(*FEW), name) == results[name]
        assert simulated(spec_of(*FEW, "seed=1"), name) != results[name]


def test_the_same_jobs_come_whatever_their_slo() -> None:
    loose, tight = (arrivals(spec_of(*FEW, f"jobs.slo=[{slo},{slo}]")) for slo in (1.2, 2.0))
    assert [one.at_s for one in loose] == [one.at_s for one in tight]
    assert [one.job.rounds for one in loose] == [one.job.rounds for one in tight]
    assert {one.job.slo for one in loose} == {1.2}


def test_dedicated_costs_what_can_be_reckoned_by_hand() -> None:
    """100 iterations of 100 + 100 s on one node of each kind."""
    spec = spec_of()
    result = simulated(spec, "dedicated", [Arrival(0.0, job("a", 100, 100, 100))])
    assert result.price_per_h == pytest.approx(8 * (1.85 + 5.28))
    assert result.busy == pytest.approx({"cheap": 0.5, "fast": 0.5})
    assert result.peak_devices == {"cheap": 8, "fast": 8}


@pytest.mark.parametrize("name", ["rollmux", "rollpacker"])
def test_two_jobs_that_fill_each_others_waits_cost_half(name: str) -> None:
    """Equal phases, no switches: one generates while the other trains."""
    jobs = [Arrival(0.0, job(one, 100, 100, 200)) for one in "ab"]
    alone, shared = (simulated(spec_of(), one, jobs) for one in ("dedicated", name))
    assert alone.price_per_h / shared.price_per_h == pytest.approx(2, rel=0.01)
    assert shared.busy == pytest.approx({"cheap": 1, "fast": 1}, rel=0.01)


def test_a_job_waits_for_nodes_and_that_counts_as_slowdown() -> None:
    spec = spec_of("pools.0.nodes=1", "pools.1.nodes=1")
    jobs = [Arrival(0.0, job(one, 150, 50, 10, slo=1.0)) for one in "ab"]
    first, second = simulated(spec, "dedicated", jobs).jobs
    assert (first.slowdown, second.slowdown) == (1, 2)
    assert first.kept and not second.kept


def test_training_on_more_nodes_than_asked_for_is_faster() -> None:
    wide = ClusterJob(
        name="wide",
        rounds=(RoundTimes(rollout_s=(100,), train_s=(100,)),),
        steps=50,
        slo=2,
        rollout_devices=16,
        train_devices=16,
    )
    jobs = [Arrival(0.0, wide), Arrival(1.0, job("narrow", 100, 100, 50))]
    result = simulated(spec_of(), "rollmux", jobs)
    assert result.peak_devices["fast"] == 16, "the narrow job trains on the wide one's nodes"


# -- input -------------------------------------------------------------------------

LINE = {"arrival_h": 0.5, "rollout_s": 100, "train_s": [40, 60], "slo": 1.5, "hours": 2}


def test_a_trace_is_read(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.jsonl"
    kinds = [
        {"kind": "short", "share": 0.8, "rollout_s": 50, "train_s": 40},
        {"kind": "long", "share": 0.2, "rollout_s": [200, 300], "train_s": 50, "after_s": 3},
    ]
    second = {"name": "two", "arrival_h": 1, "rounds": kinds, "slo": 1.2, "steps": 9, "model": "7b"}
    trace.write_text(f"{json.dumps(LINE)}\n\n{json.dumps(second)}\n")
    first, other = read_trace(trace)
    assert (first.at_s, first.job.name, first.job.steps) == (1800, "job-1", 48)
    assert first.job.mean == (100, 0, 50, 0)
    assert other.job.mean == pytest.approx((90, 0, 42, 0.6))
    assert other.job.worst == (300, 0, 50, 3)
    assert other.job.model_gb == 15.2
    spec = spec_of(f"jobs.trace={trace}")
    assert simulated(spec, "rollmux").slo_kept == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rollout_s": float("nan")}, "line 2: rollout_s must be a finite number, not nan"),
        ({"rollout_s": -1}, "line 2: rollout_s must be more than 0 seconds, not -1"),
        ({"rollout_s": "fast"}, 'line 2: rollout_s must be a number, not "fast"'),
        ({"arrival_h": float("nan")}, "line 2: arrival_h must be a finite number"),
        ({"arrival_h": -2}, "line 2: arrival_h must be 0 or more hours"),
        ({"arrival_h": 0.1}, "line 2: arrival_h is 0.1, before the job of the line above it"),
        ({"slo": 0.99}, "line 2: slo is 0.99: alone a job has a slowdown of 1"),
        ({"train": 3}, 'line 2: there is no key "train". Did you mean "train_s"?'),
        ({"model": "9b"}, 'line 2: model is "9b". Known: 3b, 7b'),
        ({"name": "job-1"}, 'line 2: a second job with the name "job-1", as in line 1'),
        ({"name": 7}, "line 2: name must be a text, not 7"),
        ({"name": " "}, "line 2: name is empty"),
        ({"owner": None}, "line 2: owner must be a text, not null"),
        ({"priority": "high"}, 'line 2: priority must be a number, not "high"'),
        ({"priority": 0.5}, "line 2: priority must be a whole number, not 0.5"),
        ({"priority": True}, "line 2: priority must be a number, not true"),
        ({"rollout_devices": 1.5}, "line 2: rollout_devices must be a whole number, not 1.5"),
        ({"train_s": []}, "line 2: rollout_s and train_s must have at least one number each"),
        ({"train_s": [1, float("inf")]}, "line 2: train_s must be a finite number, not inf"),
        ({"after_s": -1}, "line 2: after_s must be at least 0, not -1"),
        ({"between_s": float("nan")}, "line 2: between_s must be a finite number, not nan"),
        ({"rollout_memory_gib": -1}, "line 2: rollout_memory_gib must be at least 0, not -1"),
        ({"tail_share": 1}, "line 2: tail_share must lie in [0, 1), not 1"),
        ({"arrival_h": None}, "line 2: arrival_h must be a number, not null"),
        ({"slo": None}, "line 2: slo must be a number, not null"),
        ({"profile": "runs/a"}, "line 2: profile and rollout_s, train_s exclude each other"),
        ({"steps": 1.5}, "line 2: steps must be a whole number"),
        ({"hours": 0}, "line 2: hours must be more than 0"),
        ({"rounds": []}, "line 2: rollout_s, train_s and rounds exclude each other"),
    ],
)
def test_what_a_trace_may_not_say(tmp_path: Path, change: dict[str, object], told: str) -> None:
    trace = tmp_path / "jobs.jsonl"
    trace.write_text(f"{json.dumps(LINE)}\n{json.dumps(LINE | change)}\n")
    with pytest.raises(ValueError) as raised:
        read_trace(trace)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1: no JSON"),
        ("[1, 2]", "line 1: must be an object such as"),
        ('{"arrival_h": 0, "slo": 1, "slo": 2}', "line 1: slo is said twice"),
        ('{"arrival_h": 0, "slo": 1, "steps": 1}', "line 1: rollout_s is not set: give seconds"),
        ('{"arrival_h": 0, "rollout_s": 1, "train_s": 1, "steps": 1}', "line 1: slo is not set"),
        ('{"arrival_h": 0, "rollout_s": 1, "train_s": 1, "slo": 1}', "line 1: steps is not set"),
        ('{"arrival_h": 0, "profile": 3}', "line 1: profile must be a path, not 3"),
        (
            '{"arrival_h": 0, "profile": "a", "scenario": "b"}',
            "line 1: profile and scenario exclude each other",
        ),
        ('{"arrival_h": 0, "profile": "runs/nowhere"}', "line 1: runs/nowhere does not exist"),
        ('{"arrival_h": 0, "scenario": "no.yaml"}', "line 1: no.yaml"),
        ("", "has no jobs: write one JSON object a line"),
    ],
)
def test_what_a_line_may_not_be(tmp_path: Path, line: str, told: str) -> None:
    trace = tmp_path / "jobs.jsonl"
    trace.write_text(f"{line}\n")
    with pytest.raises(ValueError) as raised:
        read_trace(trace)
    assert told in str(raised.value)


def test_a_job_may_be_a_scenario(tmp_path: Path) -> None:
    """On the GPUs of the pools: H20s take longer to train than the scenario's H800s."""
    trace = tmp_path / "jobs.jsonl"
    line = {"arrival_h": 0, "scenario": str(ROOT / "configs/scenarios/7b-8k.yaml"), "slo": 1.5}
    trace.write_text(f"{json.dumps(line | {'steps': 3, 'train_memory_gib': 7})}\n")
    pools = spec_of().pools
    (first,) = read_trace(trace, pools)
    assert (first.job.rollout_devices, first.job.train_devices) == (16, 16)
    assert first.job.train_memory_gib == 7
    assert first.job.rollout_memory_gib == pytest.approx(8 * 7.615616512e9 * 2 / 2**30)
    assert first.job.model_gb == pytest.approx(15.231, abs=1e-3)
    on_h800s = [dataclasses.replace(pool, gpu="h800") for pool in pools]
    (other,) = read_trace(trace, on_h800s)
    assert other.job.mean.train_s == pytest.approx(first.job.mean.train_s, rel=0.01)
    assert other.job.mean.rollout_s != pytest.approx(first.job.mean.rollout_s)
    (slower,) = read_trace(trace, [dataclasses.replace(pool, gpu="h20") for pool in pools])
    assert slower.job.mean.train_s > 2 * first.job.mean.train_s
    assert slower.job.mean.rollout_s == pytest.approx(first.job.mean.rollout_s, rel=0.01)


def test_a_job_may_be_a_run(tmp_path: Path) -> None:
    overrides = ("train.processes=2", "train.steps=40", "model.device=cpu")
    folder = run_folder(tmp_path / "run", costed(8), *overrides, weights=1000)
    trace = tmp_path / "jobs.jsonl"
    line = {"arrival_h": 0, "profile": str(folder), "slo": 1.5}
    lines = [line, line | {"name": "long", "hours": 1, "train_memory_gib": 2, "model": "3b"}]
    trace.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    pools = load_cluster(ROOT / "configs/clusters/two-cores.yaml").pools
    first, second = (one.job for one in read_trace(trace, pools))
    profile = read_profile(folder)
    assert first.rounds == second.rounds == profile.rounds
    assert (first.steps, first.train_devices, first.model_gb) == (40, 2, 1e-6)
    assert second.steps == round(3600 / math.fsum(second.mean))
    assert (second.train_memory_gib, second.model_gb) == (2, 6.2), "what is said wins"
    with pytest.raises(ValueError, match=r"line 1: profile .* was made on a CPU"):
        read_trace(trace, spec_of().pools)


def test_who_needs_more_than_his_quota_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "jobs.jsonl"
    trace.write_text(f"{json.dumps(LINE | {'owner': 'alice', 'rollout_devices': 16})}\n")
    words = [f"jobs.trace={trace}", "quotas={alice: {rollout: 8}}"]
    assert main(["cluster", "simulate", str(MIXED), *words]) != 0
    shown = capsys.readouterr()
    assert "job job-1 needs 16 rollout devices, and alice may have 8" in shown.err
    assert not shown.out


def test_a_quota_keeps_an_owners_jobs_one_after_the_other(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.jsonl"
    lines = [LINE | {"owner": "alice", "arrival_h": n / 10, "slo": 1} for n in range(3)]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    free = simulated(spec_of(f"jobs.trace={trace}"), "dedicated")
    bound = simulated(spec_of(f"jobs.trace={trace}", "quotas={alice: {train: 8}}"), "dedicated")
    assert free.peak_devices["fast"] == 24 and bound.peak_devices["fast"] == 8
    assert [one.slowdown > 1.5 for one in bound.jobs] == [False, True, True]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("quotas={alice: {rolout: 8}}", "quotas.alice (override"),
        ("quotas={alice: {rollout: 0}}", "must be 1 or more devices, not 0"),
        ("ageing_h=-1", "must be at least 0, not -1.0"),
        ("jobs.slo=[0.9,1.5]", "two rising numbers of 1 or more, not 0.9 and 1.5"),
        ("pools.0.gpu=h21", 'Did you mean "h20"?'),
        ("pools.1.phase=rollout", "has none with phase: train"),
        ("pools.1.name=cheap", 'two pools with the name "cheap"'),
        ("slo_confidence=1.0", "must lie in [0.5, 1)"),
        ("max_group=0", "must be at least 1, not 0"),
        ("link_gb_s=0", "must be more than 0, not 0.0"),
        ("jobs.variation=-1", "must lie in [0, 1], not -1.0"),
        ("order=random", '"auto", "round_robin", "first_come", "least_slack"'),
    ],
)
def test_what_a_cluster_may_not_be(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec_of(override)
    assert told in str(raised.value)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cluster", "simulate", str(MIXED), *FEW, "--compare", "rollmux,dedicated"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "slowdown" in shown and "rollmux" in shown
    assert main([*command, "--json"]) == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    assert [*policies] == ["rollmux", "dedicated"]
    assert {*policies["rollmux"]} == {
        *("price_per_h", "slo_kept", "slowdown_mean", "peak_devices", "busy")
    }
    assert policies["rollmux"]["peak_devices"].keys() == {"cheap", "fast"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--compare", "rolmux"], 'no policy "rolmux". Known: rollpacker, dedicated'),
        (["pools.0.host_memory_gib=300"], "GiB in the host memory of each rollout node"),
        (["jobs.trace=nowhere.jsonl"], "jobs.trace nowhere.jsonl: cannot be read"),
    ],
)
def test_one_message_and_nothing_is_simulated(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "simulate", str(MIXED), *words]) != 0
    shown = capsys.readouterr()
    assert told in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("cluster_held_out", "rows"),
        ("cluster_beyond", "profiles"),
        ("cluster_confidence_profile_alone", "cells"),
        ("cluster_confidence", "cells"),
    ],
)
def test_the_page_has_what_was_measured(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())[key]
    module = name.removesuffix("_profile_alone")
    table = importlib.import_module(module).table(found)
    assert table in (ROOT / "docs/many-jobs-simulated.md").read_text()
