"""Every block of docs/python.md runs, one after the other, with a tiny model in the model's
place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.resume import write_model

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_its_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        code = block.replace("path/to/model", str(tmp_path / "model"))
        exec(compile(code, "docs/python.md", "exec"), names)
    torch.set_num_threads(threads)
    assert len(BLOCKS) == 6
    reasons = [line["finished"] for line in map(_summary, (tmp_path / "runs").iterdir())]
    assert sorted(reasons) == ["a callback asked for it", *["every step is done"] * 4]


def _summary(folder: Path) -> dict[str, Any]:
    import rollpacker

    return rollpacker.Run(folder).summary
