"""What `docs/architecture.md` gives a newcomer to read is there, and is as short as it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
LIMITS = {"Tail batching": 2_500, "The trainer": 3_000, "Many jobs": 4_000, "A run": 3_000}
"""Lines that each mission may ask of a reader, by the beginning of its row."""


def reading_lists() -> dict[str, tuple[list[Path], int]]:
    """Each mission's files, and the limit that the page states for them, in lines."""
    text = PAGE.read_text()
    section = text[text.index("## What to read, mission by mission") :]
    found = {}
    for mission, files, limit in re.findall(
        r"^\| ([^|]+) \| (`[^|]+) \| ([\d,]+) lines \|$", section, re.MULTILINE
    ):
        paths = [ROOT / "rollpacker" / name for name in re.findall(r"`([\w/]+\.py)`", files)]
        found[mission] = (paths, int(limit.replace(",", "")))
    return found


def test_each_mission_can_be_read() -> None:
    lists = reading_lists()
    assert len(lists) == len(LIMITS)
    for (mission, (paths, limit)), (begin, allowed) in zip(
        lists.items(), LIMITS.items(), strict=True
    ):
        assert mission.startswith(begin)
        assert limit == allowed, mission
        assert [path for path in paths if not path.exists()] == [], mission
        lines = sum(len(path.read_text().splitlines()) for path in paths)
        assert lines <= limit, f"{mission}: {lines} lines to read, {limit} at most"


def test_no_file_is_read_for_two_missions() -> None:
    """A reader of one wing needs no other."""
    every = [path for paths, _ in reading_lists().values() for path in paths]
    assert len(every) == len(set(every))
