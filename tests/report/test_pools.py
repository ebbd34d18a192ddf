"""A run that shared its pools: its waits have causes of their own, and teach nothing."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

from rollpacker.core.commands import Enter, Leave
from rollpacker.core.events import Committed, Entered
from rollpacker.core.records import Entry, Note, Record, decode, encode
from rollpacker.report.accounting import Accounting
from rollpacker.report.display import phase_words
from rollpacker.report.fit import fit_run
from rollpacker.report.fitted_run import FittedRun
from rollpacker.report.history import History, iterate_steps
from rollpacker.report.metrics import step_metrics
from rollpacker.report.phase_book import PhaseBook
from rollpacker.report.step_history import StepHistory
from rollpacker.report.summary import summarize_entries
from rollpacker.report.time_book import CAUSES, POOL_CAUSES, TimeBook
from rollpacker.report.timeline import draw_steps
from rollpacker.report.trace import write_steps_trace
from rollpacker.run.replay import replay
from tests.report.pooled_log import simulated, with_waits

NO_STREAM = "stream_trainer.enabled=false"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    checks = "rewards=[{kind: code, share: 1.0, workers: 8}]"
    return simulated(tmp_path_factory.mktemp("alone"), NO_STREAM, checks)


class Waits:
    """Of a log: each is drawn."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.waited_s = self.switched_s = 0.0

    def __call__(self, number: int) -> tuple[float, float]:
        switch_s = self.rng.choice((0.0, 2.0, 5.0))
        wait_s = switch_s + self.rng.choice((0.0, 30.0, 400.0))
        self.waited_s += wait_s - switch_s
        self.switched_s += switch_s
        return wait_s, switch_s


def booked(entries: list[Entry]) -> Accounting:
    accounting = Accounting()
    for entry in entries:
        accounting.feed(entry)
    return accounting


def test_waits_and_switches_are_causes_and_nothing_else_changes(alone: list[Entry]) -> None:
    drawn = Waits()
    before, after = booked(alone), booked(with_waits(alone, drawn))
    seconds = after.seconds()
    assert seconds["pool_wait"] == pytest.approx(drawn.waited_s)
    assert seconds["switch"] == pytest.approx(drawn.switched_s)
    assert sum(seconds.values()) == pytest.approx(after.time.wall_s)
    for cause in set(CAUSES) - set(POOL_CAUSES):
        assert seconds[cause] == pytest.approx(before.seconds()[cause], abs=1e-4), cause


def test_a_step_has_its_own_seconds_and_tells_what_it_waited(alone: list[Entry]) -> None:
    accounting, shared = Accounting(), with_waits(alone, Waits())
    steps = [step for entry in shared if (step := accounting.feed(entry)) is not None]
    before = Accounting()
    plain = [step for entry in alone if (step := before.feed(entry)) is not None]
    assert any(step.waited_s for step in steps)
    for step, other in zip(steps, plain, strict=True):
        assert step.step_s == pytest.approx(other.step_s, abs=1e-4)
        told = step_metrics(step)
        assert ("timing_s/pool_wait" in told) == bool(step.seconds["pool_wait"])
        assert "timing_s/pool_wait" not in step_metrics(other)


def test_phases_do_not_overlap_and_are_shown(alone: list[Entry], tmp_path: Path) -> None:
    shared = with_waits(alone, Waits())
    steps = list(iterate_steps(shared))
    for step in steps:
        phases = sorted((one.start_s, one.end_s) for one in step.phases)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(phases))
    names = {phase.name for step in steps for phase in step.phases}
    assert set(POOL_CAUSES) < names
    write_steps_trace(steps, tmp_path / "trace.json", num_steps=len(steps))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"pool wait", "switch"} <= {e["name"] for e in events if e["ph"] == "X"}
    draw_steps(steps, tmp_path / "timeline.png")
    assert summarize_entries(shared)["seconds"]["pool_wait"] > 0


def test_what_is_going_on_is_told_in_words(alone: list[Entry]) -> None:
    history, words = History(), []
    for entry in with_waits(alone, Waits()):
        history.feed(entry)
        if isinstance(entry, Record) and any(isinstance(c, Enter) for c in entry.commands):
            assert history.phase == "pool_wait"
            words.append(phase_words(history))
        elif isinstance(entry, Record) and isinstance(entry.event, Entered):
            assert history.phase != "pool_wait"
    assert set(words) == {"waiting for a pool that other jobs use too"}


def constants(fitted: FittedRun) -> dict[str, object]:
    return {
        "steps": (fitted.num_steps, fitted.num_rounds, fitted.num_skipped),
        "decode": vars_of(fitted.step),
        "train": vars_of(fitted.train),
        "sync": fitted.sync_s,
        "stop": fitted.stop_s,
        "commit": (fitted.commit_s, fitted.between_s),
        "exposed": fitted.exposed_s,
        "checks": [check.seconds for found in fitted.checks.values() for check in found],
    }


