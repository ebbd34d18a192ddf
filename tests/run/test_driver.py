"""The controller with fake parts: it obeys, it waits with deadlines, it fails loudly."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from benchmarks.exactly_once import check
from rollpacker.config.running import EvalConfig
from rollpacker.config.schema import RunConfig
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig, RewardScheduleConfig
from rollpacker.core.commands import (
    CancelScore,
    Launch,
    Release,
    RoundKind,
    Score,
    StartGradients,
    TrainOn,
)
from rollpacker.core.events import Committed, SampleScored, StopRequested, Trained
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.records import LogError, Note, Record, decode, encode
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.engine import EngineStatus
from rollpacker.report.log import EventLog
from rollpacker.report.summary import summarize_entries
from rollpacker.rewards.reward import Cause, Failed, RewardInput, Scored
from rollpacker.run.errors import DeadlineExceeded, RunError
from rollpacker.run.folder.checkpoint import newest_checkpoint
from rollpacker.run.replay import equal_commands, replay
from rollpacker.trainer.trainer import NonFiniteError, TrainConfig
from tests.run.fakes import (
    FakeEngine,
    FakeReward,
    FakeTrainer,
    Recorder,
    drive,
    make,
    run_config,
)

_SAMPLE = SampleId(PromptId("train", 0, 5), 1, 0)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (TailBatchingConfig(stragglers="pool"), {RoundKind.SHORT, RoundKind.FLUSH}),
        (TailBatchingConfig(), {RoundKind.SHORT, RoundKind.LONG}),
        (TailBatchingConfig(carry="none"), {RoundKind.SHORT, RoundKind.LONG}),
        (TailBatchingConfig(selection="published"), {RoundKind.SHORT, RoundKind.LONG}),
    ],
    ids=["pool", "queue", "no carrying", "published"],
)
def test_a_run_trains_logs_and_replays(
    tmp_path: Path, tail: TailBatchingConfig, expected: set[RoundKind]
) -> None:
    trainer = FakeTrainer()
    config = replace(run_config(steps=6), tail_batching=tail)
    controller, recorder = make(tmp_path, config, trainer=trainer)
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
    assert expected <= kinds
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
    controller, _ = make(
        tmp_path, run_config(reward_s=0.6), reward=FakeReward(hangs=True), evaluates=False
    )
    with pytest.raises(DeadlineExceeded, match=r"verdicts \(train/.*from the rewards"):
        drive(controller)


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
    assert checkpoint.state["job"]["evaluated_step"] == 2


def test_a_stop_in_the_last_step_leaves_its_evaluation_to_the_resume(tmp_path: Path) -> None:
    config = replace(
        run_config(steps=1),
        tail_batching=TailBatchingConfig(enabled=False),
        eval=EvalConfig(every_steps=None),
    )
    controller, recorder = make(tmp_path, config)
    controller.parts.job.handle(StopRequested(time_s=0.0, reason="enough"))
    assert drive(controller) == "enough"
    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.step == 1 and evaluated_steps(recorder) == [0]
    job = Job.restore(controller.parts.job.config, checkpoint.state["job"])
    resumed, recorder = make(tmp_path, config, job=job)
    assert drive(resumed) == "every step is done"
    assert evaluated_steps(recorder) == [1]


def evaluated_steps(recorder: Recorder) -> list[int]:
    return [e.step for e in recorder.entries if isinstance(e, Note) and e.name == "evaluation"]


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


# -- gradients before a round is over --------------------------------------------------


def streaming(steps: int) -> RunConfig:
    stream = StreamConfig(enabled=True, reward_wait=True)
    return replace(run_config(steps=steps), stream_trainer=stream)


def slow_for_long_responses() -> FakeReward:
    """Groups of short responses have their verdicts while others wait for theirs."""
    return FakeReward(delay=lambda sample: 0.15 if len(sample.completion_tokens) > 5 else 0.0)


def recorded(recorder: Recorder, kind: type) -> list[Any]:
    records = [entry for entry in recorder.entries if isinstance(entry, Record)]
    return [c for record in records for c in record.commands if isinstance(c, kind)]


def test_gradients_begin_while_verdicts_are_awaited(tmp_path: Path) -> None:
    trainer = FakeTrainer(accumulate_s=0.3)
    controller, recorder = make(
        tmp_path,
        streaming(steps=3),
        engine=FakeEngine(step_s=0.005),
        trainer=trainer,
        reward=slow_for_long_responses(),
    )
    drive(controller)
    early = recorded(recorder, StartGradients)
    assert early and "rescale" in trainer.calls
    # Every sample is in its step's gradient once, with the same weight, streamed or not.
    steps = recorded(recorder, TrainOn)
    for step, weights in zip(steps, trainer.weights, strict=True):
        samples = [sample for group in step.groups for sample in group]
        assert sorted(weights) == sorted(samples)
        assert list(weights.values()) == pytest.approx([1 / len(samples)] * len(samples))
    # Verdicts were taken in while the trainer worked.
    notes = [e for e in recorder.entries if isinstance(e, Note) and e.name == "gradients"]
    scored = [
        e for e in recorder.entries if isinstance(e, Record) and isinstance(e.event, SampleScored)
    ]
    assert notes and all(note.seconds >= 0.3 for note in notes)
    assert any(n.time_s - n.seconds < s.time_s < n.time_s for n in notes for s in scored)
    # What was asked for when the step was due already was trained on with the rest.
    assert sum(n.metrics["groups"] for n in notes) <= sum(len(c.groups) for c in early)
    assert check(tmp_path / "events.jsonl")["problems"] == []
    log = list(EventLog(tmp_path / "events.jsonl"))
    replayed = replay(log)
    assert replayed.difference is None and replayed.num_steps == len(steps)
    summary = summarize_entries(log)
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_s"], abs=1e-6)
    assert summary["seconds"]["training"] >= sum(note.seconds for note in notes) - 0.01


def test_without_streaming_a_step_is_one_gradient(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    controller, recorder = make(
        tmp_path,
        run_config(steps=3),
        engine=FakeEngine(step_s=0.005),
        trainer=trainer,
        reward=slow_for_long_responses(),
    )
    drive(controller)
    assert not recorded(recorder, StartGradients)
    assert trainer.calls == ["accumulate", "apply"] * trainer.version


def test_gradients_while_the_engine_works_are_refused(tmp_path: Path) -> None:
    class Busy(FakeEngine):
        def status(self) -> EngineStatus:
            return replace(super().status(), num_waiting=1)

    controller, _ = make(
        tmp_path,
        streaming(steps=3),
        engine=Busy(step_s=0.005),
        reward=slow_for_long_responses(),
    )
    with pytest.raises(AssertionError, match=r"where \d+ samples run"):
        drive(controller)


def test_no_number_in_early_gradients_names_the_step(tmp_path: Path) -> None:
    class Broken(FakeTrainer):
        async def accumulate(self, samples: Any, replicas: Any = None) -> None:
            if controller.parts.job.phase is Phase.ROLLING:
                raise NonFiniteError("the loss is nan")
            await super().accumulate(samples, replicas)

    controller, _ = make(
        tmp_path,
        streaming(steps=20),
        engine=FakeEngine(step_s=0.005),
        trainer=Broken(),
        reward=slow_for_long_responses(),
    )
    with pytest.raises(NonFiniteError, match=r"step \d: the loss is nan; no update was applied"):
        drive(controller)


# -- loss weights, deadlines of checks -------------------------------------------------


def test_loss_weights_reach_the_trainer_and_the_samples_file(tmp_path: Path) -> None:
    import pyarrow.parquet

    trainer = FakeTrainer()
    controller, _ = make(tmp_path, run_config(steps=2), trainer=trainer)
    job = controller.parts.job
    original = job.handle

    def handle(event: Any) -> list[Any]:
        commands = original(event)
        for index, command in enumerate(commands):
            if isinstance(command, TrainOn) and command.step == 1:
                weights = tuple(tuple(0.5 + s.index for s in group) for group in command.groups)
                commands[index] = structs.replace(command, weights=weights)
        return commands

    job.handle = handle  # type: ignore[method-assign]
    drive(controller)
    first, second = trainer.weights[:2]
    assert all(
        weight == pytest.approx((0.5 + sample.index) / len(first))
        for sample, weight in first.items()
    )
    assert set(second.values()) == {1 / len(second)}
    rows = [
        row
        for path in sorted((tmp_path / "samples").glob("*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ]
    rows = [row for row in rows if row["trained"]]
    of_first = {row["sample_id"]: row["loss_weight"] for row in rows if row["step"] == 1}
    assert of_first == {str(sample): 0.5 + sample.index for sample in first}
    assert {row["loss_weight"] for row in rows if row["step"] == 2} == {1.0}


def scored_events(recorder: Any) -> list[SampleScored]:
    return [
        entry.event
        for entry in recorder.entries
        if isinstance(entry, Record) and isinstance(entry.event, SampleScored)
    ]


def test_the_reward_is_told_the_deadline_in_force(tmp_path: Path) -> None:
    deadline = AdaptiveDeadlineConfig(min_s=0.05, max_s=0.5, adaptive=False)
    rewards = RewardScheduleConfig(kinds={"train": RewardKindConfig(deadline=deadline)})

    def hangs(sample: RewardInput) -> bool:
        return len(sample.completion_tokens) == 3

    reward = FakeReward(delay=lambda sample: 30.0 if hangs(sample) else 0.0)
    controller, recorder = make(
        tmp_path, run_config(steps=2), reward=reward, rewards=rewards, evaluates=False
    )
    drive(controller)
    assert {command.timeout_s for command in recorded(recorder, Score)} == {0.5}
    verdicts = [event for event in scored_events(recorder) if event.cause != "cancelled"]
    late = [verdict for verdict in verdicts if verdict.timed_out]
    assert late and len(late) < len(verdicts)
    assert all(verdict.value == 0 and verdict.seconds == 0.5 for verdict in late)
    assert all(v.seconds is not None and v.seconds < 0.5 for v in verdicts if not v.timed_out)
    assert reward.closed
    assert check(tmp_path / "events.jsonl")["problems"] == []
    assert replay(EventLog(tmp_path / "events.jsonl")).difference is None


def test_the_machinery_is_asked_again_and_never_trained_on_as_a_zero(tmp_path: Path) -> None:
    asked: Counter[tuple[int, ...]] = Counter()

    def verdict(sample: RewardInput) -> Scored | Failed:
        asked[sample.completion_tokens] += 1
        if len(sample.completion_tokens) == 3:
            return Failed(reason="the worker died", cause=Cause.INFRASTRUCTURE)
        return Scored(value=1.0)

    controller, recorder = make(
        tmp_path, run_config(steps=3), reward=FakeReward(verdict=verdict), evaluates=False
    )
    drive(controller)
    failed = Counter(
        event.sample for event in scored_events(recorder) if event.cause == "infrastructure"
    )
    assert set(failed.values()) <= {1, 2}  # once, if its prompt was deferred meanwhile
    assert 2 in failed.values()
    trained = {s for c in recorded(recorder, TrainOn) for group in c.groups for s in group}
    assert not set(failed) & trained
    assert replay(EventLog(tmp_path / "events.jsonl")).difference is None


def test_checks_that_are_not_needed_any_more_are_cancelled(tmp_path: Path) -> None:
    """In a race on verdicts, the check of a surplus sample ends at once, not after its 8 s."""
    rewards = RewardScheduleConfig(kinds={"train": RewardKindConfig(workers=64)})
    config = replace(
        run_config(steps=2),
        tail_batching=TailBatchingConfig(
            selection="published", race="scored", sample_factor=3.0, prompt_factor=2.0
        ),
    )
    reward = FakeReward(delay=lambda s: 8.0 if len(s.completion_tokens) == 1 else 0.0)
    controller, recorder = make(tmp_path, config, reward=reward, rewards=rewards, evaluates=False)
    drive(controller)
    entries = [entry for entry in recorder.entries if isinstance(entry, Record)]
    cancelled = {
        s: entry.time_s
        for entry in entries
        for command in entry.commands
        if isinstance(command, CancelScore)
        for s in command.samples
    }
    answered = {
        entry.event.sample: entry.time_s
        for entry in entries
        if isinstance(entry.event, SampleScored) and entry.event.cause == "cancelled"
    }
    assert answered
    assert all(answered[s] - cancelled[s] < 7.0 for s in answered)
    assert replay(EventLog(tmp_path / "events.jsonl")).difference is None


def test_an_outage_that_the_rewards_wait_for_does_not_end_the_run(tmp_path: Path) -> None:
    reward = FakeReward(delay=lambda sample: 1.2, down="the judge has been down for 1 s")
    config = replace(run_config(steps=1, reward_s=0.4), eval=EvalConfig(every_steps=None))
    controller, _ = make(tmp_path, config, reward=reward, evaluates=False)
    assert drive(controller) == "every step is done"


def test_the_slowest_checks_keep_their_text(tmp_path: Path) -> None:
    """Also those without a verdict, which are not trained on."""
    import pyarrow.parquet

    def verdict(sample: RewardInput) -> Scored | Failed:
        seconds = float(len(sample.completion_tokens))
        if seconds == 3:
            return Failed(reason="unreadable", seconds=99.0)
        return Scored(value=1.0, seconds=seconds)

    controller, _ = make(
        tmp_path, run_config(steps=3), reward=FakeReward(verdict=verdict), evaluates=False
    )
    drive(controller)
    rows = [
        row
        for path in sorted((tmp_path / "samples").glob("*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ]
    slowest = [row for row in rows if row["check_s"] == 99.0]
    assert slowest and not any(row["trained"] for row in slowest)
    assert all(row["completion"] == "xxx" and row["reward"] is None for row in slowest)
    assert all(row["check_s"] == row["num_tokens"] for row in rows if row["trained"])


@pytest.mark.parametrize(
    "command",
    [
        TrainOn(step=3, groups=((_SAMPLE,),), weights=((0.1 + 0.2,),)),
        TrainOn(step=3, groups=((_SAMPLE,),)),
        StartGradients(step=3, groups=((_SAMPLE,), (_SAMPLE,))),
        Release(devices=(2, 3)),
        Score(sample=_SAMPLE, timeout_s=2.5),
        CancelScore(samples=(_SAMPLE,)),
        Launch(round=1, kind=RoundKind.CASCADE, samples=(_SAMPLE,), version=0, tensor_parallel=2),
    ],
)
def test_commands_survive_the_log(command: Any) -> None:
    event = SampleScored(time_s=1.5, sample=_SAMPLE, value=0.5, seconds=0.25)
    record = Record(time_s=1.5, event=event, commands=(command,), cost_s=0.0)
    assert decode(encode(record)) == record
    with pytest.raises(LogError):
        decode(encode(record).replace('"groups":', '"troops":').replace('"sample":', '"simple":'))


def test_the_controller_does_not_import_torch() -> None:
    import subprocess

    code = (
        "import sys, rollpacker.run.driver, rollpacker.run.replay;sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("weights", "same"),
    [
        (((1.5, 0.5), (1.0,)), True),
        (((1.5 + 1e-9, 0.5), (1.0,)), True),
        (((1.501, 0.5), (1.0,)), False),
        (((1.5,), (0.5, 1.0)), False),
        (((1.5, 0.5),), False),
        (None, False),
    ],
)
def test_a_replay_forgives_the_last_digits_of_loss_weights(weights: Any, same: bool) -> None:
    groups = ((_SAMPLE, _SAMPLE), (_SAMPLE,))
    recorded = TrainOn(step=1, groups=groups, weights=((1.5, 0.5), (1.0,)))
    assert equal_commands([structs.replace(recorded, weights=weights)], [recorded]) is same
    assert not equal_commands([structs.replace(recorded, step=2, weights=weights)], [recorded])
    assert not equal_commands([], [recorded])
    assert not equal_commands([Release(devices=())], [recorded])


def test_the_core_sees_the_times_that_the_log_has(tmp_path: Path) -> None:
    """Factors that are chosen for measured seconds must be chosen again in a replay."""
    controller, recorder = make(tmp_path, run_config(steps=2))
    drive(controller)
    log = [entry for entry in EventLog(tmp_path / "events.jsonl") if isinstance(entry, Record)]
    live = [entry for entry in recorder.entries if isinstance(entry, Record)]
    assert [entry.event for entry in log] == [entry.event for entry in live]


def test_factors_chosen_for_measured_times_replay(tmp_path: Path) -> None:
    tail = TailBatchingConfig(selection="published", prompt_factor="auto")
    config = replace(run_config(steps=40), tail_batching=tail)
    controller, _ = make(tmp_path, config, engine=FakeEngine(step_s=0.0005), evaluates=False)
    drive(controller)
    planner = controller.parts.job.lengths.planner
    assert planner is not None and planner.current is not None, "no factors were ever chosen"
    assert replay(EventLog(tmp_path / "events.jsonl")).difference is None


def test_a_step_of_two_updates_is_trained_once(tmp_path):
    config = replace(run_config(steps=2), train=TrainConfig(steps=2, updates_per_round=2))
    trainer = FakeTrainer()
    controller, recorder = make(tmp_path, config, trainer=trainer)
    assert drive(controller) == "every step is done"
    of_step = ["score", "accumulate", "update", "accumulate", "apply"]
    assert trainer.calls == of_step * trainer.version
    assert all(len(trained) == 4 for trained in trainer.trained), "two prompts of two samples each"
    events = [entry.event for entry in recorder.entries if isinstance(entry, Record)]
    trained = [event for event in events if isinstance(event, Trained)]
    assert [event.version for event in trained] == list(range(1, trainer.version + 1))
    assert trained[0].metrics["train/updates"] == 2
