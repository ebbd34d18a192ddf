"""When checks start, who is next, and what a late or unneeded one does."""

from __future__ import annotations

import pytest

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.reward_schedule import (
    RewardKindConfig,
    RewardSchedule,
    RewardScheduleConfig,
)
from rollpacker.core.commands import CancelScore, Launch, RoundKind, Score, TrainOn
from rollpacker.core.events import SampleGenerated, SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import Tier
from rollpacker.sim.unkind import UnkindConfig
from tests.core.world import World, commands_of, events_of, published


def sample(row: int, index: int = 0) -> SampleId:
    return SampleId(PromptId("code", 0, row), index, 0)


def scored(which: SampleId, seconds: float = 1.0, value: float = 1.0) -> SampleScored:
    return SampleScored(time_s=0.0, sample=which, value=value, seconds=seconds)


def schedule(workers: int | None, order: str = "fifo", **deadline: float) -> RewardSchedule:
    limits = AdaptiveDeadlineConfig(**deadline) if deadline else None
    kind = RewardKindConfig(workers=workers, deadline=limits)
    return RewardSchedule(RewardScheduleConfig(order=order, kinds={"code": kind}))  # type: ignore[arg-type]


def test_without_a_bound_every_check_starts_at_once() -> None:
    checks = schedule(None)
    assert [checks.ask(sample(row)) for row in range(3)] == [
        [Score(sample=sample(row))] for row in range(3)
    ]


def test_workers_bound_what_runs_and_first_come_is_first_served() -> None:
    checks = schedule(1)
    assert len(checks.ask(sample(0))) == 1
    assert checks.ask(sample(1)) == checks.ask(sample(2)) == []
    assert checks.free(scored(sample(0))) == 0
    assert checks.start_waiting("code", lambda prompt: 1) == [Score(sample=sample(1))]


def test_a_dropped_check_never_starts() -> None:
    checks = schedule(1)
    for row in range(3):
        checks.ask(sample(row))
    assert checks.drop([sample(0), sample(1)]) == [CancelScore(samples=(sample(0),))]
    checks.free(scored(sample(0)))
    assert checks.start_waiting("code", lambda prompt: 1) == [Score(sample=sample(2))]


def test_closest_takes_the_prompt_that_lacks_least() -> None:
    checks = schedule(1, "closest")
    for row in range(4):
        checks.ask(sample(row))
    checks.free(scored(sample(0)))
    missing = {1: 3, 2: 1, 3: 2}
    assert checks.start_waiting("code", lambda prompt: missing[prompt.row]) == [
        Score(sample=sample(2))
    ]


def test_the_deadline_learns_from_correct_answers_only() -> None:
    checks = schedule(None, min_s=2.0, factor=1.5, max_s=30.0)
    assert checks.ask(sample(0)) == [Score(sample=sample(0), timeout_s=30.0)]
    checks.free(scored(sample(0), seconds=29.0, value=0.0))
    assert checks.timeout_s("code") == 30.0
    checks.ask(sample(1))
    checks.free(scored(sample(1), seconds=4.0))
    assert checks.timeout_s("code") == 6.0
    again = schedule(None, min_s=2.0, factor=1.5, max_s=30.0)
    again.restore(checks.state())
    assert again.timeout_s("code") == 6.0


def test_longest_expected_comes_first() -> None:
    """What a prompt's checks took, before that the kind's mean, and then the response's length."""
    checks = schedule(1, "longest")
    checks.ask(sample(1, 0))
    assert checks.free(scored(sample(1, 0), seconds=3.0)) == 0
    checks.ask(sample(2, 0))
    assert checks.free(scored(sample(2, 0), seconds=9.0)) == 0
    checks.ask(sample(0))
    for which, tokens in ((sample(1, 1), 900), (sample(3), 10), (sample(4), 20), (sample(2, 1), 5)):
        assert checks.ask(which, tokens) == []
    order = []
    running = sample(0)
    for _ in range(4):
        checks.free(SampleScored(time_s=0.0, sample=running, value=None))
        (command,) = checks.start_waiting("code", lambda prompt: 1)
        assert isinstance(command, Score)
        running = command.sample
        order.append(running)
    # 9 s; the mean (6 s), longer response first; 3 s
    assert order == [sample(2, 1), sample(4), sample(3), sample(1, 1)]
    assert checks.num_waiting == 0


@pytest.mark.parametrize("order", ["fifo", "closest", "longest"])
def test_only_the_samples_that_are_dropped_leave_the_queue(order: str) -> None:
    checks = schedule(1, order)
    for index in range(4):
        checks.ask(sample(0, index), index)
    checks.drop([sample(0, 2)])
    started = []
    running = sample(0, 0)
    for _ in range(2):
        checks.free(scored(running))
        (command,) = checks.start_waiting("code", lambda prompt: 1)
        assert isinstance(command, Score)
        running = command.sample
        started.append(running.index)
    assert sorted(started) == [1, 3]
    checks.free(scored(running))
    assert checks.start_waiting("code", lambda prompt: 1) == []


def test_a_deadline_does_not_learn_from_what_ran_into_it() -> None:
    """A bonus for form on a program that timed out must not raise the limit for all others."""
    checks = schedule(None, min_s=1.0, factor=1.5, max_s=30.0)
    for row, event in enumerate(
        (
            SampleScored(time_s=0.0, sample=sample(0), value=0.1, seconds=9.0, timed_out=True),
            SampleScored(time_s=0.0, sample=sample(1), value=0.1, seconds=9.0, correct=False),
            SampleScored(time_s=0.0, sample=sample(2), value=None, seconds=9.0, cause="deadline"),
        )
    ):
        checks.ask(sample(row))
        checks.free(event)
    assert checks.timeout_s("code") == 30.0
    checks.ask(sample(3))
    checks.free(SampleScored(time_s=0.0, sample=sample(3), value=-1.0, seconds=4.0, correct=True))
    assert checks.timeout_s("code") == 6.0


