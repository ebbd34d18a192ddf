"""What iterations took, phase by phase: alone, and with waits, which are no part of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from rollpacker.core.commands import Commit, Enter, Leave
from rollpacker.core.events import Committed, Entered, WeightsSynced
from rollpacker.core.records import Entry, Note, Record, Session
from rollpacker.report.history import iterate_steps
from rollpacker.report.phase_times import SWITCH, IterationTimes, PhaseTimes
from tests.report import costed_run
from tests.report.costed_run import CostedRun
from tests.report.pooled_log import simulated, with_waits

PARTS = ("rollout_s", "between_s", "train_s", "after_s")


def times_of(entries: list[Entry]) -> list[IterationTimes]:
    phases = PhaseTimes()
    return [done for entry in entries if (done := phases.feed(entry)) is not None]


def parts_of(one: IterationTimes) -> list[float]:
    return [getattr(one, part) for part in PARTS]


def test_a_machine_whose_seconds_are_known() -> None:
    run = CostedRun(lambda n, cached: 1e-3)
    found = times_of(run.run(6))
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6]
    assert {one.kind for one in found} == {"plain"}
    for one, step in zip(found, iterate_steps(run.entries), strict=True):
        (round_,) = step.rounds
        assert round_.end_s is not None
        assert one.rollout_s == pytest.approx(
            costed_run.FETCH_S + round_.end_s - round_.start_s, abs=1e-9
        )
        tokens = sum(sample.num_tokens for sample in step.trained_samples())
        train_s = costed_run.TRAIN_FIXED_S + costed_run.TRAIN_TOKEN_S * tokens
        assert one.between_s == pytest.approx(costed_run.REWARD_S)
        assert one.train_s == pytest.approx(train_s + costed_run.SYNC_S)
        evaluated = one.step == 5
        commit_s = 7.0 + costed_run.CHECKPOINT_S if evaluated else costed_run.COMMIT_S
        assert one.after_s == pytest.approx(commit_s)


def test_gradients_that_were_begun_before_are_training() -> None:
    whole = times_of(CostedRun(lambda n, cached: 1e-3).run(4))
    streamed = times_of(CostedRun(lambda n, cached: 1e-3, streamed=True).run(4))
    assert [one.train_s for one in streamed] == pytest.approx([one.train_s for one in whole])


@pytest.mark.parametrize("settings", [(), ("rewards=[]",), ("tail_batching.enabled=false",)])
def test_waits_are_no_part_of_it(tmp_path: Path, settings: tuple[str, ...]) -> None:
    entries = simulated(tmp_path, "stream_trainer.enabled=false", *settings)
    alone = times_of(entries)
    assert len(alone) == 12
    rng = random.Random(1)
    waited: list[float] = []

    def wait(number: int) -> tuple[float, float]:
        waited.append(rng.choice((0.0, 3.0, 500.0)))
        return waited[-1], waited[-1] / 2

    phases = PhaseTimes()
    shared = [
        done for entry in with_waits(entries, wait) if (done := phases.feed(entry)) is not None
    ]
    assert phases.waited_s == pytest.approx(sum(waited))
    for one, other in zip(alone, shared, strict=True):
        assert (one.step, one.kind) == (other.step, other.kind)
        assert parts_of(other) == pytest.approx(parts_of(one), abs=1e-6)


def test_an_iteration_is_all_of_the_time_from_commit_to_commit(tmp_path: Path) -> None:
    """Where nobody waits and nothing is begun early."""
    entries = simulated(tmp_path, "stream_trainer.enabled=false")
    committed = [e.time_s for e in entries if isinstance(e, Record) and type(e.event) is Committed]
    between = [after - before for before, after in pairwise([0.0, *committed])]
    sums = [sum(parts_of(one)) for one in times_of(entries)]
    assert sums == pytest.approx(between)


def test_a_step_that_another_session_took_up_is_left_out() -> None:
    entries = CostedRun(lambda n, cached: 1e-3).run(6)
    at = next(n for n, one in enumerate(entries) if _committed(one) == 3)
    told = entries[at]
    assert isinstance(told, Record)
    again = Session(started_at="later", time_s=told.time_s + 50.0, step=3, job={"a": 1})
    late = [replace(one, time_s=one.time_s + 50.0) for one in entries]
    steps = [one.step for one in times_of([*entries[:at], again, *late[at:]])]
    assert steps == [1, 2, 4, 5, 6], "who committed step 3 had not seen its begin"
    steps = [one.step for one in times_of([*entries[: at + 1], again, *late[at:]])]
    assert steps == [1, 2, 3, 4, 5, 6], "and it counts once"


def _committed(entry: Entry) -> int | None:
    if isinstance(entry, Record) and isinstance(entry.event, Committed):
        return entry.event.step
    return None


def test_parking_after_training_is_a_switch_and_a_wait_given_up_is_over() -> None:
    entries = CostedRun(lambda n, cached: 1e-3).run(3)
    plain = times_of(entries)
    changed: list[Entry] = []
    late_s = 0.0
    for entry in entries:
        moved = replace(entry, time_s=entry.time_s + late_s)
        changed.append(moved)
        if isinstance(entry, Record) and isinstance(entry.event, WeightsSynced):
            late_s += 2.0
            now = entry.time_s + late_s
            changed.append(Note(time_s=now, name=SWITCH, seconds=2.0, step=1))
            enter = Enter(pool="rollout", purpose="evaluation")
            changed.append(_record(now, (enter,)))
            late_s += 5.0
            changed.append(_record(now + 5.0, (Leave(pool="rollout"),)))
    assert any(isinstance(c, Commit) for e in changed if isinstance(e, Record) for c in e.commands)
    for one, other in zip(plain, times_of(changed), strict=True):
        assert parts_of(other) == pytest.approx(parts_of(one), abs=1e-6)


def _record(time_s: float, commands: tuple[Enter | Leave, ...]) -> Record:
    event = Entered(time_s=time_s, pool="train")
    return Record(time_s=time_s, event=event, commands=commands, cost_s=0.0)
