"""The loop of all lines runs while somebody uses it, in one thread for all users."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollpacker.workers import loop as module
from rollpacker.workers.loop import LoopUse


@pytest.fixture(autouse=True)
def _nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_running", None)  # another test may have left somebody
    OTHERS.update(threads())


OTHERS: set[threading.Thread] = set()
"""Threads that were there before a test."""


def threads() -> list[threading.Thread]:
    """The threads of this test's loops."""
    named = [thread for thread in threading.enumerate() if thread.name == "rollpacker-lines"]
    return [thread for thread in named if thread not in OTHERS]


def test_users_share_one_thread_which_ends_with_the_last() -> None:
    assert threads() == []
    first, second = LoopUse(), LoopUse()
    assert first.loop is second.loop and len(threads()) == 1
    first.end()
    first.end()
    assert len(threads()) == 1
    done = threading.Event()
    second.soon(done.set)
    assert done.wait(60)
    second.end()
    assert threads() == [] and second.loop.is_closed()
    second.soon(done.clear)  # nobody is there who could
    second.end()
    assert done.is_set()


def test_a_user_that_comes_after_the_last_has_a_new_thread() -> None:
    first = LoopUse()
    first.end()
    second = LoopUse()
    assert second.loop is not first.loop and len(threads()) == 1
    first.end()  # again: the new one is not its
    assert len(threads()) == 1
    second.end()
    assert threads() == []


def test_the_last_user_may_end_inside_the_loop_with_threads_of_its_own() -> None:
    use = LoopUse()

    async def leave() -> None:
        await asyncio.to_thread(lambda: None)
        use.end()

    asyncio.run_coroutine_threadsafe(leave(), use.loop).result(60)
    use.end()  # waits for it
    assert threads() == [] and use.loop.is_closed()


def test_a_thread_that_cannot_be_started_is_tried_again_by_the_next_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="new thread"):
            LoopUse()
    use, done = LoopUse(), threading.Event()
    use.soon(done.set)
    assert threads() and done.wait(60)
    use.end()
    assert threads() == []
