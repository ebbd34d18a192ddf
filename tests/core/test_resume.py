"""A run that is resumed with a change does what the change says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec import structs

from rollpacker.core.commands import FetchPrompts, Finish, Launch, RoundKind, TrainOn
from rollpacker.core.events import Committed
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.records import Record, Session, decode, encode
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.tail_batching import AUTO_START, Tier
from rollpacker.run.replay import replay
from tests.core.world import World, commands_of, published

AUTO = {"prompt_factor": "auto", "sample_factor": "auto"}


def world_of(**tail: object) -> World:
    config = JobConfig(
        prompts_per_step=3,
        samples_per_prompt=2,
        max_steps=None,
        tail_batching=published(**tail),  # type: ignore[arg-type]
    )
    return World(config, num_rows=80)


def resumed(world: World, step: int, **tail: object) -> World:
    changed = published(**tail)  # type: ignore[arg-type]
    return world.resume_from(step, replace(world.config, tail_batching=changed))


def launched(world: World, kind: RoundKind) -> set[tuple[int, int]]:
    """(prompts, samples of each) of the rounds of this kind."""
    return {
        (len({s.prompt for s in c.samples}), 1 + max(s.index for s in c.samples))
        for c in commands_of(world, Launch)
        if c.kind is kind
    }


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"prompt_factor": 2.0, "sample_factor": 2.0}, (6, 4)),
        ({}, {"prompt_factor": 1.0, "sample_factor": 1.0}, (3, 2)),
        (AUTO, {"prompt_factor": 1.5, "sample_factor": 1.5}, (5, 3)),
    ],
)
def test_a_resumed_run_races_at_the_factors_of_its_configuration(
    before: dict[str, object], after: dict[str, object], expected: tuple[int, int]
) -> None:
    changed = resumed(world_of(**before).run(), 4, **after)
    assert max(launched(changed, RoundKind.SHORT)) == expected  # fewer where the epoch ends


def test_without_tail_batching_nobody_races_after_a_resume() -> None:
    world = world_of().run()
    assert len(world.snapshots[5][0]["queue"]) == 1  # deferred since the last long round
    changed = resumed(world, 5, enabled=False)
    kinds = [command.kind for command in commands_of(changed, Launch)]
    assert set(kinds[1:]) == {RoundKind.PLAIN}
    assert kinds[0] is RoundKind.FLUSH  # what waited for a long round is not forgotten
    assert launched(changed, RoundKind.PLAIN) <= {(3, 2), (1, 2), (2, 2)}
    assert not changed.job.ledger.open and changed.job.ledger.num_trained == 80


def test_factors_that_the_run_chose_stay_what_they_were() -> None:
    world = world_of(**AUTO).run()
    state = json.loads(json.dumps(world.snapshots[4][0]))
    state["factors"] = [1.5, 1.0625]  # chosen, as by a planner that knew the lengths
    assert Job.restore(world.config, state).lengths.factors == (1.5, 1.0625)
    fixed = world_of(prompt_factor=2.0).run()
    now_auto = replace(fixed.config, tail_batching=world.config.tail_batching)
    assert Job.restore(now_auto, fixed.snapshots[4][0]).lengths.factors == AUTO_START


@pytest.mark.parametrize(
    "after",
    [{"tiers": (Tier(), Tier()), "enabled": False}, {}, {"tiers": (Tier(),)}],
)
def test_prompts_of_a_tier_that_is_gone_wait_for_a_long_round(after: dict[str, object]) -> None:
    world = world_of(tiers=(Tier(), Tier(prompt_factor=1.5))).run()
    step = next(s for s, (state, _, _) in world.snapshots.items() if all(state["tier_queues"]))
    state, _, _ = world.snapshots[step]
    tail = published(**after)  # type: ignore[arg-type]
    job = Job.restore(replace(world.config, tail_batching=tail), state)
    kept = len(job.queues.tiers)
    assert kept == (len(tail.tiers) if tail.enabled else 0)
    gone = [tuple(waiting) for tier in state["tier_queues"][kept:] for waiting in tier]
    before = [tuple(waiting) for waiting in state["queue"]]
    assert [(str(one.prompt), one.attempt, []) for one in job.queues.long] == before + gone
    changed = resumed(world, step, **after)
    assert not changed.job.ledger.open and changed.job.ledger.num_trained == 80


@pytest.mark.parametrize(("now", "is_whole"), [(20, True), (30, False)])
def test_what_a_smaller_cap_cut_off_is_not_complete(now: int, is_whole: bool) -> None:
    config = JobConfig(
        prompts_per_step=3, samples_per_prompt=2, max_steps=None, max_response_tokens=20
    )
    world = World(config, num_rows=80).run()
    states = [json.loads(json.dumps(state)) for state, _, _ in world.snapshots.values()]
    state = next(state for state in states if any(carried for _, _, carried in state["queue"]))
    *_, (_, _, carried) = (waiting for waiting in state["queue"] if waiting[2])
    carried[:2] = [[20, True], [5, True]]
    job = Job.restore(replace(config, max_response_tokens=now), state)
    carried = [one for waiting in job.queues.long for one in waiting.carried]
    assert {one.whole for one in carried if one.tokens == 20} == {is_whole}
    assert any(one.whole for one in carried if one.tokens < 20)


def test_a_stop_leaves_the_refills_of_its_step_as_they_are() -> None:
    config = JobConfig(
        prompts_per_step=3,
        samples_per_prompt=2,
        max_steps=None,
        dynamic_sampling=DynamicSamplingConfig(enabled=True, max_refills=3),
    )
    whole = World(config, num_rows=60).run()
    by_step: dict[int, list[int]] = {}
    for record in whole.log:
        for command in record.commands:
            if isinstance(command, Launch):
                by_step.setdefault(command.version, []).append(command.round)
    first_of_refilled = next(rounds[0] for rounds in by_step.values() if len(rounds) > 1)
    stopped = World(config, num_rows=60, stop_at_round=first_of_refilled).run()
    assert stopped.finished == "asked to stop"
    resumed = stopped.resume_from(stopped.job.step)
    both = commands_of(stopped, TrainOn) + commands_of(resumed, TrainOn)
    assert both == commands_of(whole, TrainOn)


def test_more_epochs_are_told_to_the_core() -> None:
    world = World(world_of().config, num_rows=8, epochs=1).run()
    state, _, _ = world.snapshots[max(world.snapshots)]
    committed = Committed(time_s=0, step=world.job.step, checkpointed=True)
    ended = Job.restore(world.config, state)
    assert isinstance(ended.handle(committed)[0], Finish)
    more = Job.restore(world.config, state, data_ended=False)
    assert isinstance(more.handle(committed)[0], FetchPrompts)


def test_a_log_says_that_a_run_was_given_more_epochs() -> None:
    """The old end of the data is in the log before the session, so replay cannot guess it."""
    world = World(world_of().config, num_rows=8, epochs=1).run()
    plain = json.loads(json.dumps(world.config.to_plain()))
    first = Session(started_at="a", time_s=0.0, step=0, job=plain)
    assert "data_ended" not in encode(first)  # as older logs have it
    assert decode(encode(first)) == first
    again = structs.replace(first, step=world.job.step, data_ended=False)
    assert decode(encode(again)) == again
    committed = Record(
        time_s=0.0,
        event=Committed(time_s=0.0, step=world.job.step, checkpointed=True),
        commands=(FetchPrompts(count=4),),
        cost_s=0.0,
    )
    entries = [first, *world.log[:-1], again, committed]
    assert isinstance(world.log[-1].event, Committed)
    assert replay(entries).difference is None
