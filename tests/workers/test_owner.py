"""An owner in an event loop, and one in a thread: hello, calls, and a child that is stopped, dead
or silent is found, ended and replaced. The child is a few lines, as an engine's would begin."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from rollpacker.codec import Codec
from rollpacker.workers.child import Child, state
from rollpacker.workers.line import Line, LineEnded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

HELLO, CALL, RESULT = range(3)
CODEC = Codec()
PROGRAM = """
import os, sys, time
from rollpacker.codec import Codec
from rollpacker.workers.line import Line, LineEnded
line, codec = Line.inherited(int(sys.argv[1])), Codec()
if "mute" in sys.argv:
    time.sleep(60)
line.send(0, payload=codec.encode(os.getpid()))
while True:
    try:
        call = line.receive()
    except LineEnded:
        sys.exit()
    line.send(2, call.number, codec.encode(sum(codec.decode(call.payload))))
"""


def started(name: str, *arguments: str) -> tuple[Child, Line]:
    line, theirs = Line.pair()
    with theirs:
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *arguments]
        child = Child.start(command, name, guarded=True, pass_fds=[theirs.fileno()])
    return child, line


def test_a_thread_owns_a_child() -> None:
    child, line = started("one")
    child.pid = CODEC.decode(line.receive(30).payload)
    for number in range(3):
        line.send(CALL, number, CODEC.encode(tuple(range(1000))))
        assert CODEC.decode(line.receive(10).payload) == 499500
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(LineEnded):
        line.receive(10)
    assert child.how_ended(5.0) == "signal 9, SIGKILL"
    child.close()
    line.close()


class Owner:
    """Keeps one child at work."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        self._start()

    def _start(self) -> None:
        self.child, self.line = started("one")
        self.hello = asyncio.get_running_loop().create_future()
        self.results: dict[int, asyncio.Future[int]] = {}
        self.line.attach(asyncio.get_running_loop(), self._heard, self._ended)

    def _heard(self, message: tuple[int, int, bytes]) -> None:
        kind, number, payload = message
        future = self.hello if kind == HELLO else self.results[number]
        future.set_result(CODEC.decode(payload))

    def _ended(self) -> None:
        for future in self.results.values():
            future.cancel()

    async def ready(self) -> None:
        self.child.pid = await asyncio.wait_for(self.hello, 30)

    async def call(self, values: list[int]) -> int:
        result = self.results[0] = asyncio.get_running_loop().create_future()
        self.line.post(CALL, 0, CODEC.encode(values))
        while not result.done() and not self.child.is_stopped():
            await asyncio.wait({result}, timeout=0.1)
        if not result.done() or result.cancelled():
            await self.replace()
            return await self.call(values)
        return result.result()

    async def replace(self) -> None:
        why = f"{self.child} was stopped" if self.child.is_stopped() else ""
        self.child.kill()
        how = await self.child.gone()
        self.replaced.append(why or f"{self.child}: {how}")
        self.close()
        self._start()
        await self.ready()

    def close(self) -> None:
        self.line.close()
        self.child.close()


def test_an_event_loop_owns_a_child_and_replaces_it() -> None:
    async def run() -> tuple[list[str], list[int]]:
        owner = Owner()
        await owner.ready()
        pids = []
        for sent in (signal.SIGSTOP, signal.SIGKILL, None):
            assert await owner.call([1, 2, 3]) == 6
            pids.append(owner.child.pid)
            if sent is not None:
                os.kill(owner.child.pid, sent)
        owner.close()
        return owner.replaced, pids

    replaced, pids = asyncio.run(run())
    assert replaced == [
        f"one (pid {pids[0]}) was stopped",
        f"one (pid {pids[1]}): signal 9, SIGKILL",
    ]
    assert all(state(pid) == "" for pid in pids)


def test_a_child_that_does_not_say_hello_is_ended(tmp_path: Path) -> None:
    child, line = started("mute", "mute")
    with pytest.raises(TimeoutError):
        line.receive(0.3)
    child.close()
    assert child.how_ended() is not None
    line.close()
