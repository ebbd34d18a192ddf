"""Functions of the user's whose files differ between runs, though the settings that name them may
be the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IDENTITY_FILE = "identity.json"
_SHOWN = 8
"""Of a SHA-256's digits."""


def code_that_differs(
    folders: Sequence[Path], runs: Sequence[Mapping[str, Any]]
) -> list[list[list[Any]]]:
    """Of each run the lines to add to its settings, as `RunBook.plain` tells those: whose code, the
    file and the beginning of its SHA-256. Only what at least two runs have, and not all alike."""
    digests = [_digests(folder) for folder in folders]
    names = dict.fromkeys(name for of_run in digests for name in of_run)
    differ = [
        name
        for name in names
        if len({of_run[name] for of_run in digests if of_run.get(name) is not None}) > 1
    ]
    return [
        [[f"the code of {name}", _told(name, of_run.get(name), run), None] for name in differ]
        for of_run, run in zip(digests, runs, strict=True)
    ]


def _digests(folder: Path) -> dict[str, str | None]:
    """By whose code it is. Empty: a run of before they were recorded, or a log alone."""
    try:
        found = json.loads((folder / IDENTITY_FILE).read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _told(name: str, digest: str | None, run: Mapping[str, Any]) -> str:
    if digest is None:
        return "not known"
    settings = {key: value for key, value, _ in run["settings"]}
    place = settings.get(name) or _of_reward(name.removeprefix("the reward "), settings)
    file = place.rpartition(":")[0] if place else ""
    return f"{file} ({digest[:_SHOWN]})".lstrip()


def _of_reward(name: str, settings: Mapping[str, str]) -> str | None:
    """Where a reward's function is, by the name that it goes by: its own, or the function's."""
    for key, place in settings.items():
        if key.startswith("rewards.") and key.endswith(".function"):
            given = settings.get(f"{key.removesuffix('function')}name")
            if name == (given or place.rpartition(":")[2]):
                return place
    return None
