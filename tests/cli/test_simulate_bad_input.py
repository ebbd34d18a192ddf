"""What `rollpacker simulate` and `rollpacker plan` refuse, and how: one message, exit code 2,
nothing written. Damaged event logs are among it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rollpacker.cli.main import main
from rollpacker.config.load import load_config, save_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.records import encode
from rollpacker.sim.plan_ideas import Candidate, ScenarioEvaluate, plan_base
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.whatif import what_if
from tests.report.costed_run import CostedRun

SCENARIO = """\
name: small
model: qwen2.5-7b
cluster: {gpu: h800, gpus: 8}
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_response_tokens: 2048}
lengths: {quantiles: {0.01: 20, 0.5: 300, 0.9: 1200}}
rewards: [{kind: math, share: 1.0}]
steps: 2
"""
QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a scenario in it."""
    (tmp_path / "small.yaml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step_s(n: int, cached: int) -> float:
    return 1e-3 + 2e-5 * n + 5e-7 * cached


@pytest.fixture
def run(folder: Path) -> Path:
    """The folder of a run: 8 rounds."""
    path = folder / "runs/real"
    path.mkdir(parents=True)
    save_config(load_config(QUICKSTART, ["train.steps=8"], RunConfig), path / "config.yaml")
    lines = [encode(entry) for entry in CostedRun(step_s, race=True, cap=384).run(8)]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one message."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("rollpacker: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.prompts_per_step=99999999999999999999", "more than can be simulated"),
        ("rollout.samples_per_prompt=100000000", "more than can be simulated"),
        ("oracle.reorder_window=1000000", "is 1000000, which sorts more than"),
        ("cluster.gpus=8000000000", "gpus (override cluster.gpus=8000000000) must be at most"),
        (
            "cluster.gpu={memory_gb: 1e300, bandwidth_tb_s: 1, tflops: 1, nvlink_gb_s: 1}",
            "memory_gb=1e+300, which no GPU has",
        ),
        ("train.fixed_s=1e308", "must be at most 1e+09 seconds"),
        ("sync_s=1e308", "must be at most 1e+09 seconds"),
        ("rewards.0.seconds_quantiles={0.5: 1e308}", "it must be at most 1e+09"),
        ("rewards.0.slowest_correct_s=1e300", "at most 1e+09"),
        ("lengths={trace: ''}", "is empty: give the name of a JSONL file"),
        ("tail_batching.debias=moments", "set stream_trainer.enabled=false or debias=none"),
    ],
)
def test_values_beyond_any_machine(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, "simulate", "small.yaml", override)
    assert message in told and "small.yaml" in told


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_a_runs_config_is_no_scenario(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, verb, str(QUICKSTART))
    assert "is the config of a run, not a scenario" in told and "--from runs/NAME" in told


# -- files -------------------------------------------------------------------------


