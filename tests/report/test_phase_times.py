"""What iterations took, phase by phase: alone, and with waits, which are no part of it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollpacker.cluster.decide.job import ClusterJob, Iteration, Times
from rollpacker.cluster.decide.learned import LearnedTimes
from rollpacker.cluster.profile.job_profile import rounds_of
from rollpacker.cluster.profile.phase_times import PhaseTimes
from rollpacker.core.commands import Command, Commit, Enter, FetchPrompts, Leave
from rollpacker.core.events import Committed, Entered, PoolNeeded, SampleScored, WeightsSynced
from rollpacker.core.ids import SampleId
from rollpacker.core.records import (
    CALLBACK_SECONDS,
    EVALUATION_ROLLOUT,
    POOL_SWITCH,
    Entry,
    Note,
    Record,
    Session,
)
from rollpacker.report.history import History, iterate_steps
from rollpacker.report.time_book import TimeBook
from tests.report import costed_run
from tests.report.costed_run import CostedRun
from tests.report.pooled_log import simulated, with_waits

PARTS = ("rollout_s", "between_s", "train_s", "after_s")


def times_of(entries: list[Entry]) -> list[Iteration]:
    phases = PhaseTimes()
    return [done for entry in entries if (done := phases.feed(entry)) is not None]


def parts_of(one: Iteration) -> list[float]:
    return [getattr(one, part) for part in PARTS]


def test_a_machine_whose_seconds_are_known() -> None:
    run = CostedRun(lambda n, cached: 1e-3)
    found = times_of(run.run(6))
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6]
    assert [one.kind for one in found] == ["plain"] * 4 + ["plain+evaluation", "plain"]
    for one, step in zip(found, iterate_steps(run.entries), strict=True):
        (round_,) = step.rounds
        assert round_.end_s is not None
        evaluated_s = 7.0 if one.step == 5 else 0.0
        assert one.rollout_s == pytest.approx(
            costed_run.FETCH_S + round_.end_s - round_.start_s + evaluated_s, abs=1e-9
        )
        tokens = sum(sample.num_tokens for sample in step.trained_samples())
        train_s = costed_run.TRAIN_FIXED_S + costed_run.TRAIN_TOKEN_S * tokens
        assert one.between_s == pytest.approx(costed_run.REWARD_S)
        assert one.train_s == pytest.approx(train_s + costed_run.SYNC_S)
        commit_s = costed_run.CHECKPOINT_S if evaluated_s else costed_run.COMMIT_S
        assert one.after_s == pytest.approx(commit_s)


@pytest.mark.parametrize("why", [{"last": True}, {"stopping": True}])
def test_a_run_says_after_which_step_it_begins_no_other(why: Mapping[str, bool]) -> None:
    entries = CostedRun(lambda n, cached: 1e-3).run(3)
    said = [
        replace(one, commands=[_saying(command, why) for command in one.commands])
        if isinstance(one, Record)
        else one
        for one in entries
    ]
    assert [one.last for one in times_of(entries)] == [False] * 3
    assert [one.last for one in times_of(said)] == [False, False, True]


def _saying(command: Command, why: Mapping[str, bool]) -> Command:
    return replace(command, **why) if isinstance(command, Commit) and command.step == 3 else command


def _is_evaluation(entry: Entry) -> bool:
    return isinstance(entry, Note) and entry.name == "evaluation"


def test_what_an_evaluation_generates_is_rollout_and_its_verdicts_are_not() -> None:
    entries = CostedRun(lambda n, cached: 1e-3).run(6)
    told = {EVALUATION_ROLLOUT: 4.0, CALLBACK_SECONDS: 1.0, "eval/reward": 0.5}
    said = [replace(one, metrics=told) if _is_evaluation(one) else one for one in entries]
    silent = {CALLBACK_SECONDS: 1.0}  # as logs were once
    before = [replace(one, metrics=silent) if _is_evaluation(one) else one for one in entries]
    plain = times_of([one for one in entries if not _is_evaluation(one)])
    for log, generated_s in ((said, 4.0), (before, 6.0)):
        for one, other in zip(times_of(log), plain, strict=True):
            held_s = generated_s if one.step == 5 else 0.0
            assert one.rollout_s == pytest.approx(other.rollout_s + held_s)
            assert one.after_s == pytest.approx(other.after_s - held_s)
            assert (one.between_s, one.train_s) == (other.between_s, other.train_s)


def alone_and_shared() -> tuple[list[Entry], list[Entry]]:
    """A run that evaluates after its fifth step: 4 s of generation and 3 s of verdicts, in which it
    parks for 1.5 s. Where it shares its pools it waits for 5 s before."""
    entries = CostedRun(lambda n, cached: 1e-3).run(6)
    told = {EVALUATION_ROLLOUT: 4.0}
    alone = [replace(one, metrics=told) if _is_evaluation(one) else one for one in entries]
    shared: list[Entry] = []
    late_s = 0.0
    for entry in alone:
        if _is_evaluation(entry):
            began_s = entry.time_s + late_s - 7.0
            late_s += 5.0
            enter = Enter(pool="rollout", purpose="evaluation")
            needed = PoolNeeded(time_s=began_s, pool="rollout", purpose="evaluation")
            shared += [
                replace(_record(began_s, (enter,)), event=needed),
                replace(
                    _record(began_s + 5.0), event=Entered(time_s=began_s + 5.0, pool="rollout")
                ),
                _record(began_s + 9.0, (Leave(pool="rollout"),)),
                Note(time_s=began_s + 11.0, name=POOL_SWITCH, seconds=1.5, step=5),
            ]
        shared.append(replace(entry, time_s=entry.time_s + late_s))
    return alone, shared


def test_where_the_seconds_of_an_evaluation_on_shared_pools_went() -> None:
    alone, shared = alone_and_shared()
    seconds, without = accounted(shared), accounted(alone)
    assert (seconds.pop("pool_wait"), without.pop("pool_wait")) == pytest.approx((5.0, 0.0))
    assert without["evaluation"] == pytest.approx(7.0)
    assert seconds == pytest.approx(without)
    phases = [one for step in iterate_steps(shared) for one in step.phases]
    evaluated = [one for one in phases if one.name == "evaluation"]
    assert sum(one.end_s - one.start_s for one in evaluated) == pytest.approx(7.0)
    for one, other in pairwise(sorted(phases, key=lambda phase: phase.start_s)):
        assert one.end_s <= other.start_s + 1e-9, (one, other)


def accounted(entries: list[Entry]) -> dict[str, float]:
    book, history = TimeBook(None), History()
    for entry in entries:
        book.advance(entry, history.phase, len(history.live))
        history.feed(entry)
    return book.seconds(1)


def test_an_evaluation_waits_for_its_pool_and_parks_while_it_is_judged() -> None:
    alone, shared = alone_and_shared()
    phases = PhaseTimes()
    found = [done for entry in shared if (done := phases.feed(entry)) is not None]
    assert phases.waited_s == pytest.approx(5.0)
    for one, other in zip(times_of(alone), found, strict=True):
        assert one.kind == other.kind
        assert parts_of(other) == pytest.approx(parts_of(one), abs=1e-6)


class Unlucky(CostedRun):
    """Of its third step nothing is trained on."""

    def learn(self, step: int, kept: list[SampleId]) -> None:
        if step != 3:
            super().learn(step, kept)
            return
        self.now += costed_run.REWARD_S
        event = SampleScored(time_s=self.now, sample=kept[-1], value=0.0)
        self.record(event, Commit(step=step, last=False))
        self.now += costed_run.COMMIT_S
        committed = Committed(time_s=self.now, step=step, checkpointed=False)
        self.record(committed, FetchPrompts(count=self.p0))


def test_a_step_that_trained_on_nothing_is_an_iteration_like_any_other() -> None:
    found = times_of(Unlucky(lambda n, cached: 1e-3).run(6))
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6]
    empty = found[2]
    assert [one.is_empty for one in found] == [one is empty for one in found]
    assert (empty.kind, empty.train_s) == ("empty", 0.0) and empty.rollout_s > 0
    assert empty.between_s == pytest.approx(costed_run.REWARD_S)
    assert empty.after_s == pytest.approx(costed_run.COMMIT_S)


def test_a_profile_and_who_learns_live_tell_the_same_of_empty_steps() -> None:
    """Of the same log: a job whose profile has them has nothing to learn from them."""
    entries = Unlucky(lambda n, cached: 1e-3).run(6)
    told = times_of(entries)
    profile = rounds_of(told)
    assert {one.kind: one.share for one in profile} == {
        "plain": pytest.approx(4 / 6),
        "plain+evaluation": pytest.approx(1 / 6),
        "empty": pytest.approx(1 / 6),
    }
    job = ClusterJob(name="a", rounds=profile, steps=600, slo=2.0)
    assert math.fsum(job.mean) == pytest.approx(sum(map(sum, map(parts_of, told))) / 6, abs=1e-5)
    learned = LearnedTimes(job)
    for one in told * 20:
        assert learned.saw(one.kind, Times(*parts_of(one))) is None


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
            changed.append(Note(time_s=now, name=POOL_SWITCH, seconds=2.0, step=1))
            enter = Enter(pool="rollout", purpose="evaluation")
            changed.append(_record(now, (enter,)))
            late_s += 5.0
            changed.append(_record(now + 5.0, (Leave(pool="rollout"),)))
    assert any(isinstance(c, Commit) for e in changed if isinstance(e, Record) for c in e.commands)
    for one, other in zip(plain, times_of(changed), strict=True):
        assert parts_of(other) == pytest.approx(parts_of(one), abs=1e-6)


def _record(time_s: float, commands: tuple[Enter | Leave, ...] = ()) -> Record:
    event = Entered(time_s=time_s, pool="train")
    return Record(time_s=time_s, event=event, commands=commands, cost_s=0.0)
