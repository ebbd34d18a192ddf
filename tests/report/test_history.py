"""The fold over the event log: what a step's record holds, and what is known before its commit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from rollpacker.core.commands import Commit, Drop, Finish, Launch, RoundKind, Score, TrainOn
from rollpacker.core.events import (
    Committed,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    Trained,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Note, Record, Session
from rollpacker.report.history import History, iterate_steps
from rollpacker.report.step_history import End, Outcome, StepHistory
from tests.report.fake_run import FakeRun

PROMPTS = tuple(PromptId("p", 0, row) for row in range(2))
SAMPLES = tuple(SampleId(prompt, index, 0) for prompt in PROMPTS for index in range(2))


def record(time_s, event, *commands):
    return Record(time_s=time_s, event=event, commands=commands, cost_s=0.0)


def launch(number=1, samples=SAMPLES, **values):
    return Launch(round=number, kind=RoundKind.SHORT, samples=samples, version=0, **values)


def generated(time_s, sample, *commands, tokens=7, reason="stop", preemptions=0):
    event = SampleGenerated(
        time_s=time_s,
        sample=sample,
        num_tokens=tokens,
        finish_reason=reason,
        version=0,
        preemptions=preemptions,
    )
    return record(time_s, event, *commands)


def scored(time_s, sample, *commands, **values):
    return record(
        time_s, SampleScored(time_s=time_s, sample=sample, **{"value": 1.0, **values}), *commands
    )


def feed(entries) -> tuple[History, list[StepHistory]]:
    history = History()
    return history, [step for step in map(history.feed, entries) if step is not None]


def one_step():
    a, b, c, d = SAMPLES
    return [
        Session(started_at="", time_s=0.0, step=0, job={}, slots=2, marks=("unsandboxed",)),
        record(1.0, RunStarted(time_s=1.0)),
        record(1.5, PromptsFetched(time_s=1.5, prompts=PROMPTS, epoch_ended=False), launch()),
        generated(2.0, a, preemptions=2),
        generated(3.0, b, Score(sample=a, timeout_s=5.0), tokens=9, reason="length"),
        scored(3.5, a, Score(sample=b), value=None, cause="infrastructure"),
        record(4.0, SampleAborted(time_s=4.0, sample=c, num_tokens=4), Score(sample=a, retry=1)),
        record(5.0, SampleFailed(time_s=5.0, sample=d, reason="lost")),
        scored(5.5, b),
        scored(
            6.0,
            a,
            Drop(prompt=PROMPTS[1], reason="too few"),
            TrainOn(step=1, groups=((a, b),), weights=((0.5, 1.5),)),
        ),
        record(8.0, Trained(time_s=8.0, step=1, version=1, metrics={"actor/loss": 0.5})),
        record(9.0, Committed(time_s=9.0, step=1, checkpointed=True), launch(2, SAMPLES[2:])),
    ]


def test_a_step_holds_what_became_of_every_sample():
    history, (step,) = feed(one_step())
    found = [(s.end, s.outcome, s.start_s, s.end_s, s.num_tokens) for s in step.samples.values()]
    assert found == [
        (End.FINISHED, Outcome.TRAINED, 1.5, 2.0, 7),
        (End.AT_LIMIT, Outcome.TRAINED, 1.5, 3.0, 9),
        (End.STOPPED, Outcome.SURPLUS, 1.5, 4.0, 4),
        (End.FAILED, Outcome.FAILED, 1.5, 5.0, 0),
    ]
    assert [s.reward for s in step.samples.values()] == [1.0, 1.0, None, None]
    assert [s.preemptions for s in step.samples.values()] == [2, 0, 0, 0]
    assert [s.num_tokens for s in step.trained_samples()] == [7, 9]
    assert step.train_on is not None and step.train_on.weights == ((0.5, 1.5),)
    assert (step.step, step.end_s, step.checkpointed, step.trainer) == (
        *(1, 9.0, True),
        {"actor/loss": 0.5},
    )
    assert step.session is not None and step.session.marks == ("unsandboxed",)
    assert step.prompts.dropped == {"too few": 1} and step.prompts.fetched == list(PROMPTS)
    # What the commit's answer launches belongs to the next step.
    assert history.live == set(SAMPLES[2:]) and history.phase == "rollout"
    assert history.step.num_launched == 2 and history.step.turns.committed_before_s == 9.0


def test_a_round_holds_its_ends_in_order():
    _, (step,) = feed(one_step())
    (round_,) = step.rounds
    assert [(end.sample, end.end_s) for end in round_.ends] == [
        (SAMPLES[0], 2.0),
        (SAMPLES[1], 3.0),
        (SAMPLES[2], 4.0),
    ]
    assert (round_.start_s, round_.end_s, round_.slots, round_.peak_live) == (1.5, 5.0, 2, 4)
    assert round_.is_irregular  # one failed
    assert (step.rollout_start_s, step.rollout_end_s) == (1.5, 5.0)


def test_a_check_knows_when_it_was_asked_for_and_how_long_it_waited():
    _, (step,) = feed(one_step())
    told = [(v.event.sample, v.time_s, v.asked_s, v.queue_s) for v in step.checks.verdicts]
    assert told == [
        (SAMPLES[0], 3.5, 3.0, 1.0),
        (SAMPLES[1], 5.5, 3.5, 0.5),
        (SAMPLES[0], 6.0, 4.0, 0.0),  # asked for again: its queue was counted before
    ]
    assert [score.retry for score in step.checks.asked] == [0, 0, 1]


def test_rounds_that_refill_a_step_belong_to_it():
    entries = one_step()
    more = tuple(SampleId(PromptId("p", 0, 7), index, 0) for index in range(2))
    event = entries[9].event
    refill = launch(2, more, tensor_parallel=4)
    entries[9:10] = [
        record(6.0, event, refill),
        generated(6.5, more[0]),
        generated(7.0, more[1]),
        scored(7.5, more[0], TrainOn(step=1, groups=(SAMPLES[:2], more))),
    ]
    _, (step,) = feed(entries)
    assert [round_.number for round_ in step.rounds] == [1, 2]
    assert (step.rollout_start_s, step.rollout_end_s) == (1.5, 7.0)
    assert (step.num_launched, step.peak_live) == (6, 4)
    assert [(p.name, p.start_s, p.end_s) for p in step.phases] == [
        *(("reward_wait", 5.0, 6.0), ("reward_wait", 7.0, 7.5)),
        ("training", 7.5, 8.0),
    ]


def test_what_a_session_cuts_off_is_told_only_if_asked_for():
    entries = FakeRun(3).run(4)
    cut = len(entries) // 2
    session = Session(started_at="", time_s=entries[cut].time_s, step=2, job={})
    log = [*entries[:cut], session, *entries[cut:]]
    committed = list(iterate_steps(log))
    everything = list(iterate_steps(log, unfinished=True))
    assert [step for step in everything if step.step] == committed
    assert sum(s.num_launched for s in everything) == sum(
        s.num_launched for s in iterate_steps(entries)
    )


def test_a_commit_that_another_session_answers_is_not_timed():
    entries = one_step()
    commit = structs.replace(entries[10], commands=(Commit(step=1, last=False),))
    session = Session(started_at="", time_s=8.0, step=1, job={})
    _, (whole,) = feed([*entries[:10], commit, entries[11]])
    _, (resumed,) = feed([*entries[:10], commit, session, entries[11]])
    assert whole.turns.commit_s == 8.0
    assert resumed.turns.commit_s is None
    assert list(resumed.samples) == list(whole.samples)


@pytest.mark.parametrize("missing", [lambda e: "launch" in e, lambda e: "PromptsFetched" in e])
def test_a_log_with_lines_missing_is_still_read(missing: Callable[[str], bool]):
    entries = FakeRun(1).run(3)
    kept = [e for i, e in enumerate(entries) if not (missing(repr(e)) and i > 200)]
    history, steps = feed(kept)
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(s.end_s is not None for step in steps for s in step.samples.values())
    assert not history.live


def test_evaluations_and_the_end_are_known():
    history, _ = feed(FakeRun(1).run(6))
    assert list(history.evaluations) == [0, 5] and history.finish == Finish(reason="done")
    assert history.num_sessions == 1
    history.feed(Note(time_s=99.0, name="evaluation", seconds=1.0, step=6))
    assert 6 not in history.evaluations  # it gave no numbers
