"""One process as its owner has it: set up, called, lost once, and gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollpacker.codec import Codec
from rollpacker.workers.child import state
from rollpacker.workers.host import ThisHost
from rollpacker.workers.kinds import CANCEL
from rollpacker.workers.loop import LoopUse
from rollpacker.workers.served import Loss, ProcessLost, Served

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PROGRAM = "tests.workers.served_echo"
WAIT_S = 60.0
codec = Codec()


class Keeper:
    """An owner that keeps what it is told, and can be waited for from a test's thread."""

    def __init__(self, use: LoopUse, word: object, **settings: Any) -> None:
        self.use = use
        self.said: list[object] = []
        self.losses: list[Loss] = []
        self.fails = False
        self.changed = asyncio.Event()
        self.served = Served(
            use,
            ThisHost(),
            "tests.workers.served_echo",
            "echo",
            codec=codec,
            owner=self,
            **settings,
        )
        self.guardian = self.served.child.pid
        self.served.begin(codec.encode(word))

    def on_ready(self, said: Any) -> None:
        self.said.append(said)
        self.changed.set()

    def on_message(self, kind: int, number: int, said: Any) -> None:
        if self.fails:
            raise RuntimeError("the owner broke")
        self.said.append((kind, number, said))
        self.changed.set()

    def on_hang_up(self) -> None:
        self.said.append("hung up")

    def on_lost(self, loss: Loss) -> None:
        self.losses.append(loss)
        self.changed.set()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.use.loop).result(WAIT_S)

    async def _wait(self, there: Any) -> None:
        while not there():
            self.changed.clear()
            await self.changed.wait()

    def wait_ready(self) -> None:
        self.run(self._wait(lambda: self.served.is_ready))

    def wait_lost(self) -> Loss:
        self.run(self._wait(lambda: self.losses))
        (loss,) = self.losses
        return loss

    async def call(self, what: object) -> Any:
        return await self.served.call(codec.encode(what))


@pytest.fixture
def use() -> Iterator[LoopUse]:
    use = LoopUse()
    yield use
    use.end()


@pytest.fixture
def keep(use: LoopUse) -> Iterator[Any]:
    kept: list[Keeper] = []

    def make(word: object, **settings: Any) -> Keeper:
        kept.append(Keeper(use, word, **settings))
        return kept[-1]

    yield make
    for keeper in kept:
        keeper.run(keeper.served.gone())
        assert state(keeper.served.child.pid) == ""


def test_calls_are_answered_and_other_messages_reach_the_owner(keep: Any) -> None:
    keeper = keep("word")
    keeper.wait_ready()
    assert keeper.said == ["WORD"]
    assert keeper.run(keeper.call("one")) == ["word", "one"]

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(keeper.call("wait"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        while len(keeper.said) < 2:
            keeper.changed.clear()
            await keeper.changed.wait()

    keeper.run(cancelled())
    assert keeper.said[1] == (CANCEL, 2, "seen")
    assert keeper.run(keeper.call("two")) == ["word", "two"]
    assert not keeper.losses


@pytest.mark.parametrize(
    ("word", "said", "is_refused"),
    [
        ("refuse", "no such word", True),
        ("break", "it could not be made: RuntimeError('a bug')", False),
        ("own", "it could not be made: not today", False),
    ],
)
def test_what_cannot_be_made_is_told_in_words(
    keep: Any, word: str, said: str, is_refused: bool
) -> None:
    loss = keep(word).wait_lost()
    assert (loss.reason, loss.is_refused) == (said, is_refused)
    assert str(loss) == f"{loss.process}: {said}"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [("exit", "it ended by itself (exit status 3)"), ("fail", "it fell over")],
)
def test_calls_under_way_end_with_the_process(keep: Any, asked: str, reason: str) -> None:
    keeper = keep("word")
    keeper.wait_ready()

    async def both() -> list[BaseException]:
        calls = [keeper.call("wait"), keeper.call(asked)]
        found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        return found

    for error in keeper.run(both()):
        assert isinstance(error, ProcessLost) and str(error).endswith(f"was lost: {reason}")
    assert keeper.wait_lost().reason == reason
    assert ("hung up" in keeper.said) == (asked == "exit")
    with pytest.raises(ProcessLost, match="is gone"):
        keeper.run(keeper.call("again"))


def test_a_process_that_a_signal_holds_is_lost_as_stopped(keep: Any) -> None:
    keeper = keep("sleep", heartbeat_s=1.0)
    while keeper.served.child.pid == keeper.guardian:
        time.sleep(0.01)
    os.kill(keeper.served.child.pid, signal.SIGSTOP)
    loss = keeper.wait_lost()
    assert loss.what.startswith("has not answered for ")
    assert loss.what.endswith(" s: it was stopped by a signal")


def test_a_process_that_says_nothing_may_hang(keep: Any) -> None:
    keeper = keep("word", heartbeat_s=0.5)
    keeper.wait_ready()
    assert keeper.wait_lost().what.endswith(" s: it may hang")


def test_a_process_that_is_still_made_may_be_silent_but_not_for_ever(keep: Any) -> None:
    loss = keep("sleep", heartbeat_s=0.1, start_s=3.0).wait_lost()
    assert loss.what == "was not ready within 3 s"


def test_a_loop_that_was_held_counts_no_silence(keep: Any) -> None:
    keeper = keep("word", heartbeat_s=10.0)
    keeper.wait_ready()

    async def hold() -> None:
        keeper.served.heard_s -= 1000.0
        time.sleep(3.5)  # longer than two looks and a second, in the loop itself

    keeper.run(hold())
    assert keeper.run(keeper.call("one")) == ["word", "one"]
    assert not keeper.losses


def test_an_owner_that_fails_loses_the_process_with_its_own_error(keep: Any) -> None:
    keeper = keep("word")
    keeper.wait_ready()
    keeper.fails = True

    async def provoke() -> None:
        keeper.served.post(CANCEL, 7, None)

    keeper.run(provoke())
    loss = keeper.wait_lost()
    assert repr(loss.error) == "RuntimeError('the owner broke')"
