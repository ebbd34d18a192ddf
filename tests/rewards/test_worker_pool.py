"""The workers of one function: what they print, how many there are, who shares one."""

import asyncio
import logging
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from rollpacker.rewards.build import build_reward
from rollpacker.rewards.functions.printed import MAX_LINES
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, Scored
from rollpacker.rewards.weighted import WeightedReward
from rollpacker.workers import pool as worker_pool
from rollpacker.workers.output import MAX_OUTPUT_BYTES
from tests.rewards.plain import (
    FULL,
    LINUX,
    is_alive,
    note,
    pids_in,
    reward,
    sample,
    scored,
    until,
    values,
    wait_for,
    write,
)

# -- output ---------------------------------------------------------------------------------


def test_what_a_function_prints_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = r"""
        import os, subprocess, sys
        print("at import")
        def f(completions):
            print("plain", 1)
            print("\x1b[31mred\x1b[0m \ud800 no newline", end="", file=sys.stderr)
            os.write(1, b"\nraw \xff\n")
            subprocess.run(["echo", "from a child"])
            return [1.0]
    """
    assert values(reward(tmp_path, source), [sample()]) == [1.0]  # warnings, as the default is
    lines = [record.getMessage() for record in caplog.records]
    for expected in ("at import", "plain 1", r"raw \xff", "from a child"):
        assert f"reward f: {expected}" in lines
    assert any("[31mred" in line and "\\ud800" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_of_a_reward_that_prints_much_the_first_lines_are_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
        def f(completions):
            for number in range(30):
                print("line", number)
            return [1.0] * len(completions)
        def g(completions):
            print("of g")
            return [1.0] * len(completions)
    """
    both = reward(tmp_path, source, "f", "g")

    async def run() -> None:
        for _ in range(3):
            await both.score([sample()])
        await both.close()

    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records]
    of_f = [line for line in lines if line.startswith("reward f")]
    assert of_f[:MAX_LINES] == [f"reward f: line {number}" for number in range(MAX_LINES)]
    assert "counted, not shown" in of_f[MAX_LINES]
    assert of_f[MAX_LINES + 1 :] == [f"reward f printed {90 - MAX_LINES} more lines"]
    assert lines.count("reward g: of g") == 3


@LINUX
def test_a_flood_of_output_costs_the_controller_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_bytes = 5_000_000_000 if FULL else 400_000_000
    source = f"""
        import os
        def f(completions):
            piece = b"x" * 999_999 + b"\\n"
            for _ in range({num_bytes} // 1_000_000):
                at = 0
                while at < len(piece):
                    at += os.write(1, piece[at:])
            return [1.0]
    """
    one = reward(tmp_path, source, timeout_s=120)

    async def run() -> tuple[list[Any], float]:
        call = asyncio.ensure_future(one.score([sample()]))
        longest = 0.0
        while not call.done():
            started = time.thread_time()  # what the loop was held up with
            await asyncio.sleep(0.005)
            longest = max(longest, time.thread_time() - started)
        await one.close()
        return call.result(), longest

    before = resource.getrusage(resource.RUSAGE_SELF)
    with caplog.at_level(logging.INFO):
        verdicts, longest = asyncio.run(run())
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert verdicts == [Scored(value=1.0, parts={"f": 1.0})]
    assert after.ru_maxrss - before.ru_maxrss < 10_000, "KB"
    assert longest < 1.0
    logged = sum(len(record.getMessage()) for record in caplog.records)
    assert logged < 2 * MAX_OUTPUT_BYTES


# -- the pool -------------------------------------------------------------------------------


def counted(one: WeightedReward) -> int:
    """Workers of its only part."""
    (part,) = (weighted.part for weighted in one._parts)
    return sum(len(pool._workers) for pool in part._pools.values())  # type: ignore[attr-defined]


def test_workers_come_with_work_and_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "IDLE_S", 0.2)
    source = "import time\ndef f(completions):\n    time.sleep(0.3)\n    return [1.0]\n"
    one = reward(tmp_path, source, workers=3, timeout_s=30)

    async def run() -> list[int]:
        await one.score([sample()])
        numbers = [counted(one)]
        calls = asyncio.gather(*(one.score([sample()]) for _ in range(12)))
        most = 0
        while not calls.done():
            most = max(most, counted(one))
            await asyncio.sleep(0.01)
        numbers.append(most)
        await until(lambda: counted(one) == 1)
        await one.score([sample()])
        numbers.append(counted(one))
        await one.close()
        return numbers

    assert asyncio.run(run()) == [1, 3, 1]


def test_cancelling_ends_what_nobody_waits_for(tmp_path: Path) -> None:
    source = f"""
        import os, time
        def f(completions):
            {note(tmp_path)}
            time.sleep(600 if completions == ["slow"] else 0)
            return [1.0]
    """
    one = reward(tmp_path, source, timeout_s=500)

    async def run() -> list[Any]:
        slow = asyncio.ensure_future(one.score([sample("slow")]))
        waiting = asyncio.ensure_future(one.score([sample("slow")]))
        await until(lambda: bool(pids_in(tmp_path)))
        waiting.cancel()
        slow.cancel()
        started = time.monotonic()
        got = await one.score([sample()])
        assert time.monotonic() - started < 100
        for call in (slow, waiting):
            with pytest.raises(asyncio.CancelledError):
                await call
        await one.close()
        return got

    assert asyncio.run(run()) == [Scored(value=1.0, parts={"f": 1.0})]
    assert len(pids_in(tmp_path)) == 2, "one that was ended, one that took its place"


ASYNC = """
    import asyncio, os, time
    calls = 0
    async def f(completions):
        {note}
        match completions[0]:
            case "wait": await asyncio.sleep(30)
            case "block": time.sleep(30)
            case "some": await asyncio.sleep(0.5)
            case "stay":
                while True:
                    try:
                        await asyncio.sleep(30)
                    except asyncio.CancelledError:
                        pass
        return [1.0]
"""


def test_async_calls_that_are_cancelled_or_late_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "ANSWER_WITHIN_S", 5.0)  # on a busy machine
    one = reward(tmp_path, ASYNC.format(note=note(tmp_path)), timeout_s=20)

    async def run() -> tuple[list[Any], list[Any], Any]:
        cancelled = asyncio.ensure_future(one.score([sample("wait")]))
        others = [asyncio.ensure_future(one.score([sample("some")])) for _ in range(3)]
        await until(lambda: bool(pids_in(tmp_path)))
        late = await one.score([sample("wait")], timeout_s=0.1)
        cancelled.cancel()
        got = [(await other)[0] for other in others]
        last = await one.score([sample()])
        await one.close()
        return late, got, last

    late, got, last = asyncio.run(run())
    assert isinstance(late[0], Failed) and late[0].cause is Cause.DEADLINE
    assert all(isinstance(verdict, Scored) for verdict in (*got, *last))
    assert len(pids_in(tmp_path)) == 1, "all of it in one worker"


def test_an_async_call_that_blocks_the_loop_is_found(tmp_path: Path) -> None:
    async def run(timeout_s: float) -> list[Any]:
        source = ASYNC.format(note=note(tmp_path))
        one = reward(tmp_path, source, timeout_s=timeout_s, workers=2)
        names = ("some", "block", "fine", "some")
        verdicts = await asyncio.gather(*(one.score([sample(name)]) for name in names))
        await one.close()
        return [verdict for (verdict,) in verdicts]

    for timeout_s in (3.0, 12.0):  # a machine that stands still takes as long
        verdicts = asyncio.run(run(timeout_s))
        if [isinstance(verdict, Scored) for verdict in verdicts] == [True, False, True, True]:
            break
    assert [isinstance(verdict, Scored) for verdict in verdicts] == [True, False, True, True]
    assert verdicts[1].cause is Cause.DEADLINE


@LINUX
def test_an_async_call_that_will_not_end_loses_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(worker_pool.GIVE_IN_WITHIN_S, True, 0.1)
    one = reward(tmp_path, ASYNC.format(note=note(tmp_path)), timeout_s=3.0)

    async def run() -> None:
        (verdict,) = await one.score([sample("stay")])
        assert isinstance(verdict, Failed)
        (pid,) = pids_in(tmp_path)
        await until(lambda: not is_alive(pid))
        assert [type(v) for v in await one.score([sample()])] == [Scored]
        await one.close()

    asyncio.run(run())


def test_no_worker_can_be_started_any_more(tmp_path: Path) -> None:
    path = write(tmp_path, "import os\ndef f(completions):\n    os._exit(1)\n")
    one = build_reward([RewardConfig(function=f"{path}:f")])
    path.unlink()
    verdicts = scored(one, [sample(), sample()])
    for verdict in verdicts:
        assert isinstance(verdict, Failed)
        assert verdict.cause is Cause.INFRASTRUCTURE
        assert "there is no file" in verdict.reason


@LINUX
@pytest.mark.parametrize(
    ("numbers", "how", "is_scored"),
    [("2, 3", "9", True), ("2", "19", True), ("2, 3, 4", "9", False)],
)
def test_workers_that_are_lost_while_they_start(
    tmp_path: Path, numbers: str, how: str, is_scored: bool
) -> None:
    """Once or twice is an accident; three in a row are no worker, and no fault of the sample."""
    source = f"""
        import os
        here = {str(tmp_path)!r}
        {note(tmp_path)}
        if len([name for name in os.listdir(here) if name[:4] == "pid-"]) in ({numbers},):
            os.kill(os.getpid(), {how})
        def f(completions):
            if not os.path.exists(here + "/again"):
                open(here + "/again", "w").close()
                os._exit(1)
            return [1.0]
    """
    (verdict,) = scored(reward(tmp_path, source, timeout_s=30), [sample()])
    assert isinstance(verdict, Scored) is is_scored
    if isinstance(verdict, Failed):
        assert verdict.cause is Cause.INFRASTRUCTURE
        assert "ended by itself (signal 9, SIGKILL)" in verdict.reason
    assert wait_for(lambda: not any(map(is_alive, pids_in(tmp_path))))


def test_seconds_are_told_where_a_deadline_learns_from_them(tmp_path: Path) -> None:
    from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig

    source = "import time\ndef f(completions):\n    time.sleep(0.2)\n    return [1.0]\n"
    (verdict,) = scored(reward(tmp_path, source), [sample()])
    assert verdict.seconds is None
    (verdict,) = scored(reward(tmp_path, source, deadline=AdaptiveDeadlineConfig()), [sample()])
    assert isinstance(verdict, Scored)
    assert verdict.seconds is not None and 0.2 <= verdict.seconds < 30
    assert verdict.correct is True


def test_large_batches_and_slow_readers(tmp_path: Path) -> None:
    """More than a socket holds, both ways."""
    source = """
        import time
        def f(completions, answer):
            time.sleep(0.1)
            return [float(len(c)) for c in completions]
    """
    one = reward(tmp_path, source, timeout_s=30)
    size = 200_000
    assert values(one, [sample("x" * size, answer=i) for i in range(50)]) == [float(size)] * 50
    one = reward(tmp_path, source, timeout_s=30)
    assert values(one, [sample("x", answer=i) for i in range(20_000)]) == [1.0] * 20_000


def test_a_call_costs_little(tmp_path: Path) -> None:
    """Twenty short completions, in this process's processor time; docs have the measured number."""
    one = reward(tmp_path, "def f(completions):\n    return [1.0] * len(completions)\n")
    samples = [sample(f"answer {i}") for i in range(20)]

    async def run() -> list[float]:
        seconds = []
        for _ in range(100):
            started = time.process_time()
            await one.score(samples)
            seconds.append(time.process_time() - started)
        await one.close()
        return seconds

    assert statistics.median(asyncio.run(run())) < 0.01
