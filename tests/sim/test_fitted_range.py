"""What is said of a simulation that goes beyond what its constants were fitted to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollpacker.sim.fitted_range import outside_of_run, outside_of_scenario
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.whatif import RunModel, load_run
from tests.sim.test_whatif import record

SCENARIOS = Path(__file__).parents[2] / "configs/scenarios"
UNKNOWN = ("train.fixed_s=null", "sync_s=null")
SMALL = ("steps=2", "rollout.prompts_per_step=16")


def scenario(*overrides: str) -> Scenario:
    return load_scenario(SCENARIOS / "14b-16k.yaml", [*SMALL, *overrides])


@pytest.mark.parametrize("name", ["7b-8k", "14b-16k", "32b-32k", "128-gpus"])
def test_what_was_fitted_is_inside(name: str) -> None:
    text = outside_of_scenario(load_scenario(SCENARIOS / f"{name}.yaml", ["steps=1"]))
    assert text.startswith("Model, GPUs and cap are inside of what the constants were fitted to")


def test_another_model_names_the_power_laws_and_their_seconds() -> None:
    text = outside_of_scenario(
        scenario("model=llama-3.3-70b", *UNKNOWN, "rollout.tensor_parallel=4")
    )
    assert "llama-3.3-70b with 70.6e9 parameters" in text
    assert "train.fixed_s, 378.9 s by a power law, sync_s, 71.7 s by a power law" in text
    assert re.search(
        r"a step would take longer by [\d.]+ s \((launch_layer_s|train_utilization)\)", text
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cluster.gpu=b200", "the GPU (b200)"),
        ("cluster.gpu=mi300x", "the GPU (mi300x)"),
        ("cluster.gpus=256", "256 GPUs"),
        ("rollout.max_response_tokens=65536", "nothing beyond 32,768 tokens"),
    ],
)
def test_what_lies_outside_is_named(change: str, said: str) -> None:
    text = outside_of_scenario(scenario(change))
    assert text.startswith("Outside of what the constants were fitted to")
    assert said in text


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
    assert re.search(r"up to [\d.]+ s of a step hang on that", text)
    assert "16 responses of a prompt, 8 were recorded" in text


def test_more_tokens_in_a_step_than_measured(plain: RunModel) -> None:
    text = said_of(plain, "rollout.prompts_per_step=32")
    assert re.search(r"steps of more than the [\d,]+ trained tokens \([\d.]+ s of a step", text)


def test_carrying_that_the_run_did_not_do(plain: RunModel) -> None:
    text = said_of(plain, "tail_batching.enabled=true")
    assert "tokens are carried, which the run did not do" in text
    assert re.search(r"at 0.001 a step would take \+[\d.]+ s", text)
