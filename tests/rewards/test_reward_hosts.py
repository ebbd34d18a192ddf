"""Reward hosts: the same verdicts as in the run's own process, and what a loss costs."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollpacker.imports import GIVEN
from rollpacker.rewards.build import build_reward
from rollpacker.rewards.host_messages import Check, codec
from rollpacker.rewards.hosts import HostedReward, RewardHostsLost, refuse_bound
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    Progress,
    RewardConfig,
    RewardError,
    RewardInput,
    Scored,
)
from rollpacker.rewards.shared import Shared
from rollpacker.sandbox.sandbox import SandboxConfig, SandboxUnavailable
from rollpacker.workers.host import Host, ThisHost
from rollpacker.workers.hosts.remote_host import Gone
from tests.remote.agents import InProcess, Net
from tests.rewards.plain import LINUX, is_alive, pids_in, sample, until, write

pytestmark = LINUX
LONG_S = 120.0

RICH = """
    def f(completions, answer, log_metric, log_extra, **columns):
        if "raise" in completions:
            raise ValueError("no such luck")
        log_metric("asked", len(completions))
        log_extra("words", [c.split() for c in completions])
        print("judging", flush=True)
        return [None if c == "none" else 0.1 * len(c) + (c == a)
                for c, a in zip(completions, answer)]
    def g(completions, progress=None, **columns):
        return [1.0 for _ in completions]
"""
SLOW = """
    import os, time
    def f(completions, folder, **columns):
        folder = folder[0]
        open(f"{folder}/pid-{os.getpid()}", "w").close()
        while "wait" in completions and not os.path.exists(f"{folder}/go"):
            time.sleep(0.01)
        return [float(len(c)) for c in completions]
