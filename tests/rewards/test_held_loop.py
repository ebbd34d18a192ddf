"""Deadlines where the loop itself was held up: what lies in the pipe is read first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollpacker.environments.episode_pool import EpisodePool
from rollpacker.workers.kinds import ANSWER, CALL, CANCEL
from rollpacker.workers.pool import HELD_S, PoolCall, PoolWorker, WorkerPool

LIMIT_S = 5.0


class Silent:
    """A worker's process that says nothing by itself."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.child = self

    def is_stopped(self) -> bool:
        return False

    def send(self, kind: int, call: int, payload: bytes = b"") -> None:
        self.told.append(kind)


class Begun:
    """A call in such a process, in a loop whose clock stands still."""

    def __init__(self, kind: type[WorkerPool], monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now_s = 100.0
        monkeypatch.setattr(loop, "time", lambda: self.now_s)
        self.process = Silent()
        self.pool = kind("f", _nobody, said=_nobody, is_async=True, max_workers=1, workers=[])
        worker: Any = PoolWorker(self.process, True, 0.0)  # type: ignore[arg-type]
        self.call: PoolCall = self.pool._made(b"", LIMIT_S)
        self.pool._begin(self.call, worker)
        self.answer: Callable[[], None] = lambda: self.pool._message(
            worker, ANSWER, self.call.number, {"values": []}
        )

    async def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


def _nobody(*_: Any) -> Any:
    raise AssertionError("nobody asks for this")


@pytest.mark.parametrize("kind", [WorkerPool, EpisodePool])
def test_a_reply_that_lay_there_counts(
    kind: type[WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        begun = Begun(kind, monkeypatch)
        await begun.pass_s(LIMIT_S + 2.0)
        assert begun.process.told == [CALL] and not begun.call.future.done()
        begun.answer()
        assert await begun.call.future == {"values": []}

    asyncio.run(run())


@pytest.mark.parametrize("held_s", [0.0, HELD_S / 2, 2.0, 3 * LIMIT_S])
def test_it_gets_back_what_it_was_held_up_for_and_no_more(
    held_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        begun = Begun(EpisodePool, monkeypatch)
        await begun.pass_s(LIMIT_S + held_s)
        if held_s > HELD_S:
            assert begun.process.told == [CALL]
            await begun.pass_s(min(held_s, LIMIT_S))
        assert begun.process.told == [CALL, CANCEL]

    asyncio.run(run())


def test_a_worker_is_not_said_to_hang_that_nobody_has_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        begun = Begun(EpisodePool, monkeypatch)
        await begun.pass_s(LIMIT_S)
        assert begun.process.told == [CALL, CANCEL]
        await begun.pass_s(60.0)
        assert not begun.call.future.done()
        begun.answer()
        assert await begun.call.future == {"values": []}

    asyncio.run(run())