def test_a_log_replaces_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the scenario, not the log of a real run."""
    told = refused(capsys, "simulate", "small.yaml", "--log", "small.yaml")
    assert "--log small.yaml: there is such a file already" in told
    assert (folder / "small.yaml").read_text() == SCENARIO


@pytest.mark.parametrize("option", ["--log", "--picture"])
def test_names_that_cannot_be_files(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dir.png").mkdir()
    assert f"{option} is empty" in refused(capsys, "simulate", "small.yaml", option, "")
    assert "is a folder" in refused(capsys, "simulate", "small.yaml", option, "dir.png")


def test_the_log_is_not_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--log", "a.png", "--picture", "a.png"
    assert "choose two names" in refused(capsys, "simulate", "small.yaml", *options)


def test_presets_are_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--presets and --json exclude" in refused(capsys, "simulate", "--presets", "--json")


# -- plan --------------------------------------------------------------------------


@pytest.mark.parametrize("shift", ["nan", "2", "-1", "1", "inf"])
def test_plan_says_one_line_of_a_bound_that_is_none(
    shift: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, "plan", "small.yaml", "--max-shift", shift)
    assert "--max-shift must be at least 0 and less than 1" in told


def test_plan_with_debias_offers_no_streaming() -> None:
    """Neither goes with the other, and the oracle does without debias."""
    switches = ["tail_batching.debias=moments", "stream_trainer.enabled=false"]
    scenario = load_scenario("small.yaml", switches)
    base = plan_base(scenario)
    assert base.oracle is not None and base.ideas
    for candidate in (base.oracle, *(Candidate(ideas=(idea,)) for idea in base.ideas)):
        assert ScenarioEvaluate(scenario=scenario)(candidate, 0, 1).steps


def test_plan_needs_a_target_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "are required: TARGET\n" in capsys.readouterr().err


# -- damaged logs ------------------------------------------------------------------


def first(pattern: str, new: str) -> Callable[[str], str]:
    """Replaces the first match beyond the first 30 lines."""

    def damage(text: str) -> str:
        start = len("".join(text.splitlines(keepends=True)[:30]))
        damaged = text[:start] + re.sub(pattern, new, text[start:], count=1)
        assert damaged != text
        return damaged

    return damage


TOKENS = r'("event":"SampleGenerated".*?"num_tokens":)\d+'


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (first(TOKENS, r"\1null"), "Expected `int`, got `null` - at `$.num_tokens`"),
        (first(TOKENS, r"\1-5"), "num_tokens is -5"),
        (first(TOKENS, r"\g<1>2.5"), "Expected `int`, got `float` - at `$.num_tokens`"),
        (first(TOKENS, r"\g<1>99999999999999999999999"), "num_tokens is 99999999999999999999999"),
        (first(r'"t":[\d.]+', '"t":NaN'), "t is nan"),
        (first(r'"t":[\d.]+', '"t":1e999'), "t is inf"),
        (first(r'"t":[\d.]+', '"t":"x"'), "Expected `float`, got `str` - at `$.time_s`"),
        (first(r'"t":[\d.]+', '"t":1e300'), "t is 1e+300"),
        (lambda text: re.sub(r'"slots":[^,}]+', '"slots":"a"', text), "got `str` - at `$.slots`"),
        (lambda text: re.sub(r'"slots":[^,}]+', '"slots":0', text), "slots is 0"),
    ],
)
def test_a_line_with_a_value_that_no_run_writes(
    run: Path, damage: Callable[[str], str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run / "events.jsonl"
    log.write_text(damage(log.read_text()))
    told = refused(capsys, "simulate", "--from", str(run), "--json")
    assert message in told and re.search(r"events\.jsonl, line \d+: ", told)


def test_a_log_that_took_no_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run / "events.jsonl"
    log.write_text(re.sub(r'"t":[\d.]+', '"t":1.0', log.read_text()))
    told = refused(capsys, "simulate", "--from", str(run))
    assert "rounds take no time" in told and str(log) in told


def test_too_few_rounds_name_the_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    second = [n for n, line in enumerate(lines) if '"Launch"' in line][1]
    log.write_text("".join(lines[:second]))
    told = refused(capsys, "simulate", "--from", str(run))
    assert f"{log}: the log holds 1 finished round, and" in told


def test_a_lost_line_costs_one_round(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lost = next(n for n, line in enumerate(lines) if '"SampleGenerated"' in line)
    log.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    assert main(["simulate", "--from", str(run), "--no-picture"]) == 0
    assert re.search(r"fitted to +7 rounds", capsys.readouterr().out)


def test_a_log_cut_in_the_middle_of_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run / "events.jsonl"
    log.write_text(log.read_text()[:-15])
    assert main(["simulate", "--from", str(run), "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_the_config_is_not_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "simulate", "--from", str(run / "config.yaml"))
    assert f"is a run's config: give its folder, {run}" in told


def test_the_number_of_steps_can_be_changed(run: Path) -> None:
    found = what_if(run, ["train.steps=3"])
    assert len(found.predicted_same.steps) == 8
    assert len(found.predicted.steps) == 3
