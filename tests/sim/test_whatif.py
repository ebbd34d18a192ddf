"""A recorded run under other settings, from a log whose machine is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from rollpacker.config.document import ConfigError
from rollpacker.config.load import load_config, save_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig
from rollpacker.core.records import Record, Session, encode
from rollpacker.sim.fitted_range import outside_of_run
from rollpacker.sim.machine import Machine
from rollpacker.sim.result import SystemResult
from rollpacker.sim.simulation import Simulation
from rollpacker.sim.unkind import UnkindConfig
from rollpacker.sim.whatif import RunModel, load_run, what_if
from rollpacker.sim.workload import Workload
from tests.report.costed_run import CostedRun

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
STEPS = 20
PUBLISHED = [
    *("tail_batching.selection=published", "tail_batching.sample_factor=1.25"),
    *("tail_batching.carry=none", "tail_batching.stragglers=queue"),
]
SIZE = ["rollout.prompts_per_step=8", "rollout.max_response_tokens=300", "train.warmup_steps=0"]


def step_s(n: int, cached: int) -> float:
    return 1e-3 + 2e-5 * n + 5e-7 * cached


def record(folder: Path, *settings: str, race: bool, warm_up_s: float = 0.0) -> Path:
    folder.mkdir()
    switch = f"tail_batching.enabled={str(race).lower()}"
    overrides = [*SIZE, switch, f"train.steps={STEPS}", *settings]
    config = load_config(QUICKSTART, overrides, RunConfig)
    save_config(config, folder / "config.yaml")
    lines = [
        encode(entry) for entry in CostedRun(step_s, race=race, warm_up_s=warm_up_s).run(STEPS)
    ]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunModel:
    return load_run(record(tmp_path_factory.mktemp("runs") / "plain", race=False))


def mean_rollout(result: SystemResult, kind: str | None = None) -> float:
    seconds = [s.rollout_s for s in result.steps if kind in (None, s.kind)]
    return sum(seconds) / len(seconds)


def test_a_run_without_a_race_is_met_round_by_round(plain: RunModel) -> None:
    measured, simulated = plain.measured(), plain.simulate()
    assert len(measured.steps) == len(simulated.steps) == STEPS
    assert [s.tokens_trained for s in measured.steps] == [s.tokens_trained for s in simulated.steps]
    for real, predicted in zip(measured.steps, simulated.steps, strict=True):
        assert predicted.rollout_s == pytest.approx(real.rollout_s, rel=0.05)
        assert predicted.train_s == pytest.approx(real.train_s, rel=0.02)


def test_a_run_that_fills_its_steps_up_can_be_simulated(tmp_path: Path) -> None:
    settings = "rollout.dynamic_sampling.enabled=true", "rollout.samples_per_prompt=2"
    found = load_run(record(tmp_path / "filled", *settings, race=False)).simulate(steps=8)
    assert len(found.steps) == 8
    assert max(step.num_trained for step in found.steps) == 16


def test_engines_and_replicas_that_share_devices(plain: RunModel) -> None:
    """Training is on both devices, and begins early on the one that is released."""
    two, shared = "rollout.engines=2", ["train.colocate=true", "train.processes=2"]
    apart = plain.simulate([two])
    kept = plain.simulate([two, *shared])
    stream = "stream_trainer={enabled: true, kinds: [plain]}"
    released = plain.simulate([two, *shared, "train.replicas=2", stream])
    of_one_replica = plain.simulate([two, *shared, stream])  # which a release would split
    assert mean_rollout(kept) == pytest.approx(mean_rollout(apart))
    for one, other in zip(kept.steps, apart.steps, strict=True):
        assert one.train_s < other.train_s
    assert of_one_replica.steps == kept.steps
    assert released.num_releases == STEPS
    for one, other in zip(released.steps, kept.steps, strict=True):
        assert one.num_streamed > 0 and one.train_s < other.train_s
    with pytest.raises(ValueError, match=r"train\.processes changes nothing"):
        plain.simulate([two, "train.processes=2"])


def test_more_engines_share_the_samples(plain: RunModel) -> None:
    one = plain.simulate()
    found = [plain.simulate([f"rollout.engines={n}"]) for n in (1, 2, 4)]
    assert found[0] == one
    means = [mean_rollout(result) for result in found]
    assert means[0] > 1.1 * means[1] and means[1] > 1.05 * means[2]
    for result, engines in zip(found, (1, 2, 4), strict=True):
        assert [s.tokens_trained for s in result.steps] == [s.tokens_trained for s in one.steps]
        for step, alone in zip(result.steps, one.steps, strict=True):
            assert step.train_s == pytest.approx(alone.train_s, rel=1e-9)
        total_s = sum(step.total_s for step in result.steps)
        assert result.device_seconds == pytest.approx(engines * total_s)
        assert 0 < sum(result.bubble.values()) < result.device_seconds
    group = plain.simulate(["rollout.engines=4", "rollout.routing=group"])
    assert mean_rollout(group) != mean_rollout(found[2])
    config = plain.with_overrides(["rollout.engines=4"])
    assert "4 engines, 1 measured" in outside_of_run(plain, config, found[2])


def simulated_run(
    model: RunModel, folder: Path, *settings: str, unkind: UnkindConfig | None = None
) -> Path:
    """A run on this machine, with its log."""
    config = model.with_overrides(settings)
    entries = [Session(started_at="", time_s=0.0, step=0, job=config.job().to_plain(), slots=None)]
    entries[0] = structs.replace(entries[0], slots=config.rollout.max_slots)
    machine = Machine(
        latency=model.latency(),
        gpus=config.rollout.engines,
        prompt_tokens=0,
        max_running=config.rollout.engine.max_slots,
    )
    workload = Workload.from_pools(
        model._pools,
        max_response_tokens=config.rollout.max_response_tokens,
        samples_per_prompt=config.rollout.samples_per_prompt,
        source="train",
    )
    job = config.job()
    Simulation(job, machine, workload, unkind=unkind, observe=entries.append).run(STEPS)
    folder.mkdir()
    save_config(config, folder / "config.yaml")
    (folder / "events.jsonl").write_text("\n".join(map(encode, entries)) + "\n")
    return folder


@pytest.mark.parametrize("slots", [None, 12])
@pytest.mark.parametrize("routing", ["spread", "group"])
def test_a_run_with_several_engines_gives_the_constants_of_one(
    plain: RunModel, tmp_path: Path, routing: str, slots: int | None
) -> None:
    settings = ["rollout.engines=3", f"rollout.routing={routing}"]
    if slots is not None:
        settings.append(f"rollout.engine.max_slots={slots}")
    several = load_run(simulated_run(plain, tmp_path / "three", *settings))
    fitted = several.fitted
    assert (fitted.num_rounds, fitted.num_skipped, fitted.slots) == (STEPS, 0, slots)
    for n, cached in ((3, 150), (8, 400)):
        one = plain.latency().step_cost(1).step_s(n, cached)
        assert several.latency().step_cost(1).step_s(n, cached) == pytest.approx(one, rel=0.05)
    assert fitted.errors["all"].ratio == pytest.approx(1, abs=0.02)
    measured, again = several.measured(), several.simulate()
    for real, predicted in zip(measured.steps, again.steps, strict=True):
        assert predicted.rollout_s == pytest.approx(real.rollout_s, rel=0.05)
    total_s = sum(step.total_s for step in measured.steps)
    assert measured.device_seconds == pytest.approx(3 * total_s)
    for engines in (1, 4):  # as from the run of one
        there = several.simulate([f"rollout.engines={engines}"])
        here = plain.simulate([*settings, f"rollout.engines={engines}"])
        assert mean_rollout(there) == pytest.approx(mean_rollout(here), rel=0.05)


def test_a_race_of_several_engines_is_simulated_from_its_own_log(
    plain: RunModel, tmp_path: Path
) -> None:
    settings = "rollout.engines=2", "tail_batching.enabled=true"
    several = load_run(simulated_run(plain, tmp_path / "race", *settings))
    assert several.fitted.num_skipped == 0
    assert several.fitted.errors["all"].ratio == pytest.approx(1, abs=0.02)
    found = mean_rollout(several.simulate())
    assert found == pytest.approx(mean_rollout(several.measured()), rel=0.15)


def test_engines_of_several_devices_are_no_measure_of_one(tmp_path: Path) -> None:
    settings = ["rollout.engine.name=vllm", "tail_batching.carry=none", "rollout.engines=2"]
    planner = ["parallelism_planner.enabled=true", "parallelism_planner.degrees=[1,2]"]
    run = record(tmp_path / "elastic", *settings, *planner, race=False)
    with pytest.raises(ValueError, match="had engines of several devices each"):
        load_run(run)


def test_rounds_in_which_an_engine_is_lost_are_left_out(plain: RunModel, tmp_path: Path) -> None:
    unkind = UnkindConfig(engine_life_s=12.0, engine_start_s=0.2)
    run = simulated_run(plain, tmp_path / "lost", "rollout.engines=3", unkind=unkind)
    assert '"Place"' in (run / "events.jsonl").read_text()
    several = load_run(run)
    assert 0 < several.fitted.num_skipped < STEPS / 2
    assert several.fitted.errors["all"].ratio == pytest.approx(1, abs=0.02)


def test_it_predicts_a_race_on_the_same_machine(plain: RunModel, tmp_path: Path) -> None:
    """The other run has prompts of its own, so the lengths are those of the same law."""
    race = load_run(record(tmp_path / "race", race=True)).measured()
    found = plain.simulate(["tail_batching.enabled=true", *PUBLISHED], steps=100)
    for kind in ("short", "long"):
        assert mean_rollout(found, kind) == pytest.approx(mean_rollout(race, kind), rel=0.2)


def test_only_what_is_simulated_can_be_changed(plain: RunModel) -> None:
    with pytest.raises(ConfigError, match=r"train.learning_rate changes nothing .* tail_batching"):
        plain.with_overrides(["train.learning_rate=1e-3"])


def test_lengths_beyond_the_recorded_cap_are_not_invented(plain: RunModel) -> None:
    assert plain.fitted.workload.max_response_tokens == 300
    with pytest.raises(ConfigError, match="cut responses at 300 tokens"):
        plain.with_overrides(["rollout.max_response_tokens=400"])
    shorter = plain.simulate(["rollout.max_response_tokens=100"])
    assert max(step.max_response_tokens for step in shorter.steps) == 100


def test_another_seed_takes_the_prompts_in_another_order(plain: RunModel) -> None:
    first, second, again = (plain.simulate(seed=seed, steps=6) for seed in (1, 2, 1))
    assert first == again
    assert first.tokens_trained != second.tokens_trained


def test_what_if_holds_all_three(tmp_path: Path) -> None:
    run = record(tmp_path / "run", race=False)
    changes = ["tail_batching.enabled=true", "tail_batching.stragglers=queue"]
    found = what_if(run, changes)
    assert {step.kind for step in found.measured.steps} == {"plain"}
    assert {step.kind for step in found.predicted_same.steps} == {"plain"}
    assert {step.kind for step in found.predicted.steps} == {"short", "long"}
    assert found.scenario["tail_batching"]["sample_factor"] == 1.0
    assert "weight sync" in found.fit_text


def carried_log(folder: Path, model: RunModel, mismatch: float) -> RunModel:
    """The run simulated with a pool, its log taken for a run's."""
    records: list[Record] = []
    config = model.with_overrides(["tail_batching.enabled=true", "tail_batching.prompt_factor=2"])
    machine = Machine(latency=model.latency(), gpus=1, prompt_tokens=0, mismatch=mismatch)
    workload = Workload.from_pools(model._pools, max_response_tokens=300, samples_per_prompt=8)
    job = replace(config.job(), max_steps=None)
    Simulation(job, machine, workload, observe=records.append).run(200)
    folder.mkdir()
    begin = Session(started_at="2026-01-01", time_s=0.0, step=0, job=job.to_plain())
    lines = [encode(entry) for entry in (begin, *records)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return replace(model, folder=folder)


def test_the_mismatch_of_a_run_is_read_from_its_log(plain: RunModel, tmp_path: Path) -> None:
    assert plain.mismatch == 0.0
    found = carried_log(tmp_path / "carried", plain, 2e-3)
    assert found.mismatch == pytest.approx(2e-3, rel=0.2)
    assert carried_log(tmp_path / "same", plain, 0.0).mismatch == 0.0
    assert 0 <= plain.capped_share <= 1


def test_workers_and_deadlines_of_a_run_hold_in_its_simulation(tmp_path: Path) -> None:
    """What a kind's few workers make wait was left out before, as if there were any number."""
    model = load_run(record(tmp_path / "bounded", race=False))
    free = model.simulate().mean["reward_s"]
    kinds = {model.fitted.workload.source: RewardKindConfig(workers=1)}
    job = model.config.job(reward_kinds=kinds).to_plain()
    bounded = replace(model, fitted=replace(model.fitted, job=job))
    waits = bounded.simulate().mean["reward_s"]
    assert waits > 20 * free


def test_a_warm_up_call_is_waited_for_once(tmp_path: Path) -> None:
    """It was the highest quantile of a law from which every check of every step was drawn."""
    model = load_run(record(tmp_path / "cold", race=False, warm_up_s=3.0))
    measured = [step.reward_s for step in model.measured().steps]
    simulated = [step.reward_s for step in model.simulate().steps]
    assert max(measured[1:]) < 0.1 < measured[0]
    assert sum(simulated) < 2 * sum(measured)
    assert max(simulated[1:]) < 0.3
    assert max(step.reward_s for step in model.simulate(seed=1).steps) < 0.3  # a plan's workers
