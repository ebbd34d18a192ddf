"""The tiers of tests: each row is about tests that there are, long tests are nightly or say why
not, and the quick tier's guard refuses what it names."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable

import pytest

from tests import durations, guard, tiers

# -- rows --------------------------------------------------------------------------


def test_each_row_is_about_tests_that_there_are() -> None:
    rows = [*tiers.FOLDERS, *tiers.MOVED, *tiers.LONGER, *tiers.SLOW]
    assert [row for row in rows if not _names_something(row)] == []


def _names_something(row: str) -> bool:
    path, _, test = row.partition("::")
    place = durations.ROOT / path
    if not test:
        return place.exists() or any(place.parent.glob(f"{place.name}*"))
    name = test.partition("[")[0]
    return place.is_file() and bool(re.search(rf"def {name}", place.read_text(encoding="utf-8")))


def test_a_row_about_nothing_is_found() -> None:
    assert _names_something("tests/test_tiers.py::test_a_row[any case]")
    assert not _names_something("tests/test_tiers.py::test_of_nothing")
    assert not _names_something("tests/test_of_nothing.py")


def test_long_tests_are_nightly_or_say_why_not() -> None:
    recorded = durations.listed()
    assert len(recorded) > 20
    long = [
        test
        for test, seconds in recorded.items()
        if seconds > tiers.LONGEST_S
        and tiers.tier_of(test) != "nightly"
        and not test.startswith(tuple(tiers.SLOW))
    ]
    assert long == [], "nightly by a row of tests/tiers.py, faster, or a reason in its SLOW"


def test_only_tests_that_there_are_have_recorded_durations() -> None:
    assert [file for file in durations.read() if not (durations.ROOT / file).exists()] == []


# -- which tier --------------------------------------------------------------------


def test_the_longest_row_decides() -> None:
    assert tiers.tier_of("tests/core/test_any.py::test_any") == "quick"
    assert tiers.tier_of("tests/new_folder/test_any.py::test_any") == "full"
    assert tiers.tier_of("tests/run/test_any.py::test_any") == "quick"
    assert tiers.tier_of("tests/run/test_resume.py::test_any") == "nightly"


def test_a_fixture_moves_a_test_later_and_never_earlier() -> None:
    assert tiers.tier_of("tests/core/test_any.py::test_any", ["built"]) == "nightly"
    assert tiers.tier_of("tests/run/test_resume.py::test_any", ["tmp_path"]) == "nightly"


def test_what_runs_when() -> None:
    def asked(test: str, own: tiers.Tier) -> list[str]:
        return [a for a in ("quick", "full", "nightly", "all") if tiers.runs(test, own, a)]

    assert asked("tests/any.py::test_any", "quick") == ["quick", "full", "all"]
    assert asked("tests/any.py::test_any", "full") == ["full", "all"]
    assert asked("tests/any.py::test_any", "nightly") == ["nightly", "all"]
    assert asked(f"{tiers.LONGER[0]}::test_any", "full") == ["full", "nightly", "all"]


# -- the guard ---------------------------------------------------------------------


def _socket(use: Callable[[socket.socket], object]) -> None:
    with socket.socket() as one:
        use(one)


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "a program": ("starts a process", lambda: subprocess.Popen(["true"])),
    "a spawned one": ("starts a process", lambda: os.posix_spawn("/bin/true", ["true"], {})),
    "a fork": ("starts a process", lambda: os.fork() or os._exit(0)),
    "a Process": (
        "starts a process",
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    ),
    "listening": ("binds a socket", lambda: _socket(lambda one: one.bind(("127.0.0.1", 0)))),
    "connecting": ("connects a socket", lambda: _socket(lambda one: one.connect(("::", 1)))),
    "a connection that may fail": (
        "connects a socket",
        lambda: _socket(lambda one: one.connect_ex(("::", 1))),
    ),
    "sleep": (r"sleeps for 0\.03 s", lambda: time.sleep(0.03)),
    "a sleep in a loop": (r"sleeps for 0\.03 s", lambda: asyncio.run(asyncio.sleep(0.03))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(case: str) -> None:
    what, act = REFUSED[case]
    guard.watch("tests/any.py::test_any")
    try:
        with pytest.raises(
            pytest.fail.Exception, match=f"::test_any is in the tier quick and {what}"
        ):
            act()
    finally:
        refused = guard.watch(None)
    assert len(refused) == 1
    assert guard.watch(None) == []


def test_it_lets_pass_what_takes_no_time() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(asyncio.sleep(1000))
        await asyncio.sleep(0)
        task.cancel()

    guard.watch("tests/any.py::test_any")
    try:
        time.sleep(0.001)
        asyncio.run(cancelled())
    finally:
        assert guard.watch(None) == []


def test_a_refusal_that_somebody_caught_is_told_at_the_end() -> None:
    guard.watch("tests/any.py::test_any")
    try:
        time.sleep(0.03)
    except BaseException as error:
        assert isinstance(error, pytest.fail.Exception)
    assert len(guard.watch(None)) == 1
