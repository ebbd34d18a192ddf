"""What the generators of tasks share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line. Folders are made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
