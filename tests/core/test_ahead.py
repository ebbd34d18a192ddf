"""Prompts of the next step that are begun early change nothing but when tokens are generated."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.commands import Defer, Launch, RoundKind, TrainOn
from rollpacker.core.job.config import JobConfig, check_look_ahead
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.unkind import UnkindConfig
from tests.core.test_job import commands_of
from tests.core.test_order_only import OFF, trained, world_of
from tests.core.world import World


def early(world: World) -> list[Launch]:
    return [c for c in commands_of(world, Launch) if c.kind is RoundKind.AHEAD]


@settings(max_examples=60, deadline=None)
@given(
    p0=st.integers(1, 7),
    factor=st.sampled_from((1.0, 1.5)),
    stragglers=st.sampled_from(("queue", "pool")),
    look_ahead=st.sampled_from((0.3, 1.0)),
    seed=st.integers(0, 1000),
    epochs=st.integers(1, 2),
)
def test_the_same_responses_are_trained_on_as_without(
    p0: int,
    factor: float,
    stragglers: str,
    look_ahead: float,
    seed: int,
    epochs: int,
) -> None:
    tail = TailBatchingConfig(
        prompt_factor=factor,
        stragglers=stragglers,  # type: ignore[arg-type]
        look_ahead=look_ahead,
    )
    ahead = world_of(tail, p0=p0, seed=seed, epochs=epochs, heavy=True).run()
    off = world_of(OFF, p0=p0, seed=seed, epochs=epochs, heavy=True).run()
    assert trained(ahead) == trained(off)
    assert not ahead.job.ledger.open
    if factor == 1.0 and look_ahead == 1.0 and p0 > 1:
        assert early(ahead)


@settings(max_examples=30, deadline=None)
@given(factor=st.sampled_from((1.0, 1.5)), seed=st.integers(0, 1000), share=st.floats(0.01, 0.99))
def test_a_resumed_run_is_the_uninterrupted_one(factor: float, seed: int, share: float) -> None:
    tail = TailBatchingConfig(prompt_factor=factor, look_ahead=1.0)
    whole = world_of(tail, seed=seed, epochs=2, heavy=True).run()
    step = max(1, int(share * max(whole.snapshots)))
    rest = whole.resume_from(step)
    assert len(rest.log) < len(whole.log)
    of_rest = [command.groups for command in commands_of(rest, TrainOn)]
    of_whole = [command.groups for command in commands_of(whole, TrainOn)]
    assert of_whole[-len(of_rest) :] == of_rest
    assert not rest.job.ledger.open


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.sampled_from((1.0, 1.5)))
def test_failures_and_late_ends_lose_nothing(seed: int, factor: float) -> None:
    tail = TailBatchingConfig(prompt_factor=factor, look_ahead=1.0)
    unkind = UnkindConfig(failure_rate=0.05, late_finish_rate=0.3)
    run = world_of(tail, seed=seed, epochs=2, heavy=True, unkind=unkind).run()
    prompts = Counter(
        group[0].prompt for command in commands_of(run, TrainOn) for group in command.groups
    )
    dropped = sum(run.job.ledger.dropped.values())
    assert set(prompts.values()) == {1}
    assert len(prompts) + dropped == 120
    assert not run.job.ledger.open


def test_in_a_plain_run_the_next_step_trains_on_the_next_prompts() -> None:
    tail = TailBatchingConfig(prompt_factor=1.0, look_ahead=1.0)
    run, off = (world_of(one, heavy=True).run() for one in (tail, OFF))
    steps = [
        [{group[0].prompt for group in command.groups} for command in commands_of(world, TrainOn)]
        for world in (run, off)
    ]
    assert steps[0] == steps[1], "nobody selects"
    assert run.time_s < 0.9 * off.time_s
    launched = [c for c in commands_of(run, Launch) if c.kind is not RoundKind.AHEAD]
    assert any(max(c.carried, default=0) > 0 for c in launched)
    assert {p for c in commands_of(run, Defer) for p in c.prompts} == {
        sample.prompt for c in early(run) for sample in c.samples
    }


def test_the_last_step_begins_nothing_early() -> None:
    tail = TailBatchingConfig(prompt_factor=1.0, look_ahead=1.0)
    config = JobConfig(prompts_per_step=4, samples_per_prompt=3, max_steps=5, tail_batching=tail)
    run = World(config, num_rows=60, length=lambda sample, rng: rng.randint(1, 50)).run()
    assert len(early(run)) > 0
    assert not run.job.ledger.open
    assert run.job.ledger.num_fetched == 20


def test_no_slot_is_used_twice() -> None:
    tail = TailBatchingConfig(prompt_factor=1.5, look_ahead=1.0)
    run = world_of(tail, heavy=True).run()
    under_way, most, begun = 0, 0, 0
    for record in run.log:
        under_way -= type(record.event).__name__ in ("SampleGenerated", "SampleAborted")
        for command in record.commands:
            if isinstance(command, Launch):
                if command.kind is not RoundKind.AHEAD:
                    begun = len(command.samples)
                under_way += len(command.samples)
                most = max(most, under_way - begun)
    assert most <= 0


@pytest.mark.parametrize(
    "keys", [{"carry": "none"}, {"enabled": False}, {"selection": "published"}]
)
def test_it_needs_tokens_that_are_verified(keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="look_ahead"):
        TailBatchingConfig(look_ahead=0.5, **keys)  # type: ignore[arg-type]


def test_others_that_use_the_slots_are_refused() -> None:
    tail = TailBatchingConfig(look_ahead=0.5)
    check_look_ahead(tail, streams=False, acts=False)
    with pytest.raises(ValueError, match="look_ahead does not go with stream_trainer"):
        check_look_ahead(tail, streams=True, acts=False)
    with pytest.raises(ValueError, match="look_ahead does not go with environments"):
        check_look_ahead(tail, streams=False, acts=True)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_it_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        TailBatchingConfig(look_ahead=share)
