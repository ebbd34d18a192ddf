"""A whole run whose trainer is in pipeline stages."""

from __future__ import annotations

from pathlib import Path

from benchmarks import resume


def test_a_killed_run_in_stages_goes_on_bit_for_bit(tmp_path: Path) -> None:
    resume.write_model(tmp_path / "model")
    config, overrides = resume.write_config(tmp_path, 4), resume.ARMS["stages"]
    assert resume.run(config, "whole", overrides=overrides) == 0
    assert resume.run(config, "cut", overrides=overrides, kill=resume.committed(2)) != 0
    assert resume.run(config, "cut", overrides=overrides, resume=True) == 0
    whole, cut = (resume.fingerprints(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert whole == cut
