"""With `selection=none` tail batching changes the order of training, and nothing else."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.commands import Abort, Defer, Launch, RoundKind, TrainOn
from rollpacker.core.events import SampleFailed, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.sim.unkind import UnkindConfig
from tests.core.test_job import commands_of, events_of
from tests.core.world import World

OFF = TailBatchingConfig(enabled=False)


def world_of(
    tail: TailBatchingConfig,
    *,
    num_rows: int = 60,
    epochs: int = 1,
    p0: int = 4,
    seed: int = 0,
    unkind: UnkindConfig | None = None,
    sources: tuple[str, ...] = ("train",),
    refills: bool = False,
    heavy: bool = False,
) -> World:
    config = JobConfig(
        prompts_per_step=p0,
        samples_per_prompt=3,
        max_steps=None,
        tail_batching=tail,
        dynamic_sampling=DynamicSamplingConfig(enabled=refills),
    )
    return World(
        config,
        num_rows=num_rows,
        epochs=epochs,
        seed=seed,
        unkind=unkind or UnkindConfig(),
        sources=sources,
        **({"length": heavy_tail} if heavy else {}),  # type: ignore[arg-type]
    )


def heavy_tail(_: SampleId, rng: random.Random) -> int:
    return min(500, int(4 * rng.paretovariate(0.8)))


def trained(world: World) -> Counter[tuple[object, int, int]]:
    """Every response that was trained on: prompt, index, tokens. The world draws a length from the
    noise of a sample, as an engine draws tokens."""
    lengths = {e.sample: e.num_tokens for e in events_of(world, SampleGenerated)}
    return Counter(
        (sample.prompt, sample.index, lengths[sample])
        for command in commands_of(world, TrainOn)
        for group in command.groups
        for sample in group
    )


@settings(max_examples=40, deadline=None)
@given(
    p0=st.integers(1, 7),
    factor=st.sampled_from((1.25, 1.5, 2.0)),
    stragglers=st.sampled_from(("queue", "pool")),
    carry=st.sampled_from(("none", "exact")),
    max_deferrals=st.integers(1, 4),
    balanced=st.booleans(),
    seed=st.integers(0, 1000),
    epochs=st.integers(1, 2),
)
def test_the_same_responses_are_trained_on_as_without(
    p0: int,
    factor: float,
    stragglers: str,
    carry: str,
    max_deferrals: int,
    balanced: bool,
    seed: int,
    epochs: int,
) -> None:
    tail = TailBatchingConfig(
        prompt_factor=factor,
        stragglers=stragglers,  # type: ignore[arg-type]
        carry=carry,  # type: ignore[arg-type]
        max_deferrals=max_deferrals,
        balance_sources=balanced,
    )
    where = {"p0": p0, "seed": seed, "epochs": epochs, "sources": ("a", "b")}
    raced = world_of(tail, **where).run()  # type: ignore[arg-type]
    off = world_of(OFF, **where).run()  # type: ignore[arg-type]
    assert trained(raced) == trained(off)
    assert sum(trained(off).values()) == 60 * epochs * 3
    assert not raced.job.ledger.open


def test_cascades_only_reorder_too() -> None:
    tail = TailBatchingConfig(tiers=(Tier(), Tier(prompt_factor=1.5)))
    raced = world_of(tail).run()
    assert RoundKind.CASCADE in {c.kind for c in commands_of(raced, Launch)}
    assert trained(raced) == trained(world_of(OFF).run())


def test_published_selects() -> None:
    raced = world_of(TailBatchingConfig(selection="published")).run()
    off = world_of(OFF).run()
    assert trained(raced) != trained(off)
    means = [
        sum(tokens * n for (_, _, tokens), n in run.items()) / sum(run.values())
        for run in (trained(raced), trained(off))
    ]
    assert means[0] < means[1]


def test_a_replacement_draws_what_the_failed_sample_would_have() -> None:
    unlucky = UnkindConfig(failure_rate=0.05)
    run = world_of(TailBatchingConfig(), unkind=unlucky).run()
    assert len(events_of(run, SampleFailed)) > 5
    replaced = [c for c in commands_of(run, Launch) if c.replaces]
    assert replaced and all(len(c.replaces) == len(c.samples) == 1 for c in replaced)
    off = Counter((prompt, tokens) for prompt, _, tokens in trained(world_of(OFF).run()).elements())
    seen = Counter((prompt, tokens) for prompt, _, tokens in trained(run).elements())
    assert seen <= off
    lost = sum((off - seen).values())
    assert lost < len(events_of(run, SampleFailed)) / 3, "most failures are made good"


def test_a_pool_races_what_it_has_deferred_before_it_fetches_more() -> None:
    tail = TailBatchingConfig(stragglers="pool", prompt_factor=2.0, max_deferrals=100)
    run = world_of(tail, num_rows=400, heavy=True).run()
    waiting: list[object] = []
    num_short = 0
    for record in run.log:
        for command in record.commands:
            if isinstance(command, Launch) and command.kind is RoundKind.SHORT:
                prompts = list(dict.fromkeys(sample.prompt for sample in command.samples))
                if num_short < 90:  # until the data ends
                    assert len(prompts) == 8
                    assert set(prompts[: len(waiting)]) == set(waiting)
                    assert _falling(command), "who has most behind it goes first"
                    assert any(command.carried) == bool(waiting)
                num_short += 1
                waiting = []
            if isinstance(command, Defer):
                waiting += command.prompts
    assert num_short > 50
    assert RoundKind.LONG not in {c.kind for c in commands_of(run, Launch)[:num_short]}
    assert all(len(c.groups) == 4 for c in commands_of(run, TrainOn)[:90])


def _falling(command: Launch) -> bool:
    most: dict[object, int] = {}
    for sample, tokens in zip(command.samples, command.carried, strict=False):
        most[sample.prompt] = max(most.get(sample.prompt, 0), tokens)
    return list(most.values()) == sorted(most.values(), reverse=True)


@pytest.mark.parametrize("max_deferrals", [1, 2, 3])
def test_a_prompt_that_was_deferred_often_is_awaited(max_deferrals: int) -> None:
    tail = TailBatchingConfig(stragglers="pool", prompt_factor=2.0, max_deferrals=max_deferrals)
    run = world_of(tail, num_rows=400, heavy=True).run()
    attempts = Counter(sample.attempt for c in commands_of(run, Launch) for sample in c.samples)
    assert max(attempts) == max_deferrals
    endless = TailBatchingConfig(stragglers="pool", prompt_factor=2.0, max_deferrals=100)
    free = world_of(endless, num_rows=400, heavy=True).run()
    assert max(s.attempt for c in commands_of(free, Launch) for s in c.samples) > max_deferrals


def test_nothing_that_was_generated_is_generated_again() -> None:
    def generated(world: World) -> int:
        ends = {}
        for record in world.log:
            event = record.event
            if hasattr(event, "num_tokens"):
                ends[event.sample] = event.num_tokens - (event.num_kept or 0)
        return sum(ends.values())

    off = generated(world_of(OFF).run())
    carried = world_of(TailBatchingConfig(prompt_factor=2.0)).run()
    assert commands_of(carried, Abort)
    assert generated(carried) == off
    redone = TailBatchingConfig(prompt_factor=2.0, carry="none", stragglers="pool")
    assert generated(world_of(redone).run()) > 1.2 * off


def test_refills_race_what_waits() -> None:
    run = world_of(TailBatchingConfig(prompt_factor=1.5), num_rows=200, refills=True).run()
    assert not run.job.ledger.open
    assert sum(run.job.ledger.dropped.values()) > 10  # groups without signal


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    stragglers=st.sampled_from(("queue", "pool")),
    epochs=st.integers(1, 2),
)
def test_a_resumed_run_goes_on_with_what_it_carried(
    seed: int, stragglers: str, epochs: int
) -> None:
    tail = TailBatchingConfig(prompt_factor=1.5, stragglers=stragglers)  # type: ignore[arg-type]
    whole = world_of(tail, num_rows=40, seed=seed, epochs=epochs).run()
    for step in sorted(whole.snapshots)[::3]:
        again = whole.resume_from(step)
        expected = [c for c in commands_of(whole, Launch) if c.version >= step]
        assert commands_of(again, Launch) == expected
        assert commands_of(again, TrainOn) == commands_of(whole, TrainOn)[step:]
    dropped = whole.resume_from(
        2, JobConfig(**{**_settings(whole), "tail_batching": TailBatchingConfig(carry="none")})
    )
    assert not any(c.carried for c in commands_of(dropped, Launch))


def _settings(world: World) -> dict[str, object]:
    return {name: getattr(world.config, name) for name in JobConfig.__dataclass_fields__}
