"""A whole run whose trainer is in pipeline stages."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks import resume
from benchmarks.trainer_resume import weight_difference

OVERRIDES = (
    *resume.ARMS["stages"],
    *("checkpoint={every_steps: 1, keep_last: 100}", "train.eps=1e-4"),
    "train.micro_batch_tokens=96",
)


def test_a_killed_run_in_stages_goes_on_bit_for_bit_and_in_one_process_up_to_rounding(
    tmp_path: Path,
) -> None:
    resume.write_model(tmp_path / "model")
    config, runs = resume.write_config(tmp_path, 4), tmp_path / "runs"
    assert resume.run(config, "whole", overrides=OVERRIDES) == 0
    assert resume.run(config, "cut", overrides=OVERRIDES, kill=resume.committed(2)) != 0
    shutil.copytree(runs / "cut", runs / "other", symlinks=True)
    assert resume.run(config, "cut", overrides=OVERRIDES, resume=True) == 0
    whole, cut = (resume.fingerprints(runs / name) for name in ("whole", "cut"))
    assert whole == cut
    one = (*OVERRIDES, "train.processes=1", "train.pipeline.stages=1")
    assert resume.run(config, "other", overrides=one, resume=True) == 0
    first, second = (runs / name / "checkpoints" / "step_000003" for name in ("whole", "other"))
    assert weight_difference(first, second) < 1e-6
