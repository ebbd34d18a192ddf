"""The tables of `docs/migration.md`, from the tables of synonyms that unknown keys and metrics get
their hints from.

`python docs/make_migration.py` rewrites them in place.
"""

from __future__ import annotations

import re
from pathlib import Path

from rollpacker.config.synonyms import Synonym, synonyms
from rollpacker.report.metrics import OTHER_NAMES

PAGE = Path(__file__).resolve().parent / "migration.md"
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(framework: str) -> str:
    """Their keys and ours, a line each; metrics for `FRAMEWORK-metrics`."""
    if framework.endswith("-metrics"):
        framework = framework.removesuffix("-metrics")
        named = [f"| `{theirs}` | `{ours}` |" for theirs, ours in OTHER_NAMES[framework].items()]
        return "\n".join([f"| {framework} | here |", "| --- | --- |", *named]) + "\n"
    rows = [_row(one) for one in synonyms() if one.framework == framework]
    assert rows, f"there are no synonyms of {framework}"
    head = [f"| {framework} | here | |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


def _row(one: Synonym) -> str:
    ours = ", ".join(f"`{key}`" for key in one.ours) or "none"
    note = one.note.replace("|", "\\|")
    return f"| `{one.theirs}` | {ours} | {note} |"


def with_tables(page: str) -> str:
    """The page with what stands between its markers written anew."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