"""


def run(
    configs: Sequence[RewardConfig],
    work: Callable[[HostedReward], Awaitable[Any]],
    places: Sequence[Host] = (ThisHost(),),
    **settings: Any,
) -> Any:
    """What `work` comes to with reward hosts at these places, which are gone after it."""

    async def main() -> Any:
        names = [config.name or config.function for config in configs]
        hosted = HostedReward(
            configs, settings.pop("sandbox", SandboxConfig()), places, names=names, **settings
        )
        try:
            await asyncio.wait_for(hosted.ready(), LONG_S)
            return await asyncio.wait_for(work(hosted), LONG_S)
        finally:
            pids = list(hosted.pids.values())
            await hosted.close()
            assert not any(map(is_alive, pids))

    return asyncio.run(main())


def functions(folder: Path, source: str, *names: str, **settings: Any) -> list[RewardConfig]:
    path = write(folder, source)
    settings = {"timeout_s": 60.0, "workers": 1} | settings
    return [
        RewardConfig(function=f"{path}:{name}", name=name, **settings) for name in names or ("f",)
    ]


def comparable(verdict: Scored | Failed) -> Scored | Failed:
    return replace(verdict, seconds=None)


def in_this_process(
    configs: Sequence[RewardConfig], samples: Sequence[RewardInput]
) -> list[Scored | Failed]:
    reward = build_reward(configs)

    async def judged() -> list[Scored | Failed]:
        try:
            return [(await reward.score([one]))[0] for one in samples]
        finally:
            await reward.close()

    return [comparable(verdict) for verdict in asyncio.run(judged())]


async def each(hosted: HostedReward, samples: Sequence[RewardInput]) -> list[Scored | Failed]:
    """Every sample by itself, all at once."""
    found = await asyncio.gather(*(hosted.score([one]) for one in samples))
    return [comparable(verdict) for (verdict,) in found]


def where(kind: str) -> list[Host]:
    return [ThisHost()] * 2 if kind == "here" else [ThisHost(), Net(lost=0.2).host()]


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["here", "there"])
def test_verdicts_of_functions_are_those_of_this_process(tmp_path: Path, kind: str) -> None:
    f, g = functions(tmp_path, RICH, "f", "g")
    configs = [replace(f, tasks=("a",)), replace(g, weight=0.3)]
    texts = ("x", "ok", "none", "raise", "\ud800 \N{SNOWMAN}", "y" * 100_000)
    samples = [
        replace(
            sample(text, task=task, answer="ok", more={"deep": [1.5, None, (2, b"x")], 3: "y"}),
            completion_tokens=tuple(range(200)),
            progress=Progress(3, 9),
        )
        for text in texts
        for task in ("a", "b")
    ]
    expected = in_this_process(configs, samples)
    assert len({type(verdict) for verdict in expected}) == 2

    async def judge(hosted: HostedReward) -> None:
        assert await each(hosted, samples) == expected
        together = await hosted.score(samples)
        assert [v.parts for v in together] == [v.parts for v in expected]
        assert await hosted.score([]) == []

    run(configs, judge, where(kind))


def test_verdicts_of_math_and_code_are_those_of_this_process() -> None:
    configs = [
        RewardConfig(function="math", tasks=("math",), workers=2),
        RewardConfig(function="code", tasks=("code",), workers=2),
    ]
    tests = [{"input": "3", "output": "9"}]
    program = "```python\nprint(int(input()) ** 2)\n```"
    samples = [
        sample(r"\boxed{\frac{1}{2}}", task="math", answer="0.5"),
        sample(r"\boxed{3}", task="math", answer="0.5"),
        sample("nothing", task="math", answer="0.5"),
        sample(program, task="code", tests=tests),
        sample(program.replace("2", "3"), task="code", tests=tests),
    ]
    try:
        Shared(SandboxConfig()).check_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(f"NOT TESTED, no sandbox here: {str(error).splitlines()[0]}")
    expected = in_this_process(configs, samples)
    assert [v.value for v in expected if isinstance(v, Scored)] == [1.0, 0.0, 0.0, 1.0, 0.0]

    async def judge(hosted: HostedReward) -> None:
        assert not hosted.unsandboxed
        assert await each(hosted, samples) == expected

    run(configs, judge, [ThisHost()])


def test_what_a_function_prints_and_a_host_logs_is_in_this_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollpacker")

    async def judge(hosted: HostedReward) -> None:
        await hosted.score([sample("ok", answer="ok")])
        await until(lambda: "judging" in caplog.text, LONG_S)

    run(functions(tmp_path, RICH), judge)
    assert "reward host 0 on this machine: reward f: judging" in caplog.text


def test_a_batch_is_shared_out_and_single_checks_go_to_who_has_fewest(tmp_path: Path) -> None:
    async def judge(hosted: HostedReward) -> None:
        columns = {"folder": str(tmp_path)}
        await hosted.score([sample("ok", **columns)] * 4)
        assert len(pids_in(tmp_path)) == 2
        waiting = asyncio.ensure_future(hosted.score([sample("wait", **columns)]))
        (one,) = await hosted.score([sample("okay", **columns)])
        assert isinstance(one, Scored) and one.value == 4.0
        (tmp_path / "go").touch()
        assert isinstance((await waiting)[0], Scored)

    run(functions(tmp_path, SLOW), judge, [ThisHost()] * 2)


def test_a_check_that_is_cancelled_ends_on_its_host(tmp_path: Path) -> None:
    async def judge(hosted: HostedReward) -> None:
        columns = {"folder": str(tmp_path)}
        waiting = asyncio.ensure_future(hosted.score([sample("wait", **columns)]))
        await until(lambda: len(pids_in(tmp_path)) == 1, LONG_S)
        (worker,) = pids_in(tmp_path)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: not is_alive(worker), LONG_S)
        (one,) = await hosted.score([sample("ok", **columns)])  # by the only other worker
        assert isinstance(one, Scored) and hosted.metrics()["reward_hosts/lost"] == 0

    run(functions(tmp_path, SLOW), judge)


def test_columns_that_cannot_be_sent_are_no_verdict_of_that_sample_alone(tmp_path: Path) -> None:
    async def judge(hosted: HostedReward) -> None:
        odd = sample("ok", answer=datetime.date(2026, 1, 1))
        good, bad = await hosted.score([sample("ok", answer="ok"), odd])
        assert isinstance(good, Scored) and isinstance(bad, Failed)
        assert bad.cause is Cause.SAMPLE and "no message can hold a date" in bad.reason

    run(functions(tmp_path, RICH), judge)


def test_a_prompts_row_goes_once_for_all_its_samples() -> None:
    columns = {"tests": "x" * 10_000}
    one = replace(sample("a"), columns=columns)
    check = Check(tuple(replace(one, completion=f"{n}") for n in range(50)), 2.5)
    sent = codec().encode(check)
    assert codec().decode(sent) == check
    assert len(sent) < 20_000


# -- losses ----------------------------------------------------------------------------------------


async def lost_and_asked_again(
    hosted: HostedReward, folder: Path, lose: Callable[[int], object]
) -> Failed:
    """Lose the host that has a check; the same one asked again gets its verdict elsewhere."""
    waiting = asyncio.ensure_future(hosted.score([sample("wait", folder=str(folder))]))
    await until(lambda: len(pids_in(folder)) == 1, LONG_S)
    (worker,) = pids_in(folder)
    lose(0)
    (lost,) = await waiting
    assert isinstance(lost, Failed) and lost.cause is Cause.INFRASTRUCTURE
    again = asyncio.ensure_future(hosted.score([sample("wait", folder=str(folder))]))
    await until(lambda: len(pids_in(folder)) == 2, LONG_S)
    (folder / "go").touch()
    (verdict,) = await again
    assert isinstance(verdict, Scored) and verdict.value == 4.0
    assert hosted.metrics()["reward_hosts/lost"] == 1
    await until(lambda: not is_alive(worker), LONG_S)
    return lost


def test_a_check_lost_with_its_host_is_judged_elsewhere(tmp_path: Path) -> None:
    async def judge(hosted: HostedReward) -> None:
        first = hosted.pids[0]
        lost = await lost_and_asked_again(
            hosted, tmp_path, lambda n: os.kill(hosted.pids[n], signal.SIGKILL)
        )
        assert "reward host 0 on this machine" in lost.reason and "SIGKILL" in lost.reason
        await until(lambda: len(hosted.pids) == 2 and hosted.pids[0] != first, LONG_S)
        columns = {"folder": str(tmp_path)}
        await until(lambda: hosted.book.num_ready == 2, LONG_S)  # it was begun again
        assert all(isinstance(v, Scored) for v in await hosted.score([sample(**columns)] * 8))

    run(functions(tmp_path, SLOW), judge, [ThisHost()] * 2)


def test_a_host_that_is_stopped_is_lost(tmp_path: Path) -> None:
    async def judge(hosted: HostedReward) -> None:
        first = hosted.pids[0]
        lost = await lost_and_asked_again(
            hosted, tmp_path, lambda n: os.kill(hosted.pids[n], signal.SIGSTOP)
        )
        assert "it was stopped by a signal" in lost.reason
        await until(lambda: not is_alive(first), LONG_S)

    run(functions(tmp_path, SLOW), judge, [ThisHost()] * 2, heartbeat_s=2.0)


class Unreachable(Net):
    """No new agent comes while it is cut."""

    def connect(self, predecessor: int) -> InProcess:
        if self.is_cut.is_set():
            raise Gone("no route")
        return super().connect(predecessor)


@pytest.mark.parametrize(("host_s", "process_s"), [(2.0, 5.0), (8.0, 4.0)])
def test_a_host_that_is_cut_off_is_lost_once_and_comes_back(
    host_s: float, process_s: float, tmp_path: Path
) -> None:
    """Whose heartbeat is over first: a process says nothing either when its host does not answer,
    and one that is begun on such a host would be lost with it once more."""
    net = Unreachable()
    far = net.host(heartbeat_s=host_s)

    async def judge(hosted: HostedReward) -> None:
        columns = {"folder": str(tmp_path)}
        waiting = asyncio.ensure_future(hosted.score([sample("wait", **columns)]))
        await until(lambda: len(pids_in(tmp_path)) == 1, LONG_S)
        net.is_cut.set()
        (lost,) = await waiting
        assert isinstance(lost, Failed) and "there has not answered for" in lost.reason
        (verdict,) = await hosted.score([sample("ok", **columns)])
        assert isinstance(verdict, Scored)
        net.is_cut.clear()
        await until(lambda: hosted.book.num_ready == 2, LONG_S)
        assert hosted.book.num_lost == 1

    try:
        run(functions(tmp_path, SLOW), judge, [far, ThisHost()], heartbeat_s=process_s)
    finally:
        far.close()
        for agent in net.agents:
            agent.close()


def test_a_host_lost_again_and_again_is_given_up_and_all_of_them_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def judge(hosted: HostedReward) -> None:
        columns = {"folder": str(tmp_path)}
        for _ in range(3):
            await until(lambda: hosted.book.num_ready == 2, LONG_S)
            pid = hosted.pids[1]
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: pid not in hosted.pids.values(), LONG_S)
        given_up = "reward host 1 on this machine judges no more: lost 3 times"
        await until(lambda: given_up in caplog.text, LONG_S)  # said in the hosts' own thread
        assert len(hosted.pids) == 1
        assert all(isinstance(v, Scored) for v in await hosted.score([sample(**columns)] * 4))
        for _ in range(3):
            await until(lambda: hosted.book.num_ready == 1, LONG_S)
            pid = hosted.pids[0]
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: pid not in hosted.pids.values(), LONG_S)
        with pytest.raises(RewardHostsLost, match=r"reward host 0.*SIGKILL.*--resume"):
            await hosted.score([sample(**columns)])

    run(functions(tmp_path, SLOW), judge, [ThisHost()] * 2)


def test_a_host_that_cannot_be_had_again_judges_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (config,) = functions(tmp_path, SLOW)

    async def judge(hosted: HostedReward) -> None:
        Path(config.function.rpartition(":")[0]).unlink()
        os.kill(hosted.pids[1], signal.SIGKILL)
        await until(lambda: 1 in hosted.book.given_up, LONG_S)
        columns = {"folder": str(tmp_path)}
        assert isinstance((await hosted.score([sample(**columns)]))[0], Scored)  # it has it

    run([config], judge, [ThisHost()] * 2)
    assert "reward host 1 on this machine judges no more: " in caplog.text


# -- before the run --------------------------------------------------------------------------------


def test_a_function_that_one_host_does_not_have_is_refused(tmp_path: Path) -> None:
    configs = [RewardConfig(function=f"{tmp_path}/none.py:f")]
    with pytest.raises(RewardError, match=r"reward host 0 on this machine: .*none\.py"):
        run(configs, lambda hosted: hosted.score([sample()]))


def test_a_host_without_a_sandbox_does_not_judge() -> None:
    sandbox = SandboxConfig(url="http://127.0.0.1:9")
    with pytest.raises(RewardError, match="reward host 0 on this machine: "):
        run(
            [RewardConfig(function="math")],
            lambda hosted: hosted.score([sample()]),
            sandbox=sandbox,
        )


def test_a_token_of_ray_reaches_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/canary")
    source = """
        import os
        def f(completions, **columns):
            return [float("RAY_AUTH_TOKEN_PATH" in os.environ)] * len(completions)
    """

    async def judge(hosted: HostedReward) -> None:
        (verdict,) = await hosted.score([sample()])
        assert isinstance(verdict, Scored) and verdict.value == 0.0

    run(functions(tmp_path, source), judge)


def test_rewards_that_only_this_process_has_are_refused() -> None:
    judge = RewardConfig(function="judge", name="j", arguments={"model_path": "m"})
    far = RewardConfig(function="judge", arguments={"url": "http://h/v1", "model": "m"})
    refuse_bound([far, RewardConfig(function="math")])
    with pytest.raises(RewardError, match=r"<lambda> .*object.*; nor j .*engine of this process"):
        refuse_bound([RewardConfig(function=GIVEN + "<lambda>"), far, judge])
