"""Two engines in processes, one killed and one stopped while a tiny model is trained, for real."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine_faults import is_good, result_of, sabotage
from rollpacker.report.summary import summarize


def test_a_run_survives_a_killed_engine_and_a_stopped_one(tmp_path: Path) -> None:
    saboteur = sabotage(tmp_path, [("kill", "generating"), ("stop", "updating")])
    result = result_of(tmp_path, saboteur.faults)
    assert is_good(result), result
    engines = summarize(tmp_path / "runs" / "faults")["engines"]
    assert [one["engine"] for one in engines] == [0, 1]
    assert sum(one["losses"] for one in engines) == 2
    assert all(one["samples"] > 0 and 0 < one["busy_share"] < 1 + 1e-9 for one in engines)
