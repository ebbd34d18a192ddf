"""The tables of `docs/algorithms.md`, from the table of algorithms itself.

`python docs/make_algorithms.py` rewrites them in place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from rollpacker.algo.config import AlgorithmConfig, Name
from rollpacker.algo.row import Row
from rollpacker.algo.table import ALGORITHMS

PAGE = Path(__file__).resolve().parent / "algorithms.md"
_TABLE = re.compile(r"(<!-- table: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def switches_table() -> str:
    """Every algorithm's value of every switch."""
    switches = [switch.name for switch in fields(Row)]
    rows = [
        [f"`{switch}`", *(_value(getattr(row, switch)) for row in ALGORITHMS.values())]
        for switch in switches
    ]
    return _markdown(["", *(f"`{name}`" for name in ALGORITHMS)], rows)


def needs_table() -> str:
    """What each algorithm asks for beyond a policy and rewards."""
    rows = []
    for name in get_args(Name):
        config = AlgorithmConfig(name=name)
        models = "a critic" * config.needs_critic + "a teacher" * config.needs_teacher
        groups = "2 or more" if config.needs_groups else "1 or more"
        streams = "no" if config.needs_whole_batch else "yes"
        rows.append([f"`{name}`", groups, models or "none", streams])
    return _markdown(["", "`samples_per_prompt`", "further models", "can be streamed"], rows)


def trl_table() -> str:
    """Settings of TRL and ours that mean the same."""
    sys.path.insert(0, str(PAGE.parents[1]))
    from tests.algo.trl_settings import EQUAL_SETTINGS

    rows = [
        [equal.trainer, _settings(equal.trl) or "(defaults)", _settings(equal.ours)]
        for equal in EQUAL_SETTINGS
    ]
    return _markdown(["TRL's trainer", "its settings", "`algorithm.*`"], rows)


def with_tables(page: str) -> str:
    """The page with what stands between its markers written anew."""
    tables = {"switches": switches_table, "needs": needs_table, "trl": trl_table}
    return _TABLE.sub(lambda found: found[1] + tables[found[2]]() + found[3], page)


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}: {_value(value)}`" for key, value in settings.items())


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
