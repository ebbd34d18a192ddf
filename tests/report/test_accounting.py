"""Seconds by cause partition the wall time; counts are those of the log."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollpacker.core.commands import (
    Commit,
    Launch,
    RoundKind,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    RunStarted,
    SampleAborted,
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.records import Note, Record, Session
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.report.accounting import Accounting
from rollpacker.report.length_bias import LengthBias
from rollpacker.report.metrics import step_metrics
from rollpacker.report.spans import read_steps
from rollpacker.report.time_book import CAUSES
from rollpacker.sim.unkind import UnkindConfig
from tests.core.world import World
from tests.report.fake_run import FakeRun


def feed(entries, **options):
    accounting = Accounting(**options)
    return accounting, [s for s in map(accounting.feed, entries) if s is not None]


def assert_causes_add_up(accounting):
    wall_s = accounting.time.wall_s
    assert math.fsum(accounting.seconds().values()) == pytest.approx(wall_s, abs=1e-6)


def record(time_s, event, *commands, cost_s=0.0):
    return Record(time_s=time_s, event=event, commands=commands, cost_s=cost_s)


SAMPLES = tuple(SampleId(PromptId("p", 0, 0), i, 0) for i in range(4))


def one_step(cost_s=0.0):
    """Four samples: two end at 2 s, one at 3 s, one is stopped at 6 s; hand-made, so that one can
    reckon."""
    launch = Launch(round=1, kind=RoundKind.SHORT, samples=SAMPLES, version=0)

    def generated(t, i):
        return SampleGenerated(
            time_s=t, sample=SAMPLES[i], num_tokens=10 * i + 5, finish_reason="stop", version=0
        )

    return [
        Session(started_at="2026-01-01T00:00:00+00:00", time_s=0.0, step=0, job={}),
        Note(time_s=0.75, name="startup", seconds=0.5, step=0),
        record(1.0, RunStarted(time_s=1.0), launch, cost_s=cost_s),
        record(2.0, generated(2.0, 0)),
        record(2.0, generated(2.0, 1)),
        record(3.0, generated(3.0, 2)),
        record(6.0, SampleAborted(time_s=6.0, sample=SAMPLES[3], num_tokens=50)),
        *[record(6.5, SampleScored(time_s=6.5, sample=s, value=1.0)) for s in SAMPLES[:2]],
        record(
            7.0,
            SampleScored(time_s=7.0, sample=SAMPLES[2], value=None, reason="timeout"),
            TrainOn(step=1, groups=(SAMPLES[:2],)),
        ),
        record(9.0, Trained(time_s=9.0, step=1, version=1), SyncWeights(version=1)),
        record(9.5, WeightsSynced(time_s=9.5, version=1), Commit(step=1, last=True)),
        Note(time_s=11.5, name="evaluation", seconds=1.75, step=1),
        record(12.0, Committed(time_s=12.0, step=1)),
        Note(time_s=12.25, name="stopped", seconds=0.0, step=1),
    ]


def test_a_hand_made_step():
    accounting, (step,) = feed(one_step())
    # Slot-seconds: 4 x 1 s + 2 x 1 s + 1 x 3 s = 9 of 4 x 5 = 20.
    assert step.seconds["decode"] == pytest.approx(9 / 4)
    assert step.seconds["tail_idle"] == pytest.approx(5 - 9 / 4)
    assert step.seconds["reward_wait"] == pytest.approx(1.0)
    assert step.seconds["training"] == pytest.approx(2.0)
    assert step.seconds["sync"] == pytest.approx(0.5)
    assert step.seconds["checkpoint"] == pytest.approx(0.75)
    assert step.seconds["evaluation"] == pytest.approx(1.75)
    assert step.seconds["startup"] == pytest.approx(0.5)
    assert step.seconds["controller"] == pytest.approx(0.5)
    assert accounting.seconds()["controller"] == pytest.approx(0.75)
    assert accounting.time.wall_s == pytest.approx(12.25)
    assert (step.samples.launched, step.samples.trained, step.samples.aborted) == (
        4,
        2,
        1,
    )
    assert (step.tokens.generated, step.tokens.trained) == (5 + 15 + 25 + 50, 20)
    assert step.samples.no_verdict == {"timeout": 1}
    assert step.rewards.zero_std_ratio == 1.0


def test_fewer_slots_than_samples_are_not_idle_until_a_slot_is():
    _, (step,) = feed(one_step(), slots=2)
    assert step.seconds["decode"] == pytest.approx((2 * 2 + 1 * 3) / 2)


def test_what_the_controller_spent_is_taken_out_of_the_interval_it_fell_in():
    _, (step,) = feed(one_step(cost_s=0.25))
    assert step.seconds["controller"] == pytest.approx(0.75)
    assert step.seconds["decode"] == pytest.approx((4 * 0.75 + 2 + 3) / 4)


@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 7),
    tail_batching=st.booleans(),
    p0=st.integers(2, 4),
    r0=st.integers(2, 4),
    cost_s=st.sampled_from([0.0, 1e-5, 0.02]),
)
@settings(deadline=None)
def test_causes_add_up_to_the_wall_time(seed, steps, tail_batching, p0, r0, cost_s):
    run = FakeRun(seed, tail_batching=tail_batching, p0=p0, r0=r0)
    run.cost_s = cost_s
    accounting, summaries = feed(run.run(steps))
    assert [s.step for s in summaries] == list(range(1, steps + 1))
    assert math.fsum(accounting.seconds().values()) == pytest.approx(
        accounting.time.wall_s, abs=1e-6
    )
    assert accounting.time.wall_s == pytest.approx(run.entries[-1].time_s, abs=1e-6)
    before = 0.0
    for step in summaries:
        assert all(value >= 0 for value in step.seconds.values())
        assert math.fsum(step.seconds.values()) == pytest.approx(step.end_s - before, abs=1e-6)
        assert set(step.seconds) == set(CAUSES)
        assert step.samples.launched == (
            step.samples.generated + step.samples.aborted + step.samples.failed
        )
        before = step.end_s


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 3), st.integers(0, 12)), max_size=40))
def test_any_order_of_entries_still_partitions_the_time(draws):
    """Late, doubled and missing events, costs longer than the gaps, notes longer than the run."""
    templates = one_step()
    entries, now = [], 0.0
    for gap, cost, index in draws:
        now += gap
        template = templates[index]
        if isinstance(template, Record):
            entry = Record(
                time_s=now, event=template.event, commands=template.commands, cost_s=cost
            )
        elif isinstance(template, Note):
            entry = Note(time_s=now, name=template.name, seconds=min(cost, now), step=0)
        else:
            entry = Session(started_at="", time_s=now, step=0, job={})
        entries.append(entry)
    accounting, _ = feed(entries)
    assert_causes_add_up(accounting)
    assert min(accounting.seconds().values()) >= 0


def test_a_resumed_log_counts_no_step_twice():
    entries = FakeRun(3).run(6)
    cut = next(
        i + 1
        for i, e in enumerate(entries)
        if isinstance(e, Record) and isinstance(e.event, Committed)
    )
    again = entries[cut - 1]
    session = Session(started_at="2026-01-02T00:00:00+00:00", time_s=again.time_s, step=1, job={})
    _, whole = feed(entries)
    _, resumed = feed([*entries[:cut], session, again, *entries[cut:]])
    assert [s.step for s in resumed] == [s.step for s in whole]
    for one, other in zip(whole, resumed, strict=True):
        assert one.samples.launched == other.samples.launched
        assert (one.tokens.generated, one.prompts.dropped, one.prompts.long_queue) == (
            other.tokens.generated,
            other.prompts.dropped,
            other.prompts.long_queue,
        )


def test_the_long_queue_is_what_was_deferred_and_not_yet_launched():
    run = FakeRun(1)
    _, summaries = feed(run.run(12))
    assert summaries[-1].prompts.long_queue == len(run.queue)
    assert any(s.kind is RoundKind.LONG for s in summaries)
    assert summaries[3].prompts.dropped == {"fewer than two verdicts": 1}


def test_short_rounds_show_their_length_shift():
    _, with_tail_batching = feed(FakeRun(2).run(30))
    _, without = feed(FakeRun(2, tail_batching=False).run(30))
    shift = without[-1].lengths.bias["length/shift"]
    assert shift == pytest.approx(0.0, abs=0.03)  # some groups are dropped
    assert with_tail_batching[-1].lengths.bias["length/shift"] < -0.15
    assert with_tail_batching[-1].lengths.bias["length/tail_trained_share"] < 0.5
    assert with_tail_batching[-1].lengths.bias["length/policy_mean"] == pytest.approx(
        without[-1].lengths.bias["length/policy_mean"], rel=0.1
    )


def test_where_every_response_is_trained_on_nothing_is_shifted():
    accounting, bias, shifts = Accounting(), LengthBias(4096), []
    for record in FakeRun(2, tail_batching=False).run(60):
        step = accounting.history.step
        summary = accounting.feed(record)
        if summary is not None and summary.samples.trained == summary.samples.launched:
            found = bias.add(step)
            shifts.append(found.get("length/shift"))
    assert shifts[-1] == 0.0 and set(shifts) <= {None, 0.0}
    assert found["length/policy_mean"] == found["length/trained_mean"]


QUEUE = {"stragglers": "queue"}


@given(
    seed=st.integers(0, 10**6),
    failure_rate=st.sampled_from([0.0, 0.2]),
    no_verdict_rate=st.sampled_from([0.0, 0.3]),
    verdict_delay_s=st.sampled_from([0.0, 5.0]),
    late_finish_rate=st.sampled_from([0.0, 0.5]),
    race=st.sampled_from(["generated", "scored"]),
    settings=st.sampled_from([{"selection": "published", "sample_factor": 1.5}, QUEUE, {}]),
)
@settings(max_examples=50, deadline=None)
def test_logs_of_the_real_core_add_up(race, settings, seed, **unkindness):
    """The core in an unkind world: what the log tells is what the job knows."""
    config = JobConfig(
        prompts_per_step=2,
        samples_per_prompt=2,
        max_steps=None,
        tail_batching=TailBatchingConfig(prompt_factor=1.5, race=race, **settings),
    )
    world = World(config, num_rows=11, epochs=2, seed=seed, unkind=UnkindConfig(**unkindness)).run()
    accounting, summaries = feed(world.log)
    assert accounting.history.last_step == world.job.step
    assert len(accounting.history.queue) == len(world.job.queues.long)
    assert not accounting.history.live
    dropped = sum(sum(s.prompts.dropped.values()) for s in summaries)
    settled = sum(s.prompts.trained for s in summaries) + dropped
    ledger = world.job.ledger
    assert settled == ledger.num_fetched - len(ledger.open)
    # Without three empty steps in a row, which end a run, everything is settled.
    assert settled == 22 or (world.finished or "").endswith("no group to train on")
    launched = sum(s.samples.launched for s in summaries)
    ended = [s.samples.generated + s.samples.aborted for s in summaries]
    assert launched == sum(ended) + sum(s.samples.failed for s in summaries)
    assert math.fsum(accounting.seconds().values()) == pytest.approx(
        accounting.time.wall_s, abs=1e-6
    )
    assert accounting.seconds()["training"] == pytest.approx(world.version)  # 1 s each


def test_the_queue_is_the_jobs_after_every_step():
    config = JobConfig(prompts_per_step=3, samples_per_prompt=2, max_steps=12)
    world = World(config, num_rows=17, epochs=3).run()
    _, summaries = feed(world.log)
    for summary in summaries:
        assert summary.prompts.long_queue == len(world.snapshots[summary.step][0]["queue"])


def streamed_step():
    """As `one_step`, but the first group's gradients begin at 6 s and take 0.75 s; the second's are
    asked for at 6.5 s, and the step is due before they begin."""
    entries = one_step()
    first = next(i for i, e in enumerate(entries) if e.time_s == 6.5)
    aborted = entries[first - 1]
    start = StartGradients(step=1, groups=(SAMPLES[:1],))
    entries[first - 1] = record(6.0, aborted.event, start)
    entries[first + 1] = record(6.5, entries[first + 1].event, StartGradients(step=1, groups=((),)))
    done = Note(time_s=6.75, name="gradients", seconds=0.75, step=1, metrics={"groups": 1})
    entries.insert(first + 2, done)
    return entries


def test_gradients_in_the_reward_wait_are_training():
    accounting, (step,) = feed(streamed_step())
    # The second group is still under way as far as the log tells, until the step is due at 7 s.
    assert step.seconds["training"] == pytest.approx(1.0 + 2.0)
    assert step.seconds["reward_wait"] == pytest.approx(0.0)
    assert math.fsum(accounting.seconds().values()) == pytest.approx(accounting.time.wall_s)
    assert step.samples.streamed == 1


def test_after_the_gradients_verdicts_are_waited_for_again():
    entries = [
        replace_commands(e) if e.time_s == 6.5 and isinstance(e, Record) else e
        for e in streamed_step()
    ]
    accounting = Accounting()
    phases = {}
    for entry in entries:
        accounting.feed(entry)
        phases[entry.time_s] = accounting.history.phase
    assert (phases[6.0], phases[6.5], phases[6.75], phases[7.0]) == (
        "training",
        "training",
        "reward_wait",
        "training",
    )
    assert accounting.time.totals["training"] == pytest.approx(0.75 + 2.0)
    assert accounting.time.totals["reward_wait"] == pytest.approx(0.25)
    (spans,) = read_steps(entries)
    told = [(p.name, p.start_s, p.end_s) for p in spans.phases if p.end_s > 6.0][:3]
    assert told == [("training", 6.0, 6.75), ("reward_wait", 6.75, 7.0), ("training", 7.0, 9.0)]
    assert not any(phase.name == "gradients" for phase in spans.phases)


def replace_commands(entry):
    return record(entry.time_s, entry.event)


def test_rollout_that_goes_on_stays_rollout():
    """With more than one device, gradients begin while others still generate."""
    entries = one_step()
    at_three = next(i for i, e in enumerate(entries) if e.time_s == 3.0)
    start = StartGradients(step=1, groups=(SAMPLES[:1],))
    entries[at_three] = record(3.0, entries[at_three].event, start)
    _, (plain,) = feed(one_step())
    _, (step,) = feed(entries)
    assert step.seconds["decode"] == pytest.approx(plain.seconds["decode"])
    assert step.seconds["tail_idle"] == pytest.approx(plain.seconds["tail_idle"])
    assert step.seconds["training"] == pytest.approx(2.0 + 1.0)


def test_loss_weights_show_in_the_lengths():
    def weighted(entry):
        if not isinstance(entry, Record):
            return entry
        commands = tuple(
            structs.replace(c, weights=((0.5, 2.0),)) if isinstance(c, TrainOn) else c
            for c in entry.commands
        )
        return structs.replace(entry, commands=commands)

    _, (plain,) = feed(one_step())
    _, (step,) = feed([weighted(entry) for entry in one_step()])
    assert plain.lengths.bias == {"length/trained_mean": 10.0}
    assert step.lengths.bias["length/weighted_mean"] == pytest.approx((0.5 * 5 + 2.0 * 15) / 2.5)
    assert step.lengths.bias["debias/effective_sample_size"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert (step.lengths.bias["debias/max_weight"], step.lengths.bias["debias/mean_weight"]) == (
        2.0,
        1.25,
    )


@given(
    seed=st.integers(0, 10**6),
    verdict_delay_s=st.sampled_from([0.0, 5.0, 30.0]),
    tiers=st.sampled_from([(), (Tier(prompt_factor=1.5),)]),
    selection=st.sampled_from(["published", "none"]),
    late_finish_rate=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=15, deadline=None)
def test_logs_with_streams_and_cascades_add_up(seed, tiers, selection, **unkindness):
    config = JobConfig(
        prompts_per_step=3,
        samples_per_prompt=2,
        max_steps=12,
        tail_batching=TailBatchingConfig(prompt_factor=1.5, selection=selection, tiers=tiers),
        stream=StreamConfig(enabled=True, reward_wait=True),
    )
    world = World(config, num_rows=40, epochs=3, seed=seed, unkind=UnkindConfig(**unkindness)).run()
    accounting, summaries = feed(world.log)
    assert accounting.history.last_step == world.job.step
    assert len(accounting.history.queue) == world.job.num_queued
    assert math.fsum(accounting.seconds().values()) == pytest.approx(
        accounting.time.wall_s, abs=1e-6
    )
    assert min(accounting.seconds().values()) >= 0
    kinds = {summary.kind for summary in summaries}
    assert RoundKind.CASCADE not in kinds or tiers
    for summary in summaries:
        assert step_metrics(summary)["round/kind"] == summary.kind
        assert summary.samples.streamed <= summary.samples.trained
