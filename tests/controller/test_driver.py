"""The controller with fake parts: it obeys, it waits with deadlines, it fails loudly."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.exactly_once import check
from rollpacker.controller.base import DeadlineExceeded, RunError
from rollpacker.controller.checkpoint import newest_checkpoint
from rollpacker.controller.replay import replay
from rollpacker.core.commands import Launch, RoundKind
from rollpacker.core.events import Committed, Trained
from rollpacker.core.records import Note, Record
from rollpacker.report.log import EventLog
from rollpacker.rewards.base import Failed, RewardInput, Scored
from rollpacker.trainer.base import NonFiniteError
from tests.controller.fakes import FakeEngine, FakeReward, FakeTrainer, drive, make, run_config


def test_a_run_trains_logs_and_replays(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    controller, recorder = make(tmp_path, run_config(steps=6), trainer=trainer)
    assert drive(controller) == "every step is done"
    assert trainer.version == len(trainer.trained) >= 6
    result = check(tmp_path / "events.jsonl")
    assert result["problems"] == [] and result["trained"] == result["fetched"] > 20
    replayed = replay(EventLog(tmp_path / "events.jsonl"))
    assert replayed.difference is None and replayed.num_steps == result["steps"]
    kinds = {
        c.kind
        for e in recorder.entries
        if isinstance(e, Record)
        for c in e.commands
        if isinstance(c, Launch)
    }
    assert {RoundKind.SHORT, RoundKind.LONG} <= kinds
    evaluations = [
        e.step for e in recorder.entries if isinstance(e, Note) and e.name == "evaluation"
    ]
    assert evaluations[:3] == [0, 2, 4]
    assert newest_checkpoint(tmp_path / "checkpoints").step == result["steps"]
    assert list((tmp_path / "samples").glob("*.parquet"))


def test_replay_shows_the_first_difference(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, run_config(steps=2))
    drive(controller)
    path = tmp_path / "events.jsonl"
    lines = path.read_text().splitlines()
    broken = next(i for i, line in enumerate(lines) if '"Abort"' in line)
    entry = json.loads(lines[broken])
    entry["commands"] = [c for c in entry["commands"] if c["command"] != "Abort"]
    lines[broken] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    result = replay(EventLog(path))
    assert result.difference is not None
    assert "Abort(" in result.difference and "recorded" in result.difference


def test_an_engine_that_says_nothing_is_named(tmp_path: Path) -> None:
    config = run_config(generation_s=0.6)
    controller, _ = make(tmp_path, config, engine=FakeEngine(silent=True))
    with pytest.raises(DeadlineExceeded, match="responses of an evaluation"):
        drive(controller)


def test_a_round_that_hangs_names_the_samples_it_waits_for(tmp_path: Path) -> None:
    engine = FakeEngine()
    controller, _ = make(tmp_path, run_config(generation_s=0.6), engine=engine)
    original = engine.submit

    def submit(requests: list) -> None:
        engine.silent = requests[0].sample.prompt.source == "train"
        original(requests)

    engine.submit = submit  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match=r"responses \(train/0/.*deadlines\.generation_s"):
        drive(controller)


def test_a_reward_that_hangs_is_named(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, run_config(reward_s=0.6), reward=FakeReward(hangs=True))
    controller.parts = _without_eval(controller.parts)
    with pytest.raises(DeadlineExceeded, match=r"verdicts \(train/.*from the rewards"):
        drive(controller)


def _without_eval(parts):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(parts, eval_prompts=None)


def test_an_engine_that_dies_in_an_evaluation_ends_the_run_at_once(tmp_path: Path) -> None:
    engine = FakeEngine()

    def submit(requests: list) -> None:
        engine._on_error(MemoryError("out of memory"))

    engine.submit = submit  # type: ignore[method-assign]
    controller, _ = make(tmp_path, run_config(), engine=engine)
    with pytest.raises(MemoryError, match="out of memory"):
        drive(controller)


def test_a_run_without_any_verdict_gives_up_and_says_why(tmp_path: Path) -> None:
    reward = FakeReward(verdict=lambda sample: Failed(reason="the judge is down"))
    controller, _ = make(tmp_path, run_config(steps=50), reward=reward)
    with pytest.raises(RunError, match=r"3 steps in a row.*the judge is down"):
        drive(controller)


def test_a_stop_saves_first_and_the_resumed_run_evaluates(tmp_path: Path) -> None:
    controller, recorder = make(tmp_path, run_config(steps=8))
    original = recorder.feed

    def feed(entry: object) -> None:
        original(entry)
        if (
            isinstance(entry, Record)
            and isinstance(entry.event, Committed)
            and entry.event.step == 3
        ):
            controller.request_stop("enough")

    recorder.feed = feed  # type: ignore[method-assign]
    drive(controller)
    steps = [e.step for e in recorder.entries if isinstance(e, Note) and e.name == "evaluation"]
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.step == 4 and steps == [0, 2]
    assert checkpoint.state["evaluated_step"] == 2


def test_no_verdict_is_recorded_and_never_trained_on(tmp_path: Path) -> None:
    def verdict(sample: RewardInput) -> Scored | Failed:
        return Failed(reason="made to") if len(sample.completion_tokens) == 3 else Scored(value=1.0)

    controller, _ = make(tmp_path, run_config(steps=4), reward=FakeReward(verdict=verdict))
    drive(controller)
    assert check(tmp_path / "events.jsonl")["problems"] == []
    assert '"value":null' in (tmp_path / "events.jsonl").read_text()


def test_nan_in_training_stops_with_the_last_checkpoint_intact(tmp_path: Path) -> None:
    trainer = FakeTrainer(fail_at=4, error=NonFiniteError("the loss is nan (step 4)"))
    controller, _ = make(tmp_path, run_config(steps=9), trainer=trainer)
    with pytest.raises(NonFiniteError):
        drive(controller)
    assert newest_checkpoint(tmp_path / "checkpoints").step == 2


def test_a_wish_to_stop_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    controller, recorder = make(tmp_path, run_config(steps=1000))
    original = recorder.feed

    def feed(entry: object) -> None:
        original(entry)
        if isinstance(entry, Record) and isinstance(entry.event, Trained) and entry.event.step == 3:
            threading.Thread(target=controller.request_stop, args=("enough",)).start()

    recorder.feed = feed  # type: ignore[method-assign]
    assert drive(controller) == "enough"
    commits = [
        e.event
        for e in recorder.entries
        if isinstance(e, Record) and isinstance(e.event, Committed)
    ]
    assert commits[-1].checkpointed and commits[-1].step >= 3
    assert newest_checkpoint(tmp_path / "checkpoints").step == commits[-1].step


def test_the_controller_does_not_import_torch() -> None:
    import subprocess

    code = (
        "import sys, rollpacker.controller.driver, rollpacker.controller.replay;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
