"""Checkpoints and evaluations come when they are due, whatever interrupts the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollpacker.core.commands import Commit, Launch, RoundKind
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.records import Record, decode, encode
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from tests.core.world import World, commands_of, published

NO_RACE = TailBatchingConfig(enabled=False)


def world_of(cadence: Cadence | None, steps: int = 6, **settings: object) -> World:
    config = JobConfig(
        prompts_per_step=2,
        samples_per_prompt=2,
        max_steps=steps,
        tail_batching=NO_RACE,
        cadence=cadence,
    )
    return World(config, num_rows=50, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("every", "expected"), [(None, [6]), (2, [2, 4, 6]), (4, [4, 6]), (7, [6])]
)
def test_an_evaluation_comes_every_so_many_steps_and_after_the_last(every, expected) -> None:
    cadence = Cadence(checkpoint_every_steps=3, evaluates=True, eval_every_steps=every)
    commits = commands_of(world_of(cadence).run(), Commit)
    assert [c.step for c in commits if c.evaluate] == expected
    assert [c.step for c in commits if c.checkpoint] == [3, 6]


def test_without_held_out_prompts_nothing_is_evaluated() -> None:
    world = world_of(Cadence(checkpoint_every_steps=1, eval_every_steps=1))
    assert not world.job.evaluation_is_due
    commits = commands_of(world.run(), Commit)
    assert not any(c.evaluate for c in commits) and all(c.checkpoint for c in commits)


def test_a_run_begins_with_an_evaluation() -> None:
    cadence = Cadence(checkpoint_every_steps=1, evaluates=True)
    assert world_of(cadence).job.evaluation_is_due
    world = world_of(cadence).run()
    for step, (state, _, _) in world.snapshots.items():
        restored = Job.restore(world.config, state)
        assert not restored.evaluation_is_due, f"evaluated anew on resume at {step}"


@pytest.mark.parametrize(("every", "step"), [(None, 6), (4, 6), (4, 4)])
def test_an_evaluation_that_a_stop_put_off_comes_at_the_resume(every, step) -> None:
    """Also that of the last step: an interrupted run has what an uninterrupted one has."""
    cadence = Cadence(checkpoint_every_steps=10, evaluates=True, eval_every_steps=every)
    stopped = world_of(cadence, stop_at_round=step).run()
    (commit,) = [c for c in commands_of(stopped, Commit) if c.step == step]
    assert commit.stopping and commit.checkpoint and not commit.evaluate
    assert Job.restore(stopped.config, stopped.snapshots[step][0]).evaluation_is_due
    before = [c.step for c in commands_of(stopped, Commit) if c.evaluate]
    after = [c.step for c in commands_of(stopped.resume_from(step), Commit) if c.evaluate]
    assert step not in before + after


def test_a_stop_during_the_commit_does_not_evaluate_twice() -> None:
    cadence = Cadence(checkpoint_every_steps=10, evaluates=True, eval_every_steps=4)
    stopped = world_of(cadence, stop_at_step=4).run()
    commits = [c for c in commands_of(stopped, Commit) if c.step == 4]
    assert [(c.evaluate, c.checkpoint) for c in commits] == [(True, False), (False, True)]
    assert not Job.restore(stopped.config, stopped.snapshots[4][0]).evaluation_is_due


def test_a_run_given_more_steps_has_not_ended_yet() -> None:
    cadence = Cadence(checkpoint_every_steps=10, evaluates=True)
    stopped = world_of(cadence, stop_at_round=6).run()
    longer = replace(stopped.config, max_steps=9)
    assert not Job.restore(longer, stopped.snapshots[6][0]).evaluation_is_due


def test_what_is_not_due_is_not_in_the_log() -> None:
    """Logs from before these fields, and simulations, have none of them."""
    world = world_of(None).run()
    lines = [encode(record) for record in world.log]
    assert not any(word in line for line in lines for word in ('checkpoint"', "evaluate", "specul"))
    assert "cadence" not in world.config.to_plain() and "speculate" not in world.config.to_plain()


def test_kinds_of_round_that_speculate() -> None:
    config = JobConfig(
        prompts_per_step=4,
        samples_per_prompt=2,
        max_steps=8,
        speculate=("long", "flush"),
        tail_batching=published(),
    )
    world = World(config, num_rows=100).run()
    launches = commands_of(world, Launch)
    assert {c.kind for c in launches if c.speculate} == {RoundKind.LONG, RoundKind.FLUSH}
    assert not any(c.speculate for c in launches if c.kind is RoundKind.SHORT)
    again = [decode(encode(record)) for record in world.log]
    assert [r.commands for r in again if isinstance(r, Record)] == [r.commands for r in world.log]
