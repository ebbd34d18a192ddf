"""What is said of a simulation that goes beyond what its constants were fitted to."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rollpacker.sim.fitted_range import assumed, outside_of_run, outside_of_scenario
from rollpacker.sim.given_constants import given_constants
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.whatif import RunModel, load_run
from tests.sim.test_whatif import record

SCENARIOS = Path(__file__).parents[2] / "configs/scenarios"
UNKNOWN = ("train.fixed_s=null", "sync_s=null")
SMALL = ("steps=2", "rollout.prompts_per_step=16")


def scenario(*overrides: str) -> Scenario:
    return load_scenario(SCENARIOS / "14b-16k.yaml", [*SMALL, *overrides])


def said(scenario: Scenario) -> str:
    return outside_of_scenario(scenario, step_s=500.0, whose="verl's step")


@pytest.mark.parametrize("name", ["7b-8k", "14b-16k", "32b-32k", "128-gpus"])
def test_what_was_fitted_is_inside(name: str) -> None:
    text = said(load_scenario(SCENARIOS / f"{name}.yaml", ["steps=1"]))
    assert text.startswith("Model, GPUs and cap are inside of what the constants were fitted to")


def test_another_model_names_the_power_laws_and_their_seconds() -> None:
    text = said(scenario("model=llama-3.3-70b", *UNKNOWN, "rollout.tensor_parallel=4"))
    assert "llama-3.3-70b with 70.6e9 parameters" in text
    assert re.search(r"450\.[5-7] s of the 500\.0 s of verl's step come from power laws", text)
    assert "378.9 s of train.fixed_s and 71.7 s of sync_s" in text


@pytest.mark.parametrize("given", [UNKNOWN, ()])
def test_constants_of_the_files_model_do_not_hold_for_another_one(given: tuple[str, ...]) -> None:
    other = load_scenario(
        SCENARIOS / "7b-8k.yaml", ["model=qwen2.5-32b", "rollout.tensor_parallel=2", *given]
    )
    assert other.train.fixed_s is None
    assert other.sync_s is None
    kept = load_scenario(
        SCENARIOS / "7b-8k.yaml",
        ["model=qwen2.5-32b", "rollout.tensor_parallel=2", "sync_s=27", "train={fixed_s: 130}"],
    )
    assert (kept.train.fixed_s, kept.sync_s) == (130, 27)
    same = load_scenario(SCENARIOS / "7b-8k.yaml", ["model=qwen2.5-7b"])
    assert same == load_scenario(SCENARIOS / "7b-8k.yaml")


def test_what_became_of_the_files_constants_is_said() -> None:
    file = SCENARIOS / "14b-16k.yaml"
    text = given_constants(file, ["model=llama-3.3-70b", "cluster.gpu=mi300x"]).describe()
    assert text.startswith(
        "The file gives train.fixed_s=45 and sync_s=15 for qwen2.5-14b, so that for llama-3.3-70b "
        "they come from power laws"
    )
    text = given_constants(file, ["cluster.gpu=mi300x", "sync_s=9"]).describe()
    assert text.startswith("train.fixed_s=45 is the file's, given for h800 and kept for mi300x")
    assert given_constants(file, ["cluster.gpu=h800", "steps=3"]).describe() == ""
    assert given_constants(file, ["model=llama-3.3-70b", *UNKNOWN]).describe() == ""


def test_a_power_law_inside_of_what_was_fitted_is_named() -> None:
    text = outside_of_scenario(
        load_scenario(
            SCENARIOS / "7b-8k.yaml",
            [*SMALL, "model=qwen2.5-32b", "rollout.tensor_parallel=2"],
        ),
        step_s=349.1,
        whose="rollpacker's step",
    )
    assert text.startswith("Model, GPUs and cap are inside")
    assert "162.4 s of the 349.1 s of rollpacker's step come from power laws" in text
    assert "132.6 s of train.fixed_s and 29.9 s of sync_s" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("cluster.gpu=b200", "the GPU (b200)"),
        ("cluster.gpu=mi300x", "the GPU (mi300x)"),
        ("cluster.gpus=256", "256 GPUs"),
        ("rollout.max_response_tokens=65536", "nothing beyond 32,768 tokens"),
    ],
)
def test_what_lies_outside_is_named(change: str, named: str) -> None:
    text = said(scenario(change))
    assert text.startswith("Outside of what the constants were fitted to")
    assert named in text


def test_what_is_assumed_of_carried_tokens_and_of_the_preset() -> None:
    ours, verl = scenario(), scenario("system=verl")
    text = assumed({"verl": verl, "rollpacker": ours}, {})
    assert "Of rollpacker it is assumed that no carried token changes" in text
    assert "rollpacker is a pool at factor 2 here; rollpacker train takes a queue at" in text
    assert assumed({"verl": verl}, {}) == ""
    known = scenario(
        *("carry.mismatch=1e-5", "tail_batching.stragglers=queue"),
        "tail_batching.prompt_factor=1.5",
    )
    assert assumed({"rollpacker": known}, {}) == ""


def test_preemptions_are_said_to_be_outside() -> None:
    crowded = scenario("system=verl")
    result = simulate(crowded)
    one, other = result.steps
    results = {"verl": replace(result, steps=(replace(one, preemptions=700), other))}
    text = assumed({"verl": crowded}, results)
    assert text.startswith("700 preemptions of verl are outside of what was fitted")
    assert "rollout.tensor_parallel above 2 and parallelism_planner.enabled=false" in text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunModel:
    return load_run(record(tmp_path_factory.mktemp("runs") / "plain", race=False))


def said_of(model: RunModel, *changes: str) -> str:
    config = model.with_overrides(changes)
    return outside_of_run(model, config, model.simulate_config(config, steps=6))


def test_a_run_at_its_own_settings_is_inside(plain: RunModel) -> None:
    assert said_of(plain) == (
        "Nothing simulated here lies outside of what the run measured on its machine."
    )


def test_more_samples_at_once_than_measured(plain: RunModel) -> None:
    text = said_of(plain, "rollout.samples_per_prompt=16")
    assert "128 samples decoded at once, 64 were measured" in text
    assert "16 responses of a prompt, 8 were recorded" in text


def test_more_tokens_in_a_step_than_measured(plain: RunModel) -> None:
    text = said_of(plain, "rollout.prompts_per_step=32")
    assert re.search(r"steps of more than the [\d,]+ trained tokens \([\d.]+ s of a step", text)


def test_carrying_that_the_run_did_not_do(plain: RunModel) -> None:
    text = said_of(plain, "tail_batching.enabled=true")
    assert "tokens are carried, which the run did not do" in text
    assert "mismatches are taken as 0 per token and update" in text
