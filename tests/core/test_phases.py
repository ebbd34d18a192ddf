"""The table of a job's phases, and that whole runs keep to it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from rollpacker.core.events import (
    Committed,
    Entered,
    Event,
    PoolNeeded,
    PoolUnneeded,
    Reminded,
    RunStarted,
    SampleScored,
    StopRequested,
)
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import TRANSITIONS, Phase, ProtocolError, expect, mermaid
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.sim.unkind import UnkindConfig
from tests.core.engines import Faults
from tests.core.world import World, published


def config(**settings: object) -> JobConfig:
    kept = {"prompts_per_step": 3, "samples_per_prompt": 2, "max_steps": None} | settings
    return JobConfig(**kept)  # type: ignore[arg-type]


REFILLED = DynamicSamplingConfig(enabled=True, max_refills=2)
FAILING = UnkindConfig(failure_rate=0.6, late_finish_rate=0.5)
SLOW = UnkindConfig(verdict_delay_s=40.0, no_verdict_rate=0.5)
SCORED = published(race="scored")
WORLDS = {
    "plain": World(config(tail_batching=TailBatchingConfig(enabled=False)), num_rows=20),
    "tiers": World(config(tail_batching=published(tiers=(Tier(),))), num_rows=60),
    "refills": World(
        config(dynamic_sampling=REFILLED, tail_batching=published()), num_rows=17, epochs=2, seed=4
    ),
    "refills at an end": World(
        config(dynamic_sampling=REFILLED, tail_batching=published()), num_rows=5, epochs=40
    ),
    "refills of a pool": World(config(dynamic_sampling=REFILLED), num_rows=17, epochs=2, seed=4),
    "no data": World(config(), num_rows=0),
    "engine fails": World(config(), num_rows=60, unkind=FAILING),
    "slow verdicts": World(config(), num_rows=60, unkind=SLOW),
    "no verdicts": World(config(), num_rows=60, unkind=UnkindConfig(no_verdict_rate=1.0)),
    "race on verdicts": World(
        config(tail_batching=published(race="scored")),
        num_rows=60,
        unkind=UnkindConfig(verdict_delay_s=40),
    ),
    "stopped": World(
        config(cadence=Cadence(checkpoint_every_steps=5)), num_rows=60, stop_at_step=3
    ),
    "nothing to do": World(config(max_steps=0), num_rows=3),
    **{
        f"at most {max_losses} engines are lost while {phase}": World(
            config(fleet=FleetConfig(num_engines=2, max_losses=max_losses, losses_of_all=True)),
            num_rows=60,
            faults=Faults(loss_rate=0.5, during=(phase,), notice_s=0.0),
        )
        for phase in Phase
        for max_losses in (1, 3)
    },
}


def watched(world: World) -> set[tuple[Phase, type[Event], Phase]]:
    """Every (before, event, after) of the run."""
    seen = set()
    handle = world.job.handle

    def watch(event: Event) -> object:
        before = world.job.phase
        commands = handle(event)
        seen.add((before, type(event), world.job.phase))
        return commands

    world.job.handle = watch  # type: ignore[method-assign, assignment]
    world.run()
    return seen


def test_runs_keep_to_the_table_and_make_use_of_it() -> None:
    seen = set().union(*(watched(world) for world in WORLDS.values()))
    for before, event, after in seen:
        assert after in TRANSITIONS[before, event], f"{before} --{event.__name__}--> {after}"
    reached = {(before, after) for before, _, after in seen if before is not after}
    in_table = {
        (b, a) for (b, _), following in TRANSITIONS.items() for a in following if a is not b
    }
    assert reached == in_table


def test_every_phase_leads_to_the_end() -> None:
    assert {phase for phase, _ in TRANSITIONS} == set(Phase)
    of_pools = {
        Entered,
        PoolNeeded,
        PoolUnneeded,
        Reminded,
    }  # core/job/pooled_job.py hears them, and no other job
    assert {event for _, event in TRANSITIONS} == set(get_args(Event)) - of_pools
    for phase in Phase:
        reached, frontier = {phase}, {phase}
        while frontier:
            following = {a for (b, _), to in TRANSITIONS.items() if b in frontier for a in to}
            frontier = following - reached
            reached |= frontier
        assert Phase.DONE in reached


def test_what_the_table_does_not_have_raises() -> None:
    expect(Phase.COMMITTING, Committed(time_s=0.0, step=1))
    expect(Phase.DONE, StopRequested(time_s=0.0))
    with pytest.raises(ProtocolError, match="Committed in phase new"):
        expect(Phase.NEW, Committed(time_s=0.0, step=1))
    job = Job(config())
    job.handle(RunStarted(time_s=0.0))
    for event in (RunStarted(time_s=0.0), Committed(time_s=0.0, step=0)):
        with pytest.raises(ProtocolError, match="in phase fetching"):
            job.handle(event)


def test_a_diagram_is_drawn_from_the_table() -> None:
    drawn = mermaid().splitlines()
    assert "    training --> syncing: Trained" in drawn and drawn[-1] == "    done --> [*]"
    assert not any(SampleScored.__name__ in line for line in drawn if line.startswith("    new"))


def test_the_docs_show_this_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    assert mermaid() in page.read_text(encoding="utf-8")
