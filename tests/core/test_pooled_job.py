"""A job that shares its pools: the same decisions as alone, one pool at a time, and a clock that
stands while it waits."""

from __future__ import annotations

from rollpacker.core.commands import Command, Enter, Launch, Leave, TrainOn
from rollpacker.core.job_config import JobConfig
from tests.core.world import World


def job_config(*, shares_pools: bool) -> JobConfig:
    return JobConfig(
        prompts_per_step=2, samples_per_prompt=2, max_steps=4, shares_pools=shares_pools
    )


def said(world: World) -> list[Command]:
    return [command for record in world.log for command in record.commands]


def test_it_decides_what_it_would_alone() -> None:
    alone = World(job_config(shares_pools=False)).run()
    shared = World(job_config(shares_pools=True)).run()
    others = [one for one in said(shared) if not isinstance(one, Enter | Leave)]
    assert others == said(alone)
    assert shared.finished == alone.finished


def test_it_holds_one_pool_at_a_time_and_none_in_the_end() -> None:
    pool = None
    for command in said(World(job_config(shares_pools=True)).run()):
        match command:
            case Enter():
                assert pool is None
                pool = command.pool
            case Leave():
                assert pool == command.pool
                pool = None
            case Launch():
                assert pool == "rollout"
            case TrainOn():
                assert pool == "train"
    assert pool is None
