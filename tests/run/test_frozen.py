"""What the controller does with the same parts, compared with what it did before.

Nothing here depends on threads or on the clock: the engine, the trainer and the rewards take turns
on the event loop, and seconds are the engine's decode steps. Every event, command and note of a
run, every call of the trainer and every row of its samples is compared with `frozen_runs.json`.

    python -m tests.run.test_frozen [FOLDER]    writes that file, and the runs to FOLDER
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollpacker.config.running import EvalConfig
from rollpacker.config.schema import RunConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig, RewardScheduleConfig
from rollpacker.core.commands import Command, TrainOn
from rollpacker.core.events import Committed, SampleFailed, Trained
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.job.job import Job
from rollpacker.core.records import Note, Record, Session, encode
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.data.cursor import PromptCursor
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from rollpacker.rewards.reward import Cause, Failed, RewardInput, Scored
from rollpacker.run.folder.checkpoint import newest_checkpoint
from rollpacker.trainer.trainer import TrainSample
from tests.run.fakes import FakeEngine, FakeReward, FakeTrainer, drive, make, run_config

FROZEN = Path(__file__).with_name("frozen_runs.json")

TURNS = 40
"""Turns of the event loop in one decode step: whatever answers at once does so before the next."""


class Ticks:
    """The time of a run: decode steps, made by the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._count = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def wait(self, ticks: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._count += 1
        self._waiting.append((self.now + ticks, self._count, future))
        await future

    def go_on(self) -> None:
        self.now += 1
        due = sorted(entry for entry in self._waiting if entry[0] <= self.now)
        self._waiting = [entry for entry in self._waiting if entry[0] > self.now]
        for _, _, future in due:
            if not future.done():
                future.set_result(None)


class TickEngine(FakeEngine):
    """Makes its steps on the event loop."""

    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self._ticks = ticks

    def start(self, listener: Callable[..., None], on_error: Callable[..., None]) -> None:
        self._listener = listener
        self._task = asyncio.ensure_future(self._work_in_turns())
        self._task.add_done_callback(lambda task: task.exception() and on_error(task.exception()))

    async def _work_in_turns(self) -> None:
        while not self._closed:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self._ticks.go_on()
            if self._live or self._gone:
                outputs = self._step()
                if outputs:
                    self._listener(outputs)

    def _finished(self, sample: Any, request: GenerationRequest, length: int) -> EngineOutput:
        if sample.prompt.source == "train" and (sample.prompt.row + sample.index) % 11 == 3:
            return EngineOutput(SampleFailed(time_s=0, sample=sample, reason="made to"))
        return super()._finished(sample, request, length)


class TickTrainer(FakeTrainer):
    def __init__(self, ticks: Ticks, version: int = 0) -> None:
        super().__init__(version=version)
        self._ticks = ticks

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        await self._ticks.wait(2)
        await super().accumulate(samples, replicas)


class TickReward(FakeReward):
    """Slow for long responses; some checks fail, and some of their machinery."""

    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self._ticks = ticks
        self._asked: dict[tuple[int, ...], int] = {}

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed]:
        await self._ticks.wait(max(len(sample.completion_tokens) // 2 for sample in samples))
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: RewardInput) -> Scored | Failed:
        length = len(sample.completion_tokens)
        seconds = float(length)
        text = str(sample.prompt)
        if text.endswith("7"):
            return Failed(reason="cannot be read", seconds=seconds)
        if text.endswith("4") and length == 5:
            return Failed(reason="a worker died", cause=Cause.INFRASTRUCTURE, seconds=seconds)
        return Scored(value=length % 3 / 2, parts={"fake": length % 3 / 2}, seconds=seconds)


PUBLISHED = TailBatchingConfig(selection="published")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run's settings, and when it is stopped and taken up again."""

    tail: TailBatchingConfig = PUBLISHED
    stream: StreamConfig = field(default_factory=StreamConfig)
    sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    rewards: RewardScheduleConfig = field(default_factory=RewardScheduleConfig)
    evaluate: int | None = 2
    steps: int = 6
    stop_at: type | None = None
    stop_step: int = 3
    resume: bool = False

    def config(self) -> RunConfig:
        config = run_config(steps=self.steps)
        return replace(
            config,
            tail_batching=self.tail,
            stream_trainer=self.stream,
            rollout=replace(config.rollout, dynamic_sampling=self.sampling),
            eval=EvalConfig(every_steps=self.evaluate),
        )


ALONE = RewardScheduleConfig(kinds={"train": RewardKindConfig(workers=3)})
CASES = {
    "plain": Case(tail=replace(PUBLISHED, enabled=False)),
    "tail": Case(),
    "tiers": Case(
        tail=replace(PUBLISHED, tiers=(Tier(prompt_factor=1.25, sample_factor=1.5),)), steps=8
    ),
    "debias": Case(tail=replace(PUBLISHED, debias="moments"), steps=12),
    "streamed": Case(stream=StreamConfig(enabled=True, reward_wait=True)),
    "alone": Case(rewards=ALONE),
    "scored-race": Case(
        tail=replace(PUBLISHED, race="scored", sample_factor=2.0, prompt_factor=1.5), rewards=ALONE
    ),
    "dynamic-sampling": Case(sampling=DynamicSamplingConfig(enabled=True), steps=4),
    "no-evaluation": Case(evaluate=None, steps=3),
    "stopped-in-training": Case(stop_at=Trained, resume=True),
    "stopped-at-a-commit": Case(stop_at=Committed, resume=True, evaluate=3),
    "stopped-streamed": Case(
        stop_at=Trained, resume=True, stream=StreamConfig(enabled=True, reward_wait=True)
    ),
}


OTHER_KEYS = ("lengths", "planner", "max_response_tokens")
"""Of a job's state: numbers of a fit, and what was added since."""


def run(case: Case, folder: Path) -> list[str]:
    """What the run did, line by line."""
    folder.mkdir()
    ticks = Ticks()
    lines, controller = _session(case, folder, ticks, None)
    if case.resume:
        resumed, _ = _session(replace(case, stop_at=None), folder, ticks, controller)
        lines += resumed
    return lines + _rows(folder)


def _session(case: Case, folder: Path, ticks: Ticks, before: Any) -> tuple[list[str], Any]:
    trainer = TickTrainer(ticks)
    controller, recorder = make(
        folder,
        case.config(),
        engine=TickEngine(ticks),
        trainer=trainer,
        reward=TickReward(ticks),
        rewards=case.rewards,
        **_resumed(case, folder, before),
    )
    if before is not None:
        checkpoint = newest_checkpoint(folder / "checkpoints")
        trainer.load(checkpoint.folder)
        (handle,) = controller.parts.engines.handles.values()
        asyncio.run(handle.engine.update_weights(trainer.version))
    if case.stop_at is not None:
        feed = recorder.feed

        def stopping(entry: Any) -> None:
            feed(entry)
            is_record = isinstance(entry, Record) and isinstance(entry.event, case.stop_at)
            if is_record and entry.event.step == case.stop_step:
                controller.request_stop("enough")

        recorder.feed = stopping  # type: ignore[method-assign]
    reason = drive(controller)
    return [
        *map(_line, recorder.entries),
        f"ended: {reason}",
        f"trainer: {' '.join(trainer.calls)}",
        *(f"weights: {[(str(s), w) for s, w in step.items()]}" for step in trainer.weights),
        f"checkpoint: {_checkpoint(folder)}",
    ], controller


def _resumed(case: Case, folder: Path, before: Any) -> dict[str, Any]:
    if before is None:
        return {}
    state = newest_checkpoint(folder / "checkpoints").state
    job = Job.restore(before.parts.job.config, state["job"])
    cursor = PromptCursor("train", len(before.parts.prompts.rows), 0, True, None)
    cursor.restore(state["cursor"])
    return {"job": job, "cursor": cursor}


NEW_METRICS = ("eval/rewards/", "eval/samples", "eval/stderr/", "timing_s/testing_gen")
"""Came later, and are made of what is there, or are seconds."""


def _line(entry: Record | Note | Session) -> str:
    """An entry without its times. Metrics of what takes real time are left out."""
    if isinstance(entry, Record):
        entry = msgspec.structs.replace(
            entry,
            time_s=0.0,
            cost_s=0.0,
            event=msgspec.structs.replace(entry.event, time_s=0.0),
            commands=tuple(map(_rounded, entry.commands)),
        )
    elif isinstance(entry, Note):
        of_old = {k: v for k, v in entry.metrics.items() if not k.startswith(NEW_METRICS)}
        entry = msgspec.structs.replace(entry, time_s=0.0, seconds=0.0, metrics=of_old)
    else:
        return f"session at step {entry.step}"
    plain = json.loads(encode(entry))
    if plain.get("event") == "SampleScored" and not plain["reason"] and plain["value"] is None:
        plain.pop("seconds")
    return json.dumps(plain, sort_keys=True)


def _rounded(command: Command) -> Command:
    """Loss weights come from a numerical fit; their last digits are the processor's."""
    if not isinstance(command, TrainOn) or command.weights is None:
        return command
    weights = tuple(tuple(round(w, 4) for w in group) for group in command.weights)
    return msgspec.structs.replace(command, weights=weights)


def _checkpoint(folder: Path) -> str:
    checkpoint = newest_checkpoint(folder / "checkpoints")
    state = {key: checkpoint.state[key] for key in ("job", "cursor")}
    job = {key: value for key, value in state["job"].items() if key not in OTHER_KEYS}
    for queue in (job["queue"], *job["tier_queues"]):  # as they were before anything was carried
        assert all(carried == [] for _, _, carried in queue)
        queue[:] = [waiting[:2] for waiting in queue]
    return json.dumps([checkpoint.step, job, state["cursor"]], sort_keys=True)


def _rows(folder: Path) -> list[str]:
    import pyarrow.parquet

    rows = [
        row
        for path in sorted((folder / "samples").glob("*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ]
    for row in rows:
        row["loss_weight"] = round(row["loss_weight"], 4)
        for column in ("row_where", "row", "rendered_prompt"):  # told since the runs were frozen
            del row[column]
    return [json.dumps(row) for row in rows]


def digest(lines: Sequence[str]) -> dict[str, Any]:
    return {
        "lines": len(lines),
        "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    }


@pytest.mark.parametrize("name", CASES)
def test_a_run_does_what_it_did(name: str, tmp_path: Path) -> None:
    frozen = json.loads(FROZEN.read_text())
    assert digest(run(CASES[name], tmp_path / name)) == frozen[name]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    frozen = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, case in CASES.items():
            lines = run(case, Path(temporary) / name)
            frozen[name] = digest(lines)
            if folder is not None:
                folder.mkdir(exist_ok=True)
                (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    FROZEN.write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    main()
