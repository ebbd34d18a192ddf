"""What the tests cost: processor seconds, recorded into `durations.json` and read back from there.

    python -m pytest --tier=all -n auto --record-durations

Processor seconds, of the test's process and of those that it started and waited for, say the same
on a busy machine as on a quiet one, within a factor of two. What ran replaces what stood there of
it; a file that no longer exists is dropped. Setup and teardown count for the test that caused
them, and a process counts for the test in which it ended.
"""

from __future__ import annotations

import functools
import json
import os
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("durations.json")
LISTED_S = 1.0
"""A test that takes more processor seconds is listed by itself."""


@functools.cache
def read() -> dict[str, dict[str, float]]:
    """File -> test (its id after the file, or `all` for the whole file) -> seconds."""
    files: dict[str, dict[str, float]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return files


@functools.cache
def listed() -> dict[str, float]:
    """Id of each test over `LISTED_S` -> its seconds."""
    return {
        f"{file}::{test}": seconds
        for file, tests in read().items()
        for test, seconds in tests.items()
        if test != "all"
    }


def processor_seconds() -> float:
    """Processor seconds so far of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def record(durations: dict[str, float]) -> None:
    """Writes the seconds of the tests that ran, by test id, over those that stood there."""
    ran: dict[str, dict[str, float]] = defaultdict(dict)
    for test, seconds in durations.items():
        file, _, name = test.partition("::")
        ran[file][name] = seconds
    kept = {file: tests for file, tests in read().items() if (ROOT / file).exists()}
    for file, tests in ran.items():
        others = {test: s for test, s in kept.get(file, {}).items() if test not in ("all", *tests)}
        slow = {test: round(s, 1) for test, s in tests.items() if s > LISTED_S}
        total = round(sum(tests.values()) + sum(others.values()), 1)
        kept[file] = {"all": total, **dict(sorted({**others, **slow}.items()))}
    text = json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False)
    RECORDED.write_text(text + "\n", encoding="utf-8")
