"""`rollpacker simulate`: the table, JSON, pictures, logs, and what it refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollpacker.cli import simulate as verb
from rollpacker.cli import simulations
from rollpacker.cli.main import main
from rollpacker.core import records
from rollpacker.report.log import EventLog
from rollpacker.report.spans import read_steps
from rollpacker.sim import fitted_range, plan_workers, whatif
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.whatif import WhatIf
from tests.sim.test_table import RACING, step, system

SCENARIO = """\
name: small
model: qwen2.5-7b
cluster: {gpu: h800, gpus: 8}
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_response_tokens: 2048}
lengths: {quantiles: {0.01: 20, 0.5: 300, 0.9: 1200}}
steps: 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a scenario in it."""
    (tmp_path / "small.yaml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulate(*arguments: str) -> int:
    return main(["simulate", *arguments])


def test_a_table_a_sentence_and_a_picture(folder, capsys):
    assert simulate("small.yaml") == 0
    out, err = capsys.readouterr()
    assert out.startswith("small: qwen2.5-7b on 8 x h800, 5 steps\n")
    assert "seconds of a step" in out and "The largest part of rollpacker's step is" in out
    assert out.endswith("The timeline is in small-timeline.png.\n")
    assert (folder / "small-timeline.png").read_bytes().startswith(b"\x89PNG")
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out and err == ""


def test_no_picture_or_another_one(folder, capsys):
    assert simulate("small.yaml", "--no-picture") == 0
    assert "timeline" not in capsys.readouterr().out
    assert simulate("small.yaml", "--picture", "mine.svg", "steps=1") == 0
    assert "The timeline is in mine.svg." in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["mine.svg", "small.yaml"]


def test_json_and_nothing_else(folder, capsys):
    assert simulate("small.yaml", "--json", "seed=3", "tail_batching.prompt_factor=1.5") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and sorted(path.name for path in folder.iterdir()) == ["small.yaml"]
    assert found["scenario"]["seed"] == 3
    assert found["scenario"]["tail_batching"]["prompt_factor"] == 1.5
    assert found["scenario"]["tail_batching"]["sample_factor"] == 1.0  # of the preset
    (own,) = found["systems"].items()
    assert own[0] == "rollpacker"
    keys = {
        *("kind", "rollout_s", "reward_s", "train_s", "sync_s", "total_s"),
        *("tensor_parallel", "preemptions", "max_response_tokens"),
    }
    assert len(own[1]["steps"]) == 5 and all(set(s) == keys for s in own[1]["steps"])
    assert set(own[1]["mean"]) == keys - {"kind"}
    mean = sum(s["total_s"] for s in own[1]["steps"]) / 5
    assert own[1]["mean"]["total_s"] == pytest.approx(mean)
    assert own[1]["tokens_generated"] > own[1]["tokens_trained"] > 0
    assert own[1]["paired_shift"] == own[1]["mismatch"] == 0.0
    assert set(own[1]["bubble"]) == {"tail", "reward_wait", "migration", "sync"}


def test_json_with_a_picture_asked_for(folder, capsys):
    assert simulate("small.yaml", "--json", "--picture", "mine.png", "steps=1") == 0
    assert json.loads(capsys.readouterr().out)["scenario"]["steps"] == 1
    assert (folder / "mine.png").exists()


def test_json_never_has_nan():
    plain = {"a": [math.nan, 1.5, {"b": math.inf}], "c": "nan"}
    assert verb._finite(plain) == {"a": [None, 1.5, {"b": None}], "c": "nan"}


def test_systems_are_compared_on_the_same_workload(capsys):
    names = "oracle,verl, rollpacker,verl"
    options = "--json", "--compare", names, "--jobs", "1", "steps=3", "oracle.reorder_window=0"
    assert simulate("small.yaml", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["systems"]) == ["oracle", "verl", "rollpacker"]
    lengths = {name: s["policy_length_mean"] for name, s in found["systems"].items()}
    assert len(set(lengths.values())) == 1
    kinds = {name: {s["kind"] for s in f["steps"]} for name, f in found["systems"].items()}
    assert kinds == {"oracle": {"plain"}, "verl": {"plain"}, "rollpacker": {"short"}}


def test_compared_in_processes_as_in_one(capsys):
    found = []
    for jobs in ("1", "2"):
        options = "--json", "--compare", "verl,rollpacker", "--jobs", jobs, "steps=2"
        assert simulate("small.yaml", *options) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


def test_settings_that_no_compared_system_has_are_named(capsys):
    assert simulate("small.yaml", "--compare", "verl", "--json", "tail_batching.tiers=[]") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "note: tail_batching.tiers=[] has no effect: it is a setting of rollpacker" in err


def test_part_of_the_oracles_window_is_named(capsys):
    assert simulate("small.yaml", "--json", "system=oracle") == 0
    assert "take a multiple of 20" in capsys.readouterr().err
    assert simulate("small.yaml", "--json", "system=oracle", "steps=20") == 0
    assert capsys.readouterr().err == ""


def test_a_log_replays_and_can_be_reported_on(folder, capsys):
    assert simulate("small.yaml", "--no-picture", "--log", "run.jsonl") == 0
    assert main(["replay", "run.jsonl"]) == 0
    assert "5 steps: the same commands" in capsys.readouterr().out
    steps = read_steps(EventLog(folder / "run.jsonl"))
    assert [str(s.kind) for s in steps][:2] == ["short", "short"]
    assert main(["report", "run.jsonl", "--out", "report"]) == 0
    assert (folder / "report/timeline.png").exists()


def test_presets_are_listed(capsys):
    assert simulate("--presets") == 0
    out = capsys.readouterr().out
    for name in ("qwen2.5-14b", "h800", "verl", "rlhfuse", "oracle", "rollpacker-code", "judge"):
        assert name in out


# -- what if -----------------------------------------------------------------------


@pytest.fixture
def asked(folder, monkeypatch) -> list[tuple[str, list[str]]]:
    """Makes the folder of a run, `runs/real`, with results that are made up; filled with what was
    asked of it."""
    (folder / "runs/real").mkdir(parents=True)
    (folder / "runs/real/events.jsonl").write_text("")
    asked = []

    def what_if(run, overrides):
        asked.append((str(run), list(overrides)))
        return WhatIf(
            measured=system(*[step(total_s=66.0)] * 5),
            predicted_same=system(*[step(total_s=60.0)] * 5, tail_trained_share=math.nan),
            predicted=RACING,
            fit_text="decode step: 2 ms",
            model=None,
            config=None,
            scenario={"name": "real", "limit": math.inf},
        )

    told = "480 samples at once, 192 were measured."
    monkeypatch.setattr(whatif, "what_if", what_if)
    monkeypatch.setattr(fitted_range, "outside_of_run", lambda *of: told)
    return asked


def test_what_if_shows_the_run_its_simulation_and_the_change(folder, asked, capsys):
    assert simulate("--from", "runs/real", "tail_batching.prompt_factor=1.5") == 0
    assert asked == [("runs/real", ["tail_batching.prompt_factor=1.5"])]
    out = capsys.readouterr().out
    assert out.startswith("decode step: 2 ms\n")
    rows = [line.split()[:3] for line in out.splitlines() if line.startswith(SHOWN)]
    assert rows[:3] == [
        *(["measured", "66.0", "0.91x"], ["simulated", "60.0", "1.00x"]),
        ["what-if", "60.0", "1.00x"],
    ]
    assert "Simulated as it was, the run's step is 9% shorter than measured (66.0 s)" in out
    assert "480 samples at once, 192 were measured." in out
    assert "The timeline is in real-what-if.png." in out
    assert (folder / "real-what-if.png").exists()


SHOWN = ("measured", "simulated", "what-if")


def test_what_if_as_json(asked, capsys):
    assert simulate("--from", "runs/real", "--json", "a.b=1", "c=2") == 0
    assert asked == [("runs/real", ["a.b=1", "c=2"])]
    found = json.loads(capsys.readouterr().out)
    assert tuple(found["systems"]) == SHOWN
    assert found["systems"]["simulated"]["tail_trained_share"] is None
    assert found["scenario"] == {"name": "real", "limit": None}


# -- bad input ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "simulate needs a scenario, such as configs/scenarios/14b-16k.yaml, or --from RUN"),
        (("smal.yaml",), 'smal.yaml: no such config file. Did you mean "small.yaml"?'),
        (("steps=3",), "steps=3 is a setting: the scenario file comes before it"),
        (("small.yaml", "--from", "runs/real"), "small.yaml and --from runs/real exclude each"),
        (("--from", "runs/none"), "runs/none does not exist"),
        (("--from", ".", "--compare", "verl"), "--compare and --from exclude each other"),
        (("--from", ".", "--log", "a.jsonl"), "--log and --from exclude each other"),
        ((".",), ". is a folder: name a scenario file, or a run with --from ."),
        (("small.yaml", "--compare", "rolpacker"), 'Did you mean "rollpacker"?'),
        (("small.yaml", "--compare", "verl,"), 'there is no system ""'),
        (("small.yaml", "system=oracl"), 'Did you mean "oracle"?'),
        (("small.yaml", "rollout.tensor_paralel=2"), 'Did you mean "tensor_parallel"?'),
        (("small.yaml", "steps=0"), "steps (override steps=0) must be at least 1"),
        (("small.yaml", "--jobs", "0"), "--jobs must be at least 1, not 0"),
        (("small.yaml", "--picture", "a.jpg"), "the name must end in .png, .svg, .pdf"),
        (("small.yaml", "--picture", "no/a.png"), "--picture no/a.png: there is no folder no"),
        (("small.yaml", "--log", "no/a.jsonl"), "--log no/a.jsonl: there is no folder no"),
        (
            ("small.yaml", "--log", "a.jsonl", "--compare", "verl,oracle"),
            "--log writes the log of one system, and --compare has 2",
        ),
    ],
)
def test_bad_input_is_one_message(folder, arguments, message, capsys):
    before = sorted(folder.rglob("*"))
    assert simulate(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.startswith("rollpacker: ") and err.count("\n") == 1 and message in err
    assert sorted(folder.rglob("*")) == before


def test_a_trace_that_cannot_be_read_is_one_message_from_a_process_too(folder, capsys):
    (folder / "lengths.jsonl").write_text('{"length": 5}\n{"length": -1}\n')
    trace = "lengths={trace: lengths.jsonl}"
    assert simulate("small.yaml", trace, "--compare", "verl,oracle", "--jobs", "2") == 2
    err = capsys.readouterr().err
    assert "lengths.jsonl, line 2" in err and "Traceback" not in err


def test_a_log_that_cannot_be_finished_is_not_there(folder, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run.jsonl")

    monkeypatch.setattr(records, "encode", full)
    assert simulate("small.yaml", "--log", "run.jsonl", "--no-picture") == 5
    assert "the disk is full" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]


# -- progress and interrupts -------------------------------------------------------


def test_the_bar_appears_on_a_terminal_when_it_is_worthwhile(monkeypatch):
    bars = []
    monkeypatch.setattr(simulations._Bar, "_make", lambda self: bars.append(FakeBar()) or bars[-1])
    now = [0.0]
    monkeypatch.setattr(simulations.time, "monotonic", lambda: now[0])
    for terminal in (False, True):
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda t=terminal: t))
        bar = simulations._Bar(10)
        bar.show(1)
        assert not bars
        now[0] += simulations.BAR_AFTER_S
        bar.show(2)
        bar.show(3)
        bar.close()
    (shown,) = bars
    assert shown.completed == [2, 3] and shown.stopped


class FakeBar:
    def __init__(self) -> None:
        self.task_ids = [0]
        self.completed: list[int] = []
        self.stopped = False

    def update(self, task: int, completed: int) -> None:
        self.completed.append(completed)

    def stop(self) -> None:
        self.stopped = True


def test_ctrl_c_ends_all_processes(folder):
    command = [sys.executable, "-m", "rollpacker.cli.main", "simulate", "small.yaml"]
    command += ["steps=1000000", "--compare", "verl,rlhfuse", "--jobs", "2", "--no-picture"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 2:  # it has begun
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)  # the workers hold the pipes too
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "rollpacker: interrupted"


def test_ctrl_c_is_raised_where_it_cannot_leave_a_lock_of_the_workers_taken(folder, monkeypatch):
    """It used to be raised wherever the main process was: between taking the lock of the counter of
    steps and the `try` that lets go of it, the workers waited for ever."""
    went_on = []

    def interrupted_inside(bar, done):
        signal.raise_signal(signal.SIGINT)
        went_on.append(done)

    monkeypatch.setattr(simulations._Bar, "show", interrupted_inside)
    endless = load_scenario("small.yaml", ["steps=1000000"])
    with pytest.raises(KeyboardInterrupt):
        simulations.simulate_all({"one": endless, "other": endless}, jobs=2)
    assert len(went_on) == 1


def test_ctrl_c_while_the_processes_are_started_ends_them_too(folder, monkeypatch):
    """It is held until all are started, and raised then."""

    @contextmanager
    def interrupted() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_workers, "interrupt_held", interrupted)
    endless = load_scenario("small.yaml", ["steps=1000000"])
    with pytest.raises(KeyboardInterrupt):
        simulations.simulate_all({"one": endless, "other": endless}, jobs=2)


# -- a trainer in stages ---------------------------------------------------------------

STAGED = (
    "train.pipeline={stages: 2, micro_batches: 4, op_times: "
    "{f_s: [0.1, 0.1], i_s: [0.1, 0.1], w_s: [0.1, 0.1]}, slow_links_s: {0: 0.5}}"
)


def test_orders_of_stages_are_compared(folder, capsys):
    assert simulate("small.yaml", STAGED, "--compare", "1f1b,ready,rollpacker") == 0
    out, err = capsys.readouterr()
    assert not err
    table = out[out.index("sweeps through the stages") :].splitlines()
    assert [line.split()[:3] for line in table[2:5]] == [
        ["1f1b", "1f1b", "direct"],
        ["ready", "ready", "host"],
        ["rollpacker", "ready", "host"],
    ]
    assert "pipeline     sum" in out and "2 stages" not in out
    assert (folder / "small-timeline.png").read_bytes().startswith(b"\x89PNG")
    assert max(map(len, out.splitlines())) <= 100


def test_json_tells_of_stages_where_there_are_any(capsys):
    assert simulate("small.yaml", STAGED, "--compare", "ready,zero-bubble", "--json") == 0
    systems = json.loads(capsys.readouterr().out)["systems"]
    ready, blocking = systems["ready"]["pipeline"], systems["zero-bubble"]["pipeline"]
    assert ready["links"] == "host" and blocking["links"] == "direct"
    assert 4 * 0.3 + 2 * 0.5 - 0.1 <= ready["sweep_s"] + 1e-9 < blocking["sweep_s"]
    assert systems["ready"]["bubble"]["pipeline"] > 0
    assert simulate("small.yaml", "--json") == 0
    assert "pipeline" not in json.loads(capsys.readouterr().out)["systems"]["rollpacker"]


def test_a_picture_has_a_lane_for_each_stage(folder):
    assert simulate("small.yaml", STAGED, "--picture", "lanes.svg") == 0
    drawn = (folder / "lanes.svg").read_text()
    assert drawn.count("PatchCollection_") >= 6  # of F, I and W, on two stages


def test_few_micro_batches_are_noted_with_the_bubble(capsys):
    few = STAGED.replace("micro_batches: 4", "micro_batches: 1")
    assert simulate("small.yaml", few, "--no-picture") == 0
    err = capsys.readouterr().err
    assert "sweeps of 1 micro-batches through 2 stages, which are idle" in err and "%" in err


def test_an_order_of_stages_needs_stages(capsys):
    assert simulate("small.yaml", "--compare", "rollpacker,zero-bubble") == 2
    assert "set train.pipeline.stages" in capsys.readouterr().err
