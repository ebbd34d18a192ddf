"""The reward `code` as a run makes it, with a sandbox of its own."""

from __future__ import annotations

import asyncio

import pytest

from examples.code.tasks import code_tasks
from rollpacker.rewards.build import build_reward
from rollpacker.rewards.reward import Failed, RewardConfig, RewardInput, Scored
from rollpacker.sandbox import SandboxUnavailable


def test_the_reward_of_a_config_checks_and_scores() -> None:
    made = build_reward([RewardConfig(function="code", arguments={"partial": True})])
    rows = list(code_tasks(4, seed=0))
    samples = [
        RewardInput(
            prompt=row["prompt"],
            completion=completion,
            completion_tokens=(1,),
            finish_reason="stop",
            columns=row,
        )
        for row in rows
        for completion in (row["reference_solution"], "no program")
    ]

    async def scored() -> list[Scored | Failed]:
        try:
            return await made.score(samples, timeout_s=20.0)
        finally:
            await made.close()

    try:
        made.check([(None, row) for row in rows])
    except SandboxUnavailable as error:
        pytest.skip(f"NOT TESTED, no sandbox here: {str(error).splitlines()[0]}")
    verdicts = asyncio.run(scored())
    assert all(isinstance(verdict, Scored) for verdict in verdicts)
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Scored)] == [1.0, 0.0] * 4