def vars_of(one: object) -> list[object]:
    names = one.__slots__ if hasattr(one, "__slots__") else vars(one)
    return [getattr(one, name) for name in names]


def flat(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for one in value.values() for number in flat(one)]
    if isinstance(value, list | tuple):
        return [number for one in value for number in flat(one)]
    return [] if value is None else [float(value)]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_waits_teach_a_fit_nothing(alone: list[Entry], seed: int) -> None:
    before = constants(fit_run(alone))
    after = constants(fit_run(with_waits(alone, Waits(seed))))
    assert flat(after) == pytest.approx(flat(before), rel=1e-6, abs=1e-6)


def test_waits_for_an_evaluation_in_a_commit_are_no_commit(alone: list[Entry]) -> None:
    """And neither is the parking after training, of which a note tells."""
    alone = _with_slow_commits(alone)
    shared: list[Entry] = []
    late_s = 0.0
    for entry in alone:
        if isinstance(entry, Record) and isinstance(entry.event, Committed):
            begin_s = entry.time_s + late_s - 5.0
            parked = Note(time_s=begin_s + 1.0, name="switch", seconds=1.0, step=0)
            shared += [parked, _told(begin_s + 1.0, Enter(pool="rollout", purpose="evaluation"))]
            entered = Entered(time_s=begin_s + 61.0, pool="rollout", switch_s=3.0)
            shared.append(Record(time_s=entered.time_s, event=entered, commands=(), cost_s=0.0))
            note = Note(time_s=begin_s + 71.0, name="evaluation", seconds=10.0, step=1)
            shared += [note, _told(begin_s + 71.0, Leave(pool="rollout"))]
            late_s += 71.0
        shared.append(structs.replace(entry, time_s=entry.time_s + late_s))
    before, after = fit_run(alone), fit_run(shared)
    assert before.commit_s == pytest.approx(5.0)
    assert after.commit_s == pytest.approx(before.commit_s, abs=1e-6)
    assert after.between_s == pytest.approx(before.between_s, abs=1e-6)
    seconds, num = booked(shared).seconds(), sum(1 for _ in iterate_steps(alone))
    assert seconds["pool_wait"] == pytest.approx(57.0 * num)
    assert seconds["switch"] == pytest.approx(4.0 * num)
    assert seconds["evaluation"] == pytest.approx(10.0 * num)


def _with_slow_commits(entries: list[Entry]) -> list[Entry]:
    """5 s each."""
    late_s, found = 0.0, []
    for entry in entries:
        late_s += 5.0 * (isinstance(entry, Record) and isinstance(entry.event, Committed))
        found.append(structs.replace(entry, time_s=entry.time_s + late_s))
    return found


def _told(time_s: float, command: Enter | Leave) -> Record:
    event = Entered(time_s=time_s, pool="train")
    return Record(time_s=time_s, event=event, commands=(command,), cost_s=0.0)


def test_the_log_replays(alone: list[Entry]) -> None:
    shared = [decode(encode(entry)) for entry in with_waits(alone, Waits())]
    assert replay(shared).difference is None
    changed = [
        structs.replace(e, commands=tuple(c for c in e.commands if not isinstance(c, Leave)))
        if isinstance(e, Record)
        else e
        for e in shared
    ]
    assert "Leave" in (replay(changed).difference or "")


@pytest.mark.parametrize("awaited", ["reward_wait", "environment"])
def test_parking_is_a_switch_where_something_waits_for_it(awaited: str) -> None:
    book, step = PhaseBook(), StepHistory()
    book.turn(step, awaited, 10.0)
    book.span(step, Note(time_s=12.0, name="switch", seconds=2.0, step=1))
    assert not step.phases, "verdicts, or answers, are awaited anyway"
    book.wait(step, 12.5)
    book.span(step, Note(time_s=14.0, name="switch", seconds=3.0, step=1))
    book.end_wait(step, 20.0, 4.0)
    book.turn(step, "training", 20.0)
    book.turn(step, "sync", 25.0)
    assert [(one.name, one.start_s, one.end_s) for one in step.phases] == [
        (awaited, 10.0, 12.5),
        ("switch", 12.5, 14.0),
        ("pool_wait", 14.0, 16.0),
        ("switch", 16.0, 20.0),
        ("training", 20.0, 25.0),
    ]
    assert step.waited_s(0.0, 100.0) == 7.5 and step.waited_s(13.0, 15.0) == 2.0


@pytest.mark.parametrize(("phase", "switch_s"), [("environment", 0.0), ("training", 2.0)])
def test_parking_takes_no_time_of_what_is_awaited_anyway(phase: str, switch_s: float) -> None:
    book = TimeBook(slots=None)
    begin = Note(time_s=10.0, name="evaluation", seconds=0.0, step=0)
    book.advance(begin, "controller", 0)
    book.advance(Note(time_s=15.0, name="switch", seconds=2.0, step=0), phase, 0)
    seconds = book.seconds(0)
    assert (seconds[phase], seconds["switch"]) == (5.0 - switch_s, switch_s)
