"""The quickstart as a notebook: a kernel runs every cell, with fewer steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollpacker.cli.main import main

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def text_of(output: dict) -> str:
    data = output.get("data", {})
    return output.get("text", "") + "".join(data.get("text/plain", "")) + "".join(data)


def test_it_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    assert [cell.metadata.get("tags") for cell in notebook.cells].count(["parameters"]) == 1


def test_a_kernel_runs_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that it lies in, whose other folders are named like modules."""
    here, tmp_path = tmp_path, tmp_path / "first-run"
    (here / "math").mkdir()
    (here / "math" / "__init__.py").touch()
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["init", "quickstart", "--files-only"]) == 0
    rows = [
        {"prompt": f"{a}+{b}=", "completion": f"{a}+{b}={a + b}"} for a in (1, 2) for b in (3, 4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = "stages=[{path: rows.jsonl, steps: 3, batch_size: 4}]"
    assert main(["warmup", "quickstart-warmup.yaml", stage]) == 0
    # An empty entry would be the folder of the kernel, with its `math`.
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = (c for c in notebook.cells if c.metadata.get("tags") == ["parameters"])
    parameters.source = "steps = 2"
    for cell in notebook.cells:
        # An untrained model never ends a response: 8 prompts of 24 tokens are enough here.
        cell.source = cell.source.replace(
            "overrides=[",
            'overrides=["data.eval.size=8", "rollout.prompts_per_step=4",'
            ' "rollout.max_response_tokens=24", ',
        )
    nbclient.NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(here)}}
    ).execute()
    said = [
        "".join(text_of(output) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert "its model is there already" in said[1] and "Error" not in said[1]
    assert "def correct(" in said[2]
    assert "image/png" in said[4]
    assert "decode" in said[6] and "image/png" in said[7]
    assert "4-1+7+2=" in said[8]
    assert (tmp_path / "runs/quickstart/summary.json").exists()
