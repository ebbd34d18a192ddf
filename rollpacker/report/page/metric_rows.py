"""Reads `metrics.jsonl` while it grows: values that callbacks logged are in no other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricRows:
    """Each `read` gives the rows of steps that were written since the last one. A file that became
    shorter (a resume) is read anew; a line that is no row is left out, for a page has nobody to
    tell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                if self.path.stat().st_size < self._read:
                    self._read = 0
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        whole = text.rfind(b"\n") + 1
        self._read += whole
        rows = []
        for line in text[:whole].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return [row for row in rows if not any(name.startswith("eval/") for name in row)]
