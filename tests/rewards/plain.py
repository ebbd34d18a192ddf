"""Rewards from the text of functions, and a look at their processes, for the tests of this
folder."""

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollpacker.rewards.build import build_reward
from rollpacker.rewards.reward import Failed, RewardConfig, RewardInput, Scored
from rollpacker.rewards.weighted import WeightedReward


def sample(
    completion: str = "ok", prompt: Any = "p", task: str | None = None, **columns: Any
) -> RewardInput:
    return RewardInput(
        prompt=prompt,
        completion=completion,
        completion_tokens=(1, 2),
        finish_reason="stop",
        columns=columns,
        task=task,
    )


def write(folder: Path, source: str) -> Path:
    """A file of functions, another one each time."""
    path = folder / f"functions_{len(list(folder.iterdir()))}.py"
    path.write_text(textwrap.dedent(source))
    return path


def reward(folder: Path, source: str, *names: str, **settings: Any) -> WeightedReward:
    """Of the functions of these names (`f` if there is none) in this source."""
    path = write(folder, source)
    settings = {"timeout_s": 5.0, "workers": 1} | settings
    names = names or ("f",)
    return build_reward([RewardConfig(function=f"{path}:{name}", **settings) for name in names])


def scored(one: WeightedReward, samples: Sequence[RewardInput]) -> list[Scored | Failed]:
    """The verdicts; the reward is closed after them."""

    async def run() -> list[Scored | Failed]:
        try:
            return await one.score(samples)
        finally:
            await one.close()

    return asyncio.run(run())


def values(one: WeightedReward, samples: Sequence[RewardInput]) -> list[float | str]:
    """What each sample got, or why it got nothing."""
    return [v.value if isinstance(v, Scored) else v.reason for v in scored(one, samples)]


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
FULL = os.environ.get("ROLLPACKER_FULL") == "1"


def is_alive(pid: int) -> bool:
    """Running, stopped or waiting; not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return False


def pids_in(folder: Path) -> list[int]:
    """Process ids that functions wrote as file names."""
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def note(folder: Path) -> str:
    """Code that writes the process id down."""
    return f"open({str(folder)!r} + '/pid-' + str(os.getpid()), 'w').close()"


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