def test_a_verdict_that_nobody_asked_for_is_told_apart() -> None:
    assert schedule(None).free(scored(sample(0))) is None


def test_a_bad_number_of_workers() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, not 0"):
        RewardKindConfig(workers=0)


# -- inside whole runs -----------------------------------------------------------------


def config(**values: object) -> JobConfig:
    return JobConfig(prompts_per_step=4, samples_per_prompt=2, **values)  # type: ignore[arg-type]


def test_without_overlap_nothing_is_checked_before_the_last_response() -> None:
    world = World(
        config(max_steps=3, rewards=RewardScheduleConfig(overlap=False)), num_rows=100
    ).run()
    generating = 0
    for record in world.log:
        generating += sum(len(c.samples) for c in record.commands if isinstance(c, Launch))
        generating -= isinstance(record.event, SampleGenerated)
        generating -= type(record.event).__name__ == "SampleAborted"
        assert not generating or not any(isinstance(c, Score) for c in record.commands)
    kept = {s for c in commands_of(world, TrainOn) for group in c.groups for s in group}
    assert {c.sample for c in commands_of(world, Score)} == kept


def test_a_pool_is_never_asked_for_more_than_its_workers() -> None:
    kinds = {"train": RewardKindConfig(workers=2)}
    world = World(
        config(
            max_steps=4,
            rewards=RewardScheduleConfig(kinds=kinds),
            tail_batching=published(race="scored"),
        ),
        num_rows=100,
        unkind=UnkindConfig(verdict_delay_s=30.0),
    ).run()
    running = most = 0
    for record in world.log:
        running -= isinstance(record.event, SampleScored)
        running += sum(isinstance(c, Score) for c in record.commands)
        assert 0 <= running <= 2
        most = max(most, running)
    assert most == 2
    assert len(events_of(world, SampleScored)) > 30


def test_the_machinery_gets_one_more_try_and_is_never_a_zero() -> None:
    world = World(
        config(max_steps=20), num_rows=1000, unkind=UnkindConfig(infrastructure_rate=0.3), seed=1
    ).run()
    asked = commands_of(world, Score)
    failed = {(e.sample, retry) for retry, e in _with_retry(world) if e.cause == "infrastructure"}
    assert {c.sample for c in asked if c.retry == 1} == {s for s, retry in failed if retry == 0}
    assert max(c.retry for c in asked) == 1
    given_up = {s for s, retry in failed if retry == 1}
    trained = {s for c in commands_of(world, TrainOn) for group in c.groups for s in group}
    assert given_up and not given_up & trained
    assert world.retried & trained


def _with_retry(world: World) -> list[tuple[int, SampleScored]]:
    """Verdicts, each with how often its check had been handed over before."""
    retries: dict[SampleId, int] = {}
    found = []
    for record in world.log:
        if isinstance(record.event, SampleScored):
            found.append((retries[record.event.sample], record.event))
        for command in record.commands:
            if isinstance(command, Score):
                retries[command.sample] = command.retry
    return found


def test_cancelled_checks_free_their_worker() -> None:
    """In a race on verdicts with few workers, cancelling what is surplus saves time."""

    def seconds(cancel: bool) -> float:
        rewards = RewardScheduleConfig(cancel=cancel, kinds={"train": RewardKindConfig(workers=4)})
        tail = published(race="scored", sample_factor=2.0)
        world = World(
            config(max_steps=5, rewards=rewards, tail_batching=tail),
            num_rows=100,
            unkind=UnkindConfig(verdict_delay_s=50.0),
        ).run()
        return world.time_s

    assert seconds(True) < seconds(False)


def test_cascades_race_deferred_prompts_once_more() -> None:
    tail = published(
        prompt_factor=1.5, sample_factor=1.5, tiers=(Tier(prompt_factor=1.5, sample_factor=1.0),)
    )
    world = World(config(max_steps=40, tail_batching=tail), num_rows=1000).run()
    rounds = [c for c in commands_of(world, Launch) if c.kind is RoundKind.CASCADE]
    kinds = [c.kind for c in commands_of(world, Launch)]
    assert all(s.attempt == 1 for c in rounds for s in c.samples)
    assert {len(c.samples) for c in rounds} == {6 * 2}
    longs = [c for c in commands_of(world, Launch) if c.kind is RoundKind.LONG]
    assert all(s.attempt == 2 for c in longs for s in c.samples)
    # 2 of 6 prompts go on from a short round and again from a cascade: a ninth of the prompts.
    assert kinds.count(RoundKind.SHORT) > 2 * kinds.count(RoundKind.CASCADE)
    assert kinds.count(RoundKind.CASCADE) > 2 * kinds.count(RoundKind.LONG) > 0


def test_balanced_sources_keep_their_share_of_a_race() -> None:
    def slow_other(which: SampleId, rng: object) -> int:
        return 100 if which.prompt.source == "other" else 1

    for balanced, expected in ((True, {"train": 3, "other": 1}), (False, {"train": 4})):
        world = World(
            config(
                max_steps=1,
                tail_batching=published(
                    prompt_factor=2.0, sample_factor=1.0, balance_sources=balanced
                ),
            ),
            num_rows=100,
            sources=("train", "train", "train", "other"),
            length=slow_other,
        ).run()
        first = commands_of(world, TrainOn)[0]
        sources = [group[0].prompt.source for group in first.groups]
        assert {source: sources.count(source) for source in sources} == expected
