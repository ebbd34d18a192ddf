"""A real run of a tiny model with all four libraries, killed and resumed; what each of them holds
in the end stands in `metrics.jsonl`, value by value, and nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollpacker.trackers.by_name import TRACKERS

from . import stores
from .test_trackers import ROOT, assert_held, has_texts, in_process, values

NAMES = sorted(TRACKERS)
STEPS = 6

_RUN = """
import sys
sys.path.insert(0, {benchmarks!r})
import resume
from pathlib import Path
from rollpacker.cli.main import main
folder = Path({folder!r})
if not (folder / "model").exists():
    resume.write_model(folder / "model")
resume.write_config(folder, {steps})
overrides = ["data.eval_fraction=0.1", "eval.every_steps=2", "checkpoint.every_steps=2"]
overrides += ["name=all", {trackers!r}]
"""
_KILLED = """
import os
from rollpacker.callbacks import Callback
class Killing(Callback):
    def on_step(self, run, step, metrics):
        if step == 5:
            os.kill(os.getpid(), 9)
import rollpacker
rollpacker.train(folder / "run.yaml", overrides, callbacks=[Killing()])
"""
_RESUMED = """
sys.exit(main(["train", str(folder / "run.yaml"), *overrides, "--resume"]))
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run's folder and the home of its user."""
    folder = tmp_path_factory.mktemp("tracked")
    home = folder / "home"
    listed = ", ".join(f"{{name: {name}, samples_every_steps: 2}}" for name in NAMES)
    settings = {
        "benchmarks": str(ROOT / "benchmarks"),
        "folder": str(folder),
        "steps": STEPS,
        "trackers": f"trackers=[{listed}]",
    }
    killed = in_process(_RUN.format(**settings) + _KILLED, home)
    assert killed.returncode == -9, killed.stderr
    done = in_process(_RUN.format(**settings) + _RESUMED, home)
    assert done.returncode == 0, done.stderr
    assert "goes on without it" not in done.stderr, killed.stderr + done.stderr
    return folder / "runs" / "all", home


@pytest.mark.parametrize("name", NAMES)
def test_a_library_holds_what_metrics_jsonl_says(name: str, tracked: tuple[Path, Path]) -> None:
    run, home = tracked
    told = stores.expected(run / "metrics.jsonl", texts=has_texts(name))
    assert len(told["critic/rewards/mean"]) >= STEPS and len(told["eval/pass@1"]) >= 3
    held = values(name, run, home)
    # Killed in step 5: of the steps before, a library has what it had written by then.
    assert_held(without_repeated_clocks(held), without_repeated_clocks(told), surely_from=6)
    assert held["critic/rewards/mean"]


def without_repeated_clocks(values: stores.Values) -> stores.Values:
    """Steps 4 and 5 were committed by both sessions: a library has the seconds of the first, the
    run's folder those of the second, which begins with the checkpoint of step 4."""
    return {
        name: {
            step: value[:1] if name == "timing_s/callbacks" else value  # SwanLab keeps one a step
            for step, value in steps.items()
            if not (name.startswith(("timing_s/", "perf/")) and step in (4, 5))
        }
        for name, steps in values.items()
    }


def test_nothing_else_is_left_behind(tracked: tuple[Path, Path]) -> None:
    run, home = tracked
    assert {path.name for path in home.iterdir()} <= {"t", ".cache", ".config", ".local"}
    written = {path.name for path in (run / "trackers").iterdir()}
    assert written == {"wandb", "mlflow", "swanlab", *(f"{name}.json" for name in NAMES)}


def test_pictures_samples_and_summary_are_there(tracked: tuple[Path, Path]) -> None:
    run, home = tracked
    folder = run / "trackers"
    artifacts = stores.mlflow_run(folder) / "artifacts"
    assert (artifacts / "timeline.png").read_bytes() == (run / "timeline.png").read_bytes()
    summary = json.loads((artifacts / "summary.json").read_text())
    assert summary["ended"] == "every step is done" and "steps/total" in summary
    table = json.loads((artifacts / "samples" / "step_000006.json").read_text())
    assert {"prompt", "completion"} <= set(table["columns"]) and table["data"]
    assert list(folder.glob("wandb/off*/files/media/images/timeline*"))
    assert list(folder.glob("swanlab/run-*/media/image/*.png"))
    rows = [row for _, _, row in stores.trackio_rows(home / "t", "rollpacker")]
    assert any("timeline" in row for row in rows)


def test_overwrite_begins_a_new_run(tracked: tuple[Path, Path], tmp_path: Path) -> None:
    """Of the trackers too: what they kept in the folder goes."""
    from rollpacker.run.folder.run_folder import RunFolder

    run, _ = tracked
    folder = RunFolder(run, resume=False, overwrite=True)
    folder.clear()
    folder.close()
    assert not (run / "trackers").exists()
