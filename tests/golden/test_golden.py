"""What the package makes of fixed inputs is what it was; see `outputs.py`, also for where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.comparing import differences
from tests.golden.outputs import (
    CURVES,
    LOGS,
    SIMULATIONS,
    WORLD_LOGS,
    curve,
    curve_differences,
    expected,
    reports,
    simulation,
    workplace,
    world,
)
from tests.golden.worlds import WORLDS

EXPECTED = expected()
REWRITE = "to rewrite it: python -m tests.golden.outputs --write"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace() as folder:
        yield folder


@pytest.mark.parametrize("name", SIMULATIONS)
def test_simulated_logs_and_results(name: str, tmp_path: Path) -> None:
    found = simulation(name, tmp_path)
    assert not list(differences(EXPECTED["simulations"][name], found)), REWRITE


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.name.split(".")[0])
def test_recorded_runs_replay_and_are_told_the_same(log: Path, tmp_path: Path) -> None:
    kept = EXPECTED["logs"][log.name.split(".")[0]]
    assert not list(differences(kept, reports(log, tmp_path))), REWRITE


@pytest.mark.parametrize("log", WORLD_LOGS, ids=lambda path: path.name.split(".")[0])
def test_runs_in_virtual_time_replay_and_happen_again(log: Path, tmp_path: Path) -> None:
    kept = EXPECTED["worlds"][log.name.split(".")[0]]
    assert world(log, tmp_path) == kept, REWRITE


@pytest.mark.parametrize("name", CURVES)
def test_seeded_loss_curves(name: str, place: Path) -> None:
    assert not list(curve_differences(EXPECTED["curves"][name], curve(place, name))), REWRITE


def test_all_kinds_of_runs_are_there() -> None:
    assert {path.name.split(".")[0] for path in LOGS} == EXPECTED["logs"].keys()
    assert len(LOGS) == 7
    assert {path.name.split(".")[0] for path in WORLD_LOGS} == WORLDS.keys()


def test_the_comparison_sees_the_12th_digit_and_not_the_last() -> None:
    told = {"a": [1.0, "text"], "shift": 1e-3}
    assert not list(differences(told, {"a": [1.0 + 1e-15, "text"], "shift": 1e-3 + 1e-14}))
    wrong: list[object] = [{"a": [1.0 + 1e-11, "text"], "shift": 1e-3}]
    wrong += [{"a": [1, "text"], "shift": 1e-3}, {"a": [1.0, "other"], "shift": 1e-3}]
    wrong += [{"a": [1.0], "shift": 1e-3}, {"a": [1.0, "text"]}, told | {"shift": 1e-3 + 1e-11}]
    for other in wrong:
        assert len(list(differences(told, other))) == 1
