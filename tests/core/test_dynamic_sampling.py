"""Dynamic sampling: groups without signal are left out and replaced, within a bound."""

from __future__ import annotations

import pytest

from rollpacker.core.commands import Drop, Launch, RoundKind, StartGradients, TrainOn
from rollpacker.core.events import PromptsFetched, SampleScored
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.ids import SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.dynamic_sampling import NO_SIGNAL, DynamicSamplingConfig
from tests.core.world import World, commands_of, events_of, published


def world(max_refills: int = 50, num_rows: int = 2000, steps: int = 12, **values: object) -> World:
    config = JobConfig(
        prompts_per_step=4,
        samples_per_prompt=2,  # half of the groups have no signal
        max_steps=steps,
        dynamic_sampling=DynamicSamplingConfig(enabled=True, max_refills=max_refills),
        **values,  # type: ignore[arg-type]
    )
    return World(config, num_rows=num_rows).run()


def values_of(run: World) -> dict[SampleId, float | None]:
    return {e.sample: e.value for e in events_of(run, SampleScored)}


@pytest.mark.parametrize("enabled", [True, False])
def test_every_step_gets_its_number_of_groups_and_all_have_signal(enabled: bool) -> None:
    run = world(tail_batching=published(enabled=enabled))
    values = values_of(run)
    steps = commands_of(run, TrainOn)[:12]
    assert [len(command.groups) for command in steps] == [4] * 12
    assert not any(command.num_missing for command in steps)
    for command in steps:
        for group in command.groups:
            assert len({values[sample] for sample in group}) == 2
    dropped = [c.prompt for c in commands_of(run, Drop) if c.reason == NO_SIGNAL]
    assert len(dropped) > 20


def test_all_rounds_of_a_step_use_the_same_weights() -> None:
    run = world()
    versions = {s: c.version for c in commands_of(run, Launch) for s in c.samples}
    for version, command in enumerate(commands_of(run, TrainOn)):
        assert {versions[s] for group in command.groups for s in group} == {version}


def test_the_bound_is_kept_and_said() -> None:
    run = world(max_refills=1)
    # What follows the last step empties the queue, in a round that may be smaller.
    short = [c for c in commands_of(run, TrainOn)[:10] if c.num_missing]
    assert short
    assert all(c.num_missing + len(c.groups) == 4 for c in short)
    rounds_of_step: dict[int, set[int]] = {}
    for command in commands_of(run, Launch):
        rounds_of_step.setdefault(command.version, set()).add(command.round)
    assert max(len(rounds) for rounds in rounds_of_step.values()) == 2


def test_without_refills_a_step_goes_on_with_what_it_has() -> None:
    run = world(max_refills=0)
    assert {len(c.groups) + c.num_missing for c in commands_of(run, TrainOn)[:10]} == {4}


def test_filtered_prompts_never_come_back() -> None:
    run = world(tail_batching=published())
    dropped = set()
    for record in run.log:
        for command in record.commands:
            if isinstance(command, Launch):
                assert not {s.prompt for s in command.samples} & dropped
            if isinstance(command, Drop):
                dropped.add(command.prompt)
    assert len(dropped) > 20
    kinds = [c.kind for c in commands_of(run, Launch)]
    assert RoundKind.LONG in kinds  # the queue is served all the same


def test_the_end_of_the_data_ends_refilling() -> None:
    run = world(num_rows=20, steps=100)
    fetched = [p for e in events_of(run, PromptsFetched) for p in e.prompts]
    assert len(fetched) == 20
    trained = [g[0].prompt for c in commands_of(run, TrainOn) for g in c.groups]
    dropped = [c.prompt for c in commands_of(run, Drop)]
    assert sorted(trained + dropped) == sorted(fetched)


def test_streaming_never_begins_a_group_without_signal() -> None:
    run = world(stream=StreamConfig(enabled=True, reward_wait=True))
    values = values_of(run)
    begun = [group for c in commands_of(run, StartGradients) for group in c.groups]
    assert all(len({values[s] for s in group}) == 2 for group in begun)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_refills must be at least 0"):
        DynamicSamplingConfig(max_refills=-1)
