"""A trainer that is lost while a run drives it, and comes back in this very run."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from benchmarks.exactly_once import check
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Commit, StartGradients, TrainOn
from rollpacker.core.events import Trained, TrainerLost, TrainerReady
from rollpacker.core.job.phases import Phase
from rollpacker.core.records import Record
from rollpacker.engines.engine import GenerationRequest
from rollpacker.report.log import EventLog
from rollpacker.report.summary import summarize_entries
from rollpacker.run.error_messages import classify
from rollpacker.run.errors import DeadlineExceeded
from rollpacker.run.folder.checkpoint import newest_checkpoint
from rollpacker.run.replay import replay
from rollpacker.trainer.trainer import RanksLost, TrainerProcessError
from tests.run.fakes import FakeEngine, FakeReward, FakeTrainer, drive, make, run_config
from tests.run.test_driver import recorded, slow_for_long_responses, streaming


@dataclass
class Mortal(FakeTrainer):
    """It dies in calls, and can do nothing then before it is brought back."""

    dies_in: list[tuple[str, int]] = field(default_factory=list)
    """Which call of a method, counted from 1; those that fail count, too."""
    dead: str = ""
    restored_from: list[str | None] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    slow_restore: bool = False

    def _lives(self, method: str) -> None:
        self.counts[method] += 1
        if (method, self.counts[method]) in self.dies_in:
            self.dead = f"process 1 was killed in {method}"
        if self.dead:
            raise RanksLost(self.dead)

    def how_lost(self) -> str | None:
        self.counts["idle"] += 1
        if ("idle", self.counts["idle"]) in self.dies_in:
            self.dead = "process 1 was killed between two calls"
        return self.dead or None

    async def accumulate(self, samples: Any, replicas: Any = None) -> None:
        self._lives("accumulate")
        await super().accumulate(samples, replicas)

    async def apply(self) -> dict[str, float]:
        self._lives("apply")
        return await super().apply()

    async def hand_over(self) -> Any:
        self._lives("hand_over")
        return await super().hand_over()

    def save(self, folder: Path) -> None:
        folder.joinpath("half").write_text("written")
        self._lives("save")
        folder.joinpath("half").unlink()
        super().save(folder)

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        assert self.dead, "nobody was lost"
        self.dead, self._gradient = "", {}
        self.restored_from.append(None if checkpoint is None else checkpoint.name)
        self._lives("restore")
        for _ in range(6 if self.slow_restore else 0):
            await asyncio.sleep(0.1)
            tell()


def in_processes(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, processes=2))


def run(folder: Path, trainer: FakeTrainer, steps: int = 6) -> Any:
    controller, recorder = make(folder, in_processes(run_config(steps=steps)), trainer=trainer)
    assert drive(controller) == "every step is done"
    return recorder


def events(recorder: Any, kind: type) -> list[Any]:
    records = [entry for entry in recorder.entries if isinstance(entry, Record)]
    return [record.event for record in records if isinstance(record.event, kind)]


MOMENTS = [("accumulate", 2), ("apply", 4), ("restore", 2), ("hand_over", 5), ("save", 3)]


def test_it_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    plain, mortal = FakeTrainer(), Mortal(dies_in=MOMENTS)
    (tmp_path / "plain").mkdir()
    first = run(tmp_path / "plain", plain)
    (tmp_path / "mortal").mkdir()
    folder = tmp_path / "mortal"
    second = run(folder, mortal)
    assert mortal.trained == plain.trained and mortal.version == plain.version
    steps = [command.step for command in recorded(second, TrainOn)]
    assert steps == [command.step for command in recorded(first, TrainOn)], "said once"
    assert [event.step for event in events(second, Trained)] == steps
    assert len(recorded(second, Commit)) == len(recorded(first, Commit))
    assert len(events(second, TrainerLost)) == len(MOMENTS)
    assert len(events(second, TrainerReady)) == len(MOMENTS) - 1, "once it died on its way"
    assert mortal.restored_from[0] is None, "before the first checkpoint"
    assert "step_000002" in mortal.restored_from
    found = newest_checkpoint(folder / "checkpoints")
    assert not (found.folder / "half").exists()
    checked = check(folder / "events.jsonl")
    assert checked["problems"] == [] and checked["trainer"] == {"lost": len(MOMENTS)}
    lines = (folder / "events.jsonl").read_text().splitlines()
    ready = next(line for line in lines if "TrainerReady" in line)
    for wrong in ([line for line in lines if line != ready], [*lines, ready]):
        (tmp_path / "wrong.jsonl").write_text("\n".join(wrong))
        assert check(tmp_path / "wrong.jsonl")["problems"]
    assert replay(EventLog(folder / "events.jsonl")).difference is None
    num_rows = [
        sum(pyarrow.parquet.read_metadata(file).num_rows for file in at.glob("samples/*.parquet"))
        for at in (tmp_path / "plain", folder)
    ]
    assert num_rows[0] == num_rows[1] > 0, "a row twice"


def test_the_seconds_of_a_recovery_are_told(tmp_path: Path) -> None:
    config = in_processes(run_config(steps=4, train_s=0.3))
    trainer = Mortal(dies_in=[("apply", 2)], slow_restore=True)
    controller, _ = make(tmp_path, config, trainer=trainer)
    drive(controller)
    log = list(EventLog(tmp_path / "events.jsonl"))
    summary = summarize_entries(log)
    assert summary["trainer"]["losses"] == 1
    assert summary["trainer"]["mean_away_s"] >= 0.6, "longer than a deadline, with signs of life"
    assert summary["seconds"]["recovery"] >= 0.6
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_s"], abs=1e-6)


def test_a_recovery_that_hangs_passes_its_deadline(tmp_path: Path) -> None:
    class Hangs(Mortal):
        async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
            await asyncio.sleep(1000)

    config = in_processes(run_config(train_s=0.3))
    controller, _ = make(tmp_path, config, trainer=Hangs(dies_in=[("apply", 1)]))
    with pytest.raises(DeadlineExceeded, match=r"brought back to version 0.*deadlines\.train_s"):
        drive(controller)


def test_one_that_dies_while_nobody_asks_is_back_before_it_is_needed(tmp_path: Path) -> None:
    class Slow(FakeEngine):
        """Its samples wait until the trainer was looked at."""

        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            self.silent = not trainer.restored_from
            super().submit(requests)

    trainer = Mortal(dies_in=[("idle", 1)])
    engine = FakeEngine(step_s=0.05)
    config = in_processes(run_config(steps=2))
    controller, recorder = make(tmp_path, config, trainer=trainer, engine=engine, evaluates=False)
    drive(controller)
    assert trainer.restored_from == [None] and trainer.counts["accumulate"] == trainer.version
    (lost,) = events(recorder, TrainerLost)
    assert "between two calls" in lost.reason


def test_gradients_that_were_begun_are_begun_anew(tmp_path: Path) -> None:
    class DiesEarly(Mortal):
        """In the first call that comes while a round goes on, and the one after its recovery."""

        async def accumulate(self, samples: Any, replicas: Any = None) -> None:
            if controller.parts.job.phase is Phase.ROLLING and not self.dies_in:
                count = self.counts["accumulate"]
                self.dies_in = [("accumulate", count + 1), ("accumulate", count + 2)]
            await super().accumulate(samples, replicas)

    trainer = DiesEarly(accumulate_s=0.1)
    controller, recorder = make(
        tmp_path,
        in_processes(streaming(steps=6)),
        engine=FakeEngine(step_s=0.005),
        trainer=trainer,
        reward=slow_for_long_responses(),
    )
    drive(controller)
    assert recorded(recorder, StartGradients) and len(trainer.restored_from) == 2
    for step, weights in zip(recorded(recorder, TrainOn), trainer.weights, strict=True):
        samples = [sample for group in step.groups for sample in group]
        assert sorted(weights) == sorted(samples)
        assert list(weights.values()) == pytest.approx([1 / len(samples)] * len(samples))
    assert replay(EventLog(tmp_path / "events.jsonl")).difference is None


def test_three_losses_in_one_step_end_the_run_with_their_causes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Mortal(dies_in=[("apply", 3), ("restore", 1), ("apply", 4)])
    controller, _ = make(tmp_path, in_processes(run_config()), trainer=trainer)
    with caplog.at_level(logging.WARNING), pytest.raises(TrainerProcessError) as caught:
        drive(controller)
    code, message = classify(caught.value)
    assert code == 6 and "lost 3 times" in message and "--resume" in message
    assert message.count("killed in apply") == 2 and "killed in restore" in message
    said = [one.getMessage() for one in caplog.records if "started anew" in one.getMessage()]
    assert len(said) == 3
    assert newest_checkpoint(tmp_path / "checkpoints").step == 2
    assert replay(EventLog(tmp_path / "events.jsonl")).difference is None


def test_a_reward_is_not_asked_again_and_callbacks_are_not_told_again(tmp_path: Path) -> None:
    asked: Counter[Any] = Counter()

    class Counting(FakeReward):
        async def score(self, samples: Any, *, timeout_s: float | None = None) -> Any:
            asked.update((str(s.prompt), s.completion_tokens) for s in samples)
            return await super().score(samples, timeout_s=timeout_s)

    trainer = Mortal(dies_in=[("save", 1), ("save", 3), ("apply", 5)])
    config = in_processes(run_config())
    controller, recorder = make(tmp_path, config, trainer=trainer, reward=Counting())
    drive(controller)
    plain = Counter(asked)
    asked.clear()
    (tmp_path / "plain").mkdir()
    controller, other = make(tmp_path / "plain", config, reward=Counting())
    drive(controller)
    assert asked.total() == plain.total()
    evaluated = [
        [e.step for e in one.entries if getattr(e, "name", "") == "evaluation"]
        for one in (recorder, other)
    ]
    assert evaluated[0] == evaluated[1]
