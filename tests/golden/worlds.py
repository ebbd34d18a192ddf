"""Runs in virtual time whose logs are kept: what the real runs of `logs/` do not have.

The worlds are those of `tests/core`; their logs hold every event and the commands that it led to.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.job.config import ActingConfig, JobConfig
from rollpacker.core.records import Session, encode
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from tests.core.engines import Faults
from tests.core.pools import AtRandom
from tests.core.trainer import TrainerFaults
from tests.core.world import World, published

POOL = TailBatchingConfig(prompt_factor=1.5, stragglers="pool")


def _config(**settings: object) -> JobConfig:
    kept = {"prompts_per_step": 4, "samples_per_prompt": 3, "max_steps": 8} | settings
    return JobConfig(**kept)  # type: ignore[arg-type]  # settings of any type


def turns() -> World:
    """Episodes of several turns, as published."""
    return World(_config(tail_batching=published(), acting=ActingConfig()), num_rows=60)


def turns_carried() -> World:
    """Episodes whose stopped turns are carried to the next round."""
    return World(_config(tail_batching=POOL, acting=ActingConfig()), num_rows=60, seed=1)


def pooled() -> World:
    """A job that waits for pools that it shares."""
    return World(_config(tail_batching=POOL, shares_pools=True), num_rows=60, broker=AtRandom(0))


def lost_engine() -> World:
    """Two engines, of which one is lost now and then."""
    fleet = FleetConfig(num_engines=2)
    faults = Faults(loss_rate=0.02)
    return World(_config(tail_batching=POOL, fleet=fleet), num_rows=60, faults=faults)


def lost_trainer() -> World:
    """A trainer that is lost and comes back."""
    faults = TrainerFaults(loss_rate=0.3)
    config = _config(tail_batching=POOL, max_trainer_losses=3)
    return World(config, num_rows=60, trainer_faults=faults)


WORLDS: dict[str, Callable[[], World]] = {
    "turns": turns,
    "turns-carried": turns_carried,
    "pooled": pooled,
    "lost-engine": lost_engine,
    "lost-trainer": lost_trainer,
}


def log_of(name: str) -> str:
    """The log of one of `WORLDS`, from its beginning to its end."""
    world = WORLDS[name]()
    head = Session(
        started_at="1970-01-01T00:00:00+00:00", time_s=0.0, step=0, job=world.config.to_plain()
    )
    records = [replace(record, cost_s=0.0) for record in world.run().log]
    return "".join(f"{encode(entry)}\n" for entry in (head, *records))
