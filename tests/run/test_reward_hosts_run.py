"""A run whose rewards judge on reward hosts, which are killed and stopped meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactly_once import check
from rollpacker.core.checks.reward_hosts import MAX_LOSSES
from rollpacker.core.checks.reward_schedule import RewardKindConfig, RewardScheduleConfig
from rollpacker.core.commands import Score
from rollpacker.core.events import SampleGenerated, SampleScored
from rollpacker.core.records import Record
from rollpacker.report.log import EventLog
from rollpacker.rewards.hosts import HostedReward, RewardHostsLost
from rollpacker.rewards.reward import RewardConfig
from rollpacker.run.driver import Controller
from rollpacker.run.error_messages import classify
from rollpacker.run.parts.hosts import Hosts
from rollpacker.run.replay import replay
from rollpacker.sandbox.sandbox import SandboxConfig
from tests.rewards.plain import LINUX, until, write
from tests.run.fakes import make, run_config

pytestmark = LINUX
LONG_S = 120.0
FAULTS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL)
JUDGES = """
    import time
    def f(completions, **columns):
        time.sleep(%g)
        return [float(len(c)) for c in completions]
"""


def hosted(folder: Path, takes_s: float) -> HostedReward:
    folder.mkdir()
    function = f"{write(folder, JUDGES % takes_s)}:f"
    configs = [RewardConfig(function=function, name="fake", timeout_s=900.0, workers=2)]
    return HostedReward(
        configs, SandboxConfig(), Hosts().beside_engines(2), names=("fake",), heartbeat_s=2.0
    )


def drive(controller: Controller, meanwhile: Coroutine[Any, Any, None]) -> str:
    """Run to the end, which comes after what happens meanwhile."""

    async def go() -> str:
        faults = asyncio.ensure_future(meanwhile)
        try:
            return await controller.run()
        finally:
            if not faults.done():
                faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
            await controller.close()
            if not faults.cancelled():
                faults.result()

    return asyncio.run(go())


async def lose(reward: HostedReward, number: int, how: signal.Signals) -> None:
    """And its end is over with."""
    num_lost = reward.book.num_lost
    os.kill(reward.pids[number], how)
    await until(lambda: reward.book.num_lost > num_lost, LONG_S)


@pytest.mark.parametrize("workers", [None, 4], ids=["batches", "single"])
def test_losses_cost_time_and_nothing_else(tmp_path: Path, workers: int | None) -> None:
    reward = hosted(tmp_path / "f", 0.02)
    schedule = RewardScheduleConfig(kinds={"train": RewardKindConfig(workers=workers)})
    controller, recorder = make(tmp_path, run_config(10_000), reward=reward, rewards=schedule)

    async def faults() -> None:
        for number, how in enumerate(FAULTS):
            await until(lambda: reward.book.num_ready == 2, LONG_S)
            # One fault at a time: no check is lost twice.
            await until(lambda: not any(controller.bus.job.rewards.running.values()), LONG_S)
            await until(lambda n=number % 2: reward.book.num_under_way(n) > 0, LONG_S)
            await lose(reward, number % 2, how)
        await until(lambda: reward.book.num_ready == 2, LONG_S)
        controller.request_stop("enough")

    assert drive(controller, faults()) == "enough"
    log = tmp_path / "events.jsonl"
    queues = controller.parts.job.queues
    waiting = [*queues.long, *(one for tier in queues.tiers for one in tier)]
    waits = {f"{one.prompt} was settled 0 times" for one in waiting}
    assert set(check(log)["problems"]) == waits  # none else is missing, none is there twice
    assert replay(EventLog(log)).difference is None
    events = [entry.event for entry in recorder.entries if isinstance(entry, Record)]
    scored = [event for event in events if isinstance(event, SampleScored)]
    lost = Counter(event.sample for event in scored if event.cause == "infrastructure")
    assert lost and set(lost.values()) == {1}
    verdicts = Counter(event.sample for event in scored if event.value is not None)
    assert set(verdicts.values()) == {1}
    commands = [c for e in recorder.entries if isinstance(e, Record) for c in e.commands]
    again = {c.sample for c in commands if isinstance(c, Score) and c.retry}
    cancelled = {event.sample for event in scored if event.cause == "cancelled"}
    assert again and again <= set(lost)  # the others were not needed any more
    assert again <= set(verdicts) | cancelled
    tokens = {e.sample: e.num_tokens for e in events if isinstance(e, SampleGenerated)}
    assert all(e.value == tokens[e.sample] for e in scored if e.value is not None)
    assert reward.metrics()["reward_hosts/lost"] == len(FAULTS)


def test_a_run_without_reward_hosts_ends_with_what_became_of_them(tmp_path: Path) -> None:
    reward = hosted(tmp_path / "f", 600.0)
    controller, recorder = make(tmp_path, run_config(), reward=reward, evaluates=False)

    async def faults() -> None:
        for number in (0, 1):
            for _ in range(MAX_LOSSES):
                await until(reward.book.is_settled, LONG_S)
                await lose(reward, number, signal.SIGKILL)

    with pytest.raises(RewardHostsLost, match="no reward host is left") as raised:
        drive(controller, faults())
    assert classify(raised.value)[0] == 6
    told = str(raised.value)
    assert told.count("lost 3 times without a finished check") == 2 and "--resume" in told
    scored = [
        entry.event
        for entry in recorder.entries
        if isinstance(entry, Record) and isinstance(entry.event, SampleScored)
    ]
    assert {event.value for event in scored} == {None}
    assert {event.cause for event in scored} <= {"infrastructure", "cancelled"}
