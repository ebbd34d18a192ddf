"""What a test of the quick tier may not do: start a process, open a socket, sleep for long.

`install` wraps the few functions through which all of these go, once per test process. They refuse
only while `watch` has named a test, so tests of the other tiers run as if nothing was wrapped.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing.process
import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

LONGEST_SLEEP_S = 0.02
ADVICE = (
    "Use a fake in its place, or move the test to the tier full: a row in tests/tiers.py says why."
)

_watched: list[str] = []
_refused: list[str] = []


def watch(test: str | None) -> list[str]:
    """Refuses from now on what the test named does, or nothing if None.

    Returns what was refused since the last call. A refusal is also raised where it happens, but
    the thread or the `except` in which it was raised may have kept it from the test.
    """
    found = [*_refused]
    _refused.clear()
    _watched[:] = [] if test is None else [test]
    return found


def _refuse(what: str) -> None:
    message = f"{_watched[0]} is in the tier quick and {what}. {ADVICE}"
    _refused.append(message)
    pytest.fail(message, pytrace=True)


def _refusing(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if _watched:
            _refuse(what)
        return function(*arguments, **options)

    return wrapped


def _connecting(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: socket.socket, address: Any) -> Any:
        if _watched:
            _refuse(f"{what} ({address!r})")
        return method(self, address)

    return wrapped


def _install_sleeps() -> None:
    plain, awaited = time.sleep, asyncio.sleep

    @functools.wraps(plain)
    def sleep(seconds: float) -> None:
        if _watched and seconds > LONGEST_SLEEP_S:
            _refuse(f"sleeps for {seconds} s")
        plain(seconds)

    @functools.wraps(awaited)
    async def sleep_awaited(seconds: float, result: Any = None) -> Any:
        # A fake that hangs until it is cancelled sleeps for nobody: only a sleep that was
        # really slept is refused, and a loop that runs on a clock of its own sleeps no time.
        before = time.monotonic()
        result = await awaited(seconds, result)
        slept_s = time.monotonic() - before
        if _watched and seconds > LONGEST_SLEEP_S and slept_s > LONGEST_SLEEP_S:
            _refuse(f"sleeps for {seconds} s")
        return result

    time.sleep = sleep
    asyncio.sleep = sleep_awaited  # type: ignore[assignment]  # its overloads, for results of type T
    asyncio.tasks.sleep = sleep_awaited  # type: ignore[assignment]  # the same


def install() -> None:
    """Wraps the functions. Modules imported afterwards with `from time import sleep` have these."""
    process = "starts a process"
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
        setattr(os, name, _refusing(getattr(os, name), process))
    for owner in (subprocess.Popen, multiprocessing.process.BaseProcess):
        name = "__init__" if owner is subprocess.Popen else "start"
        setattr(owner, name, _refusing(getattr(owner, name), process))
    for name, what in (("connect", "connects a socket"), ("bind", "binds a socket")):
        setattr(socket.socket, name, _connecting(getattr(socket.socket, name), what))
    socket.socket.connect_ex = _connecting(  # type: ignore[method-assign]  # wrapped on purpose
        socket.socket.connect_ex, "connects a socket"
    )
    _install_sleeps()
