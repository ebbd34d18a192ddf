"""Environments on other hosts: agents in this process play them (tests/remote/agents.py)."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from rollpacker.environments.environment import Answered, Begun, Lost
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.workers.host import ThisHost
from tests.environments.playing import answered, begun, episode, of_class, opened, said
from tests.remote.agents import Net

COUNTS = """
import os
class Env:
    deterministic = True
    def reset(self, row):
        self.turn = 0
        return "begin"
    def step(self, message):
        self.turn += 1
        if message["content"] == "die":
            os._exit(3)
        return f"turn {self.turn}, " + os.environ.get("PLACE", ""), 0.5, False
"""


def ready(those: SupervisedEnvironments) -> int:
    assert those._pool is not None
    return sum(worker.ready for worker in those._pool._workers)


async def until_ready(those: SupervisedEnvironments, number: int) -> None:
    until = time.monotonic() + 60
    while ready(those) < number:
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


def test_episodes_are_played_there_and_go_on_elsewhere(tmp_path: Path) -> None:
    """A process that dies, then a host that is cut off: what was lost is played again."""
    net, other = Net(), Net()
    hosts = [net.host("there", heartbeat_s=6.0), other.host("elsewhere"), ThisHost()]
    environments = SupervisedEnvironments(of_class(tmp_path, COUNTS, workers="auto", per_host=1))
    environments.be_on(hosts)

    async def play() -> None:
        async with opened(environments) as those:
            await until_ready(those, 3)
            for number in range(6):
                await begun(those, number)
                one = await answered(those, 1, said(), number)
                assert one.messages[0]["content"].startswith("turn 1") and one.reward == 0.5
            lost = await those.act(episode(0), 2, said("die"))
            assert isinstance(lost, Lost) and lost.cause == "infrastructure"
            assert those._pool is not None
            suspects = set(those._pool._suspects)
            assert episode(0).prompt in suspects
            await begun(those, 0)
            await answered(those, 1, said(), 0)
            assert (await answered(those, 2, said(), 0)).messages[0]["content"].startswith("turn 2")

            net.is_cut.set()
            found = await asyncio.gather(
                *(those.act(episode(n), 2, said()) for n in range(1, 6)),
            )
            lost_ones = [n for n, one in enumerate(found, 1) if isinstance(one, Lost)]
            assert lost_ones and all(
                isinstance(one, Answered) or one.cause == "infrastructure" for one in found
            )
            # Nobody's call has brought down a host.
            assert {episode(n).prompt for n in lost_ones} - suspects
            assert those._pool._suspects <= suspects
            for number in lost_ones:
                # The process in place of the one that died is there, too, until that host is lost.
                while not isinstance(
                    again := await those.begin(episode(number), {}, seed=7), Begun
                ):
                    assert again.cause == "infrastructure"
                await answered(those, 1, said(), number)
                await answered(those, 2, said(), number)

    asyncio.run(play())
    net.is_cut.clear()
    for host in hosts[:2]:
        host.close()
    for agent in (*net.agents, *other.agents):
        agent.close()


def test_they_end_with_the_run(tmp_path: Path) -> None:
    net = Net()
    host = net.host()
    environments = SupervisedEnvironments(of_class(tmp_path, COUNTS, workers="auto", per_host=2))
    environments.be_on([host, host])

    async def play() -> list[int]:
        async with opened(environments) as those:
            await until_ready(those, 2)
            assert those._pool is not None
            return [worker.process.child.pid for worker in those._pool._workers]

    pids = asyncio.run(play())
    until = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert len(set(pids)) == 2 and os.getpid() not in pids
    host.close()
    for agent in net.agents:
        agent.close()
