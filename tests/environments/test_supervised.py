"""Processes of environments: what dies, hangs, is stopped or too slow, and what is left behind."""

import asyncio
import itertools
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from rollpacker.environments.environment import Answered, Begun, Lost
from rollpacker.environments.supervised import SupervisedEnvironments
from tests.environments.playing import (
    answered,
    answers,
    begun,
    calling,
    content,
    episode,
    lost_by,
    of_class,
    of_tools,
    opened,
    played,
    said,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

COUNTS = """
    import os, threading, time

    class Env:
        deterministic = True

        def reset(self, row):
            self.turn, self.begun = 0, time.time()
            return f"begin {row['seed']}"

        def step(self, message):
            text = message["content"]
            self.turn += 1
            if text == "sleep":
                time.sleep(600)
            if text == "spin":
                try:
                    while True:
                        self.turn += 1
                finally:
                    print("interrupted")
            if text == "exit":
                os._exit(7)
            if text == "exit later":
                time.sleep(0.2)
                os._exit(7)
            if text == "work":
                time.sleep(0.6)
            if text == "thread":
                return str(threading.get_ident()), None, False
            if text == "grab":
                self.kept = bytearray(300 << 20)
            if text == "pid":
                return str(os.getpid()), None, False
            if text == "time":
                return str(self.begun), None, False
            return f"turn {self.turn}", 0.25, text == "stop"
"""
ASYNC = COUNTS.replace("    def ", "    async def ").replace(
    "time.sleep(600)", "import asyncio; await asyncio.sleep(600)"
)


def gone(pid: int, within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


async def pid_of(those: SupervisedEnvironments, turn: int, number: int = 0) -> int:
    one = await answered(those, turn, said("pid"), number)
    return int(one.messages[0]["content"])


@pytest.mark.parametrize("source", [COUNTS, ASYNC])
def test_a_turn_is_played_once(tmp_path: Path, source: str) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        first = await begun(those)
        assert await those.begin(episode(), {}, seed=7) is first
        one = await answered(those, 1, said())
        assert one.messages[0]["content"] == "turn 1"
        assert one.reward == 0.25
        assert await those.act(episode(), 1, said()) is one
        assert (await answered(those, 2, said())).messages[0]["content"] == "turn 2"
        those.end(episode())
        those.end(episode())
        late = await those.act(episode(), 3, said())
        assert isinstance(late, Lost)
        assert late.cause == "infrastructure"

    played(of_class(tmp_path, source), play)


def test_episodes_are_spread_and_stay_where_they_are(tmp_path: Path) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        await both_ready(those)
        for number in range(10):
            await begun(those, number)
        first = [await pid_of(those, 1, number) for number in range(10)]
        assert len(set(first)) == 2
        assert min(first.count(pid) for pid in set(first)) >= 4
        assert [await pid_of(those, 2, number) for number in range(10)] == first

    played(of_class(tmp_path, COUNTS, workers=2), play)


async def both_ready(those: SupervisedEnvironments) -> None:
    """Until episodes begin in two processes."""
    found: set[int] = set()
    number = 100
    until = time.monotonic() + 30
    while len(found) < 2:
        assert time.monotonic() < until
        await begun(those, number)
        await begun(those, number + 1)
        found = {await pid_of(those, 1, number), await pid_of(those, 1, number + 1)}
        those.end(episode(number))
        those.end(episode(number + 1))
        number += 2


def test_a_blocking_episode_has_one_thread_and_holds_up_nobody(tmp_path: Path) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        for number in range(3):
            await begun(those, number)
        hangs = asyncio.create_task(those.act(episode(0), 1, said("sleep"), timeout_s=600))
        threads = [
            [
                (await answered(those, turn, said("thread"), number)).messages[0]["content"]
                for turn in (1, 2, 3)
            ]
            for number in (1, 2)
        ]
        assert all(len(set(one)) == 1 for one in threads)
        assert threads[0] != threads[1]
        assert not hangs.done()
        those.end(episode(0))
        lost = await hangs
        assert isinstance(lost, Lost)
        assert lost.cause == "cancelled"

    played(of_class(tmp_path, COUNTS), play)


@pytest.mark.parametrize(("source", "how"), [(COUNTS, "sleep"), (COUNTS, "spin"), (ASYNC, "sleep")])
def test_one_that_is_too_slow_is_lost_alone(tmp_path: Path, source: str, how: str) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        await begun(those, 0)
        await begun(those, 1)
        pid = await pid_of(those, 1, 1)
        async with asyncio.timeout(60):  # and not the 600 s that it sleeps
            lost = await those.act(episode(0), 1, said(how), timeout_s=0.5)
        assert isinstance(lost, Lost)
        assert lost.cause == "deadline"
        assert lost.reason == "Env took longer than 0.5 s"
        assert await pid_of(those, 2, 1) == pid  # the other one plays on, in the same process
        after = await those.act(episode(0), 1, said())
        assert isinstance(after, Lost)

    played(of_class(tmp_path, source), play)


@pytest.mark.parametrize("source", [COUNTS, ASYNC])
def test_one_that_never_begins_is_too_slow(tmp_path: Path, source: str) -> None:
    slow = source.replace("self.turn, self.begun = 0, time.time()", "import time; time.sleep(600)")
    slow = slow.replace(
        "async def reset(self, row):\n            import time; time.sleep(600)",
        "async def reset(self, row):\n            import asyncio; await asyncio.sleep(600)",
    )
    lost = lost_by(of_class(tmp_path, slow, timeout_s=0.5))
    assert (lost.cause, lost.reason) == ("deadline", "Env took longer than 0.5 s")


def test_a_spinning_call_is_interrupted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        await begun(those, 0)
        assert isinstance(await those.act(episode(0), 1, said("spin"), timeout_s=0.3), Lost)
        until = time.monotonic() + 60
        while "environment Env: interrupted" not in caplog.messages:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)

    played(of_class(tmp_path, COUNTS), play)


def test_an_async_one_that_blocks_is_blamed_and_its_process_replaced(tmp_path: Path) -> None:
    source = ASYNC.replace("import asyncio; await asyncio.sleep(600)", "time.sleep(600)")

    async def play(those: SupervisedEnvironments) -> None:
        await begun(those, 0)
        await begun(those, 1)
        blocks = asyncio.create_task(those.act(episode(0), 1, said("sleep"), timeout_s=0.5))
        await asyncio.sleep(0.1)
        waits = asyncio.create_task(those.act(episode(1), 1, said(), timeout_s=30))
        one, two = await blocks, await waits
        assert isinstance(one, Lost)
        assert one.cause == "deadline"
        assert isinstance(two, Lost)
        assert two.cause == "infrastructure"
        await begun(those, 1)
        assert (await answered(those, 1, said(), 1)).messages[0]["content"] == "turn 1"

    played(of_class(tmp_path, source), play)


@LINUX
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("acting", [True, False])
def test_a_process_that_dies_or_is_stopped_is_replaced(
    tmp_path: Path, how: signal.Signals, acting: bool
) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        first = await begun(those)
        pid = await pid_of(those, 1)
        call = asyncio.create_task(those.act(episode(), 2, said("sleep" if acting else "")))
        await asyncio.sleep(0.2)
        if not acting:
            assert isinstance(await call, Answered)
            call = asyncio.create_task(asyncio.sleep(0, Lost(reason="", cause="infrastructure")))
        os.kill(pid, how)
        if not acting:
            await asyncio.sleep(0.5)  # until it is known that it died
        lost = await call
        assert isinstance(lost, Lost)
        assert lost.cause == "infrastructure"
        if not acting:
            late = await those.act(episode(), 3, said())
            assert isinstance(late, Lost)
            assert late.cause == "infrastructure"
        again = await begun(those)  # played again from its start, with the same messages
        assert again.messages == first.messages
        assert await pid_of_new(those) != pid
        assert gone(pid)

    async def pid_of_new(those: SupervisedEnvironments) -> int:
        those.end(episode())
        await begun(those)
        return await pid_of(those, 1)

    played(of_class(tmp_path, COUNTS, deterministic=False), play)


def test_one_that_ends_its_process_is_lost_with_the_reason(tmp_path: Path) -> None:
    lost = lost_by(of_class(tmp_path, COUNTS), said("exit"))
    assert lost.cause == "infrastructure"
    assert "ended by itself (exit status 7)" in lost.reason


def test_one_that_always_ends_its_process_takes_the_others_along_once(tmp_path: Path) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        async def losses(number: int, text: str) -> int:
            for lost in range(4):
                first = await those.begin(episode(number), {}, seed=7)
                if not isinstance(first, Lost):
                    first = await those.act(episode(number), 1, said(text), timeout_s=60)
                if not isinstance(first, Lost):
                    those.end(episode(number))
                    return lost
            return 4

        bad = losses(0, "exit later")
        others = (losses(number, "work") for number in range(1, 6))
        of_bad, *of_others = await asyncio.gather(bad, *others)
        assert of_bad == 4 and max(of_others) == 1, of_others

    played(of_class(tmp_path, COUNTS, deterministic=False), play)


def test_a_deterministic_one_that_answers_otherwise_is_found_out_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(those: SupervisedEnvironments) -> list[Answered | Lost]:
        found = []
        for number in (0, 1):
            await begun(those, number)
            await answered(those, 1, said("time"), number)
            await those.act(episode(number), 2, said("exit"))
            assert (await begun(those, number)).messages
            found.append(await those.act(episode(number), 1, said("time")))
            those.end(episode(number))
        return found

    with caplog.at_level(logging.WARNING):
        for lost in played(of_class(tmp_path, COUNTS), play):
            assert isinstance(lost, Lost)
            assert lost.cause == "environment"
            assert "answered otherwise at turn 1" in lost.reason
        assert sum("answered otherwise" in one.getMessage() for one in caplog.records) == 1
        config = of_class(tmp_path, COUNTS, deterministic=False)
        assert all(isinstance(one, Answered) for one in played(config, play))


def test_memory_is_bounded(tmp_path: Path) -> None:
    lost = lost_by(of_class(tmp_path, COUNTS, memory_mb=200), said("grab"))
    assert lost.cause == "environment"
    assert "MemoryError" in lost.reason
    found = played(of_class(tmp_path, COUNTS, memory_mb=400), grabbed)
    assert found.messages[0]["content"] == "turn 1"


async def grabbed(those: SupervisedEnvironments) -> Answered:
    await begun(those)
    return await answered(those, 1, said("grab"))


def test_a_cancelled_call_gives_the_episode_up(tmp_path: Path) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        await begun(those)
        call = asyncio.create_task(those.act(episode(), 1, said("sleep")))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert isinstance(await those.act(episode(), 1, said()), Lost)
        assert isinstance(await those.begin(episode(), {}, seed=7), Begun)
        assert (await answered(those, 1, said())).messages[0]["content"] == "turn 1"

    played(of_class(tmp_path, COUNTS, deterministic=False), play)


def test_an_episode_that_is_over_is_closed(tmp_path: Path) -> None:
    source = f"""
        import threading
        class Env:
            def reset(self, row):
                return "x"
            def step(self, message):
                return str(threading.active_count()), None, False
            def close(self):
                open({str(tmp_path)!r} + "/closed", "a").write("x")
    """

    async def play(those: SupervisedEnvironments) -> None:
        for number in range(20):
            await begun(those, number)
            those.end(episode(number))
        await begun(those, 50)
        async with asyncio.timeout(60):  # their threads end one by one
            for turn in itertools.count(1):
                answer = await answered(those, turn, said(), 50)
                if int(answer.messages[0]["content"]) <= 3:
                    return

    played(of_class(tmp_path, source), play)
    assert len((tmp_path / "closed").read_text()) == 21  # and the one that was looked at


def test_columns_that_cannot_be_sent_lose_the_episode(tmp_path: Path) -> None:
    lost = lost_by(of_class(tmp_path, COUNTS), lock=threading.Lock())
    assert lost.cause == "environment"
    assert "cannot be sent to a process" in lost.reason


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    source = """
        import os, subprocess
        class Env:
            def reset(self, row):
                child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                return f"{os.getpid()} {child.pid}"
            def step(self, message):
                return "x", None, False
    """

    async def play() -> list[int]:
        async with opened(environments) as those:
            one = await begun(those)
            assert one.messages is not None
            hangs = asyncio.create_task(those.act(episode(), 1, said()))
            await hangs
            return [int(word) for word in one.messages[0]["content"].split()]

    environments = SupervisedEnvironments(of_class(tmp_path, source))
    for pid in asyncio.run(play()):
        assert gone(pid)


def test_who_still_plays_when_the_run_has_closed_is_told_that_nobody_needs_it(
    tmp_path: Path,
) -> None:
    async def play(those: SupervisedEnvironments) -> None:
        await begun(those, 0)
        await those.close()
        assert (await those.begin(episode(0), {}, seed=7), await those.finish(episode(1))) == (
            Lost(reason="nobody needs it", cause="cancelled"),
            Lost(
                reason="the episode was lost before and has not begun anew", cause="infrastructure"
            ),
        )

    played(of_class(tmp_path, COUNTS), play)


def test_tools_that_hang_are_given_up(tmp_path: Path) -> None:
    source = '''
        import time
        def hang() -> str:
            """Hang."""
            time.sleep(600)
        def go() -> str:
            """Go."""
            return "gone"
    '''

    async def play(those: SupervisedEnvironments) -> None:
        message = calling(("go", {}), ("hang", {}), ("go", {}))
        lost = await those.act(episode(), 1, message, timeout_s=0.3)
        assert isinstance(lost, Lost)
        assert lost.cause == "deadline" and lost.reason.endswith("0.3 s (in a call of hang)")
        assert [(call.tool, call.is_well) for call in lost.calls] == [("go", True), ("hang", False)]
        other = await answered(those, 1, calling(("go", {})), 1)
        assert content(other) == "gone"

    played(of_tools(tmp_path, source, "hang", "go"), play)


def test_a_process_in_which_much_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollpacker.environments import episode_pool

    monkeypatch.setattr(episode_pool, "MAX_HUNG", 3)

    async def play(those: SupervisedEnvironments) -> None:
        await begun(those, 50)
        first = await pid_of(those, 1, 50)
        for number in range(3):
            await begun(those, number)
        calls = [those.act(episode(n), 1, said("sleep"), timeout_s=0.2) for n in range(3)]
        assert all(isinstance(one, Lost) for one in await asyncio.gather(*calls))
        await asyncio.sleep(1.5)  # what is given up may take a second to end
        await begun(those, 60)
        assert await pid_of(those, 1, 60) != first
        assert await pid_of(those, 2, 50) == first  # who plays there goes on
        those.end(episode(50))
        assert await asyncio.to_thread(gone, first)

    played(of_class(tmp_path, COUNTS), play)


def test_prompt_of_a_run_of_tools_needs_no_begin(tmp_path: Path) -> None:
    source = '''
        def go(to: str) -> str:
            """Go.

            Args:
                to: Where.
            """
            return to
        go.deterministic = True
    '''
    config = of_tools(tmp_path, source, "go")
    assert content(answers(config, calling(("go", {"to": "sea"})))) == "sea"

    async def play(those: SupervisedEnvironments) -> bool:
        assert (await begun(those)).messages is None
        return those.is_deterministic

    assert played(config, play)
