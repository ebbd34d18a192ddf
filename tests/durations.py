"""How long the tests take: recorded into `durations.json`, and read back from there.

    python -m pytest --tier=all -n auto --record-durations

on a machine that does nothing else. What ran replaces what stood there of its file; a file that no
longer exists is dropped. Durations of setup and teardown belong to the test that caused them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("durations.json")
LISTED_S = 1.0
"""A test that takes longer is listed by itself."""


def read() -> dict[str, dict[str, float]]:
    """File -> test (its id after the file, or `all` for the whole file) -> seconds."""
    files: dict[str, dict[str, float]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return files


def listed() -> dict[str, float]:
    """Id of each test over `LISTED_S` -> its seconds."""
    return {
        f"{file}::{test}": seconds
        for file, tests in read().items()
        for test, seconds in tests.items()
        if test != "all"
    }


def record(durations: dict[str, float]) -> None:
    """Writes the seconds of the tests that ran, by test id, over those that stood there."""
    ran: dict[str, dict[str, float]] = defaultdict(dict)
    for test, seconds in durations.items():
        file, _, name = test.partition("::")
        ran[file][name] = seconds
    kept = {file: tests for file, tests in read().items() if (ROOT / file).exists()}
    for file, tests in ran.items():
        slow = {test: round(s, 1) for test, s in sorted(tests.items()) if s > LISTED_S}
        kept[file] = {"all": round(sum(tests.values()), 1), **slow}
    text = json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False)
    RECORDED.write_text(text + "\n", encoding="utf-8")
