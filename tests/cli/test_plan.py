"""`rollpacker plan`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollpacker.cli import plan as verb
from rollpacker.cli.main import main
from rollpacker.cli.plan import _comment
from rollpacker.cli.plan_text import explain
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim import plan as planning
from rollpacker.sim import plan_ideas, plan_result
from rollpacker.sim.plan_run import RunEvaluate
from rollpacker.sim.plan_shared import PoolPrices
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.whatif import load_run
from tests.sim.test_whatif import record

MIXED = Path(__file__).parents[2] / "configs/clusters/mixed.yaml"
SCENARIO = """\
name: small
model: qwen2.5-7b
cluster: {gpu: h800, gpus: 8}
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_response_tokens: 4096}
lengths: {quantiles: {0.1: 100, 0.5: 500, 0.95: 2000, 0.99: 4096}}
rewards:
  - {kind: judge, share: 1.0, calls_per_s: 1.0}
system: rollpacker-published
steps: 12
"""
SMALL = planning.Budget(
    fine=False, screen_steps=6, kept=2, second_steps=8, finalists=1, seeds=2, steps=8
)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(planning.BUDGETS, "quick", SMALL)
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def test_what_it_writes_loads_and_simulates_to_the_same(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = scenario.with_name("best.yaml")
    code = main(
        ["plan", str(scenario), "--budget", "quick", "--jobs", "1", "--json", "--write", str(out)]
    )
    assert code == 0
    found = json.loads(capsys.readouterr().out)  # nothing but JSON on stdout
    assert not found["stays"]
    best, current = found["best"], found["current"]
    assert best["step_s"] < current["step_s"]
    assert best["length_shift"] >= current["length_shift"]
    planned = plan_ideas.changed(load_scenario(scenario), best["changes"])
    written = load_scenario(out)
    assert written == planned
    assert simulate(written) == simulate(planned)
    assert simulate(written).mean["total_s"] < simulate(load_scenario(scenario)).mean["total_s"]


def test_the_table_and_the_reasons(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(scenario), "--budget", "quick", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    for part in ("current", "oracle", "Best: ", "Changes:", "Why (what is lost", "Bound: "):
        assert part in text
    assert all(len(line) <= 80 for line in text.split("Best: ")[0].splitlines())


def test_a_run_is_planned_beside_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(planning.BUDGETS, "quick", SMALL)
    run, out = record(tmp_path / "made", race=False), tmp_path / "faster.yaml"
    command = ["plan", str(run), "--budget", "quick", "--jobs", "1"]
    assert main([*command, "--write", str(out)]) == 0
    text = capsys.readouterr().out
    model = load_run(run)
    assert text.splitlines()[1].split()[:2] == [
        "measured",
        f"{model.measured().mean['total_s']:.3f}",
    ]
    assert "trust no smaller difference than that" in text
    # A run of that name is there already.
    assert load_config(out, [], RunConfig).name == f"{model.config.name}-planned"


def test_on_shared_pools_a_plan_says_what_they_cost(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = scenario.with_name("best.yaml")
    command = ["plan", str(scenario), "--budget", "quick", "--jobs", "1", "--shared", str(MIXED)]
    assert main([*command, "--json", "--write", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shared_pools"] == pytest.approx({"rollout_per_h": 14.8, "train_per_h": 42.24})
    best, current = found["best"], found["current"]
    assert best["busy_s"] < current["busy_s"] < current["step_s"]
    price = best["busy_s"] * (14.8 + 42.24) / 3600 / 8 * 1000
    assert best["price_per_1k_prompts"] == pytest.approx(price)
    assert not any("stream" in key for key in best["changes"])
    written = load_scenario(out)
    assert (written.cluster.gpu, written.cluster.train_gpu) == ("h20", "h800")
    assert not written.stream_trainer.enabled
    assert main(command) == 0
    text = capsys.readouterr().out
    for part in ("price/1k", "busy s", "Shared pools: rollout nodes cost 14.80 an hour"):
        assert part in text
    assert all(len(line) <= 80 for line in text.split("Best: ")[0].splitlines())


def test_a_run_is_planned_for_shared_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(planning.BUDGETS, "quick", SMALL)
    run = record(tmp_path / "made", race=False)
    command = ["plan", str(run), "--budget", "quick", "--jobs", "1", "--shared", str(MIXED)]
    assert main(command) == 0
    text = capsys.readouterr().out
    prices = PoolPrices(rollout_per_h=14.8, train_per_h=42.24, prompts_per_step=8)
    steps = load_run(run).measured().steps
    busy_s = sum(map(prices.busy_s, steps)) / len(steps)
    assert text.splitlines()[1].split()[:1] == ["measured"]
    assert f"{busy_s:.3f}" in text.splitlines()[1]


@pytest.mark.parametrize(
    ("cluster", "told"),
    [("nowhere.yaml", "nowhere.yaml"), ("configs/scenarios/7b-8k.yaml", "pools")],
)
def test_a_file_that_is_no_cluster_is_refused_before_anything_is_simulated(
    cluster: str, told: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(scenario), "--shared", cluster]) == 2
    shown = capsys.readouterr()
    assert told in shown.err and len(shown.err.splitlines()) <= 12
    assert not shown.out


def test_a_run_on_the_same_devices_can_share_no_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(tmp_path / "made", race=False)
    config = (run / "config.yaml").read_text()
    for setting in ("colocate: false", "engines: 1", "processes: null"):
        assert setting in config
    config = config.replace("colocate: false", "colocate: true").replace("engines: 1", "engines: 2")
    (run / "config.yaml").write_text(config.replace("processes: null", "processes: 2"))
    assert main(["plan", str(run), "--shared", str(MIXED)]) == 2
    assert "has engines and trainer on the same devices" in capsys.readouterr().err


def test_finals_of_a_run_are_what_its_what_if_says(tmp_path: Path) -> None:
    model = load_run(record(tmp_path / "made", race=True))
    evaluate = RunEvaluate(model=model, config=model.config)
    budget = evaluate.budget(SMALL)
    assert budget.steps == model.fitted.num_steps
    final = evaluate(plan_ideas.Candidate(), planning.FINAL_SEED, budget.steps)
    assert final.steps == model.simulate().steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-shift", "35"], "--max-shift must be at least 0 and less than 1"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--write", "best.json"], "--write best.json: a config's name ends in .yaml"),
        (["--write", "no/best.yaml"], "there is no folder no"),
        (["rollout.prompts=3"], "rollout.prompts"),
    ],
)
def test_refuses_before_it_simulates(
    scenario: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(["plan", str(scenario), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_overwrites_nothing(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(scenario), "--write", str(scenario)]) == 2
    assert "there is such a file already" in capsys.readouterr().err
    assert scenario.read_text() == SCENARIO


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


# -- the words ---------------------------------------------------------------------


def finding(step_s: float, shift: float, *ideas: plan_ideas.Idea) -> plan_result.Finding:
    return plan_result.Finding(
        candidate=plan_ideas.Candidate(ideas=ideas),
        cost_s=step_s,
        step_s=step_s,
        saved_s=100.0 - step_s,
        saved_error_s=0.5,
        shift=shift,
        shift_error=0.0,
        kinds_s={"short": step_s},
        tokens=1000 * (1 + shift),
    )


def made_plan(best: plan_result.Finding, max_shift: float) -> plan_result.Plan:
    now = finding(100.0, -0.3)
    return plan_result.Plan(
        base=plan_ideas.Base(
            prompts_per_step=8,
            samples_per_prompt=4,
            tail_batching=TailBatchingConfig(selection="published"),
            ideas=(),
        ),
        current=now,
        best=now if best.candidate == now.candidate else best,
        ranked=(),
        too_short=(),
        reasons=(),
        rejected=(),
        oracle=None,
        max_shift=max_shift,
        num_seeds=3,
        num_steps=20,
        num_simulated=100,
    )


def test_words_for_every_outcome() -> None:
    gentle = plan_ideas.factors_idea((1.125, 1.0))
    said = {
        name: "\n".join(explain(plan, corrected=False))
        for name, plan in {
            "gain": made_plan(finding(80.0, -0.2, gentle), 0.3),
            "price": made_plan(finding(120.0, -0.1, gentle), 0.1),
            "stay": made_plan(finding(100.0, -0.3), 0.3),
            "none": made_plan(finding(100.0, -0.3), 0.1),
        }.items()
    }
    assert "takes 20.0% ± 0.5% less: 80.0 s instead of 100.0 s" in said["gain"]
    assert "tail_batching.prompt_factor=1.125" in said["gain"]
    assert "takes 20.0% ± 0.5% longer, which is the price of the bound" in said["price"]
    assert "Stay with the current settings" in said["stay"]
    assert "Nothing that was tried keeps the bound of 10.0%" in said["none"]


def test_with_debias_it_says_what_the_bound_is_on() -> None:
    plan = dataclasses.replace(made_plan(finding(100.0, -0.3), 0.3), max_shift=None)
    text = "\n".join(explain(plan, corrected=True))
    assert "its weights undo the shift" in text
    assert not math.isnan(plan.current.shift)


def test_a_step_that_is_shorter_since_it_trains_on_less_says_so() -> None:
    gentle = plan_ideas.factors_idea((1.125, 1.0))
    longer = made_plan(finding(80.0, -0.2, gentle), 0.3)
    assert "fewer tokens" not in "\n".join(explain(longer, corrected=False))
    only = made_plan(finding(80.0, -0.5, gentle), 0.6)
    text = "\n".join(explain(only, corrected=False))
    assert "It is shorter only because it trains on 29% fewer tokens" in text
    assert "0.89x the current settings" in text


CUT = plan_ideas.order_idea(2.0, complement=False)


def measured_plan(
    *kept: plan_result.Finding, trust: float | None, shift: float | None = None
) -> plan_result.Plan:
    made = made_plan(finding(100.0, 0.028), 0.01)
    now = dataclasses.replace(finding(100.0, 0.028), saved_s=0.0)
    base = dataclasses.replace(
        made.base, tail_batching=TailBatchingConfig(), trust=trust, measured_shift=shift
    )
    made = dataclasses.replace(made, base=base, current=now, ranked=kept)
    best, refused = plan_result.choose(now, kept, current_keeps=made.current_keeps, trust=trust)
    return dataclasses.replace(made, best=best, refused=refused)


def test_a_gain_in_trained_tokens_within_the_trust_is_not_recommended() -> None:
    shorter = finding(94.4, -0.03, CUT)  # the step, but not the tokens per second
    plan = measured_plan(shorter, trust=0.021, shift=0.005)
    text = "\n".join(explain(plan, corrected=False))
    assert plan.stays and "the step takes 5.6% less, but trained tokens per second" in text
    assert "change by -0.0%, which is not more than the 2.1%" in text
    faster = finding(90.0, 0.0, plan_ideas.order_idea(1.5))
    assert measured_plan(shorter, faster, trust=0.021, shift=0.005).best is faster
    assert measured_plan(shorter, trust=None, shift=0.005).best is shorter
    # Who does not keep the bound needs another setting, whatever it gains.
    assert measured_plan(shorter, trust=0.021, shift=0.02).best is shorter


def test_the_current_settings_are_judged_by_what_they_measured() -> None:
    assert not measured_plan(trust=0.021).current_keeps
    plan = measured_plan(trust=0.021, shift=0.005)
    assert plan.current_keeps
    text = "\n".join(explain(plan, corrected=False))
    assert "by the shift that the run measured (+0.5%), not by the simulated one (+2.8%)" in text


def test_what_gives_up_a_promise_says_so() -> None:
    kept = measured_plan(finding(80.0, 0.0, plan_ideas.order_idea(2.0)), trust=0.02)
    assert kept.given_up is None and "gives up" not in _comment("runs/x", kept)
    plan = measured_plan(finding(80.0, 0.0, CUT), trust=0.02)
    assert "complement=false gives up" in "\n".join(explain(plan, corrected=False))
    assert plan.to_plain()["gives_up"] == plan.given_up
    assert "complement=false gives up" in _comment("runs/x", plan)


# -- while it runs -----------------------------------------------------------------


def test_without_a_terminal_it_says_how_far_it_is(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "LINE_EVERY_S", 0.0)
    assert main(["plan", str(scenario), "--budget", "quick", "--jobs", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert re.search(
        r"^rollpacker: factors: \d+ of \d+ simulations; about .* left$", err, re.MULTILINE
    )


def test_an_interrupt_tells_the_best_so_far(scenario: Path) -> None:
    config = load_scenario(scenario)

    def interrupt(stage: str, done: int, total: int, share: float) -> None:
        if stage == "closer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="interrupted; fastest so far, by ") as caught:
        planning.plan(
            plan_ideas.plan_base(config),
            plan_ideas.ScenarioEvaluate(scenario=config),
            budget=SMALL,
            progress=interrupt,
        )
    assert "tail_batching.prompt_factor=" in str(caught.value)


def test_a_plan_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    """Its processes went on, and Python spoke of leaked semaphores."""
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    command = [sys.executable, "-m", "rollpacker.cli.main", "plan", str(path), "--jobs", "2"]
    plan = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{plan.pid}/task/{plan.pid}/children")
    while len(children.read_text().split()) < 2:  # it has begun, and takes seconds
        assert plan.poll() is None, plan.communicate()
        time.sleep(0.02)
    plan.send_signal(signal.SIGTERM)
    _, said = plan.communicate(timeout=60)
    assert plan.returncode == 130 and said.startswith("rollpacker: interrupted"), said
    assert "leaked" not in said and "Traceback" not in said, said
