"""docs/simulation.md tells what the code and the committed results say."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rollpacker.sim.latency import Calibration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def making() -> ModuleType:
    """docs/make_simulation.py."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("make_simulation")
    finally:
        sys.path[:] = before


def test_tables_are_up_to_date(making: ModuleType) -> None:
    text = making.PAGE.read_text()
    assert making.filled(text) == text, "run: python docs/make_simulation.py --tables"


def test_every_table_has_a_place(making: ModuleType) -> None:
    places = re.findall(r"<!-- table: (\w+) -->", making.PAGE.read_text())
    assert sorted(places) == sorted(making.TABLES)


def test_every_constant_is_told(making: ModuleType) -> None:
    text = making.PAGE.read_text()
    for name in {*Calibration().constants(), *making.sim_calibration.SOURCES}:
        assert f"| `{name}` |" in text, name


def test_at_most_a_dozen_constants_are_fitted(making: ModuleType) -> None:
    rows = making.fitted_table().splitlines()[2:]
    assert len(rows) <= 12


def test_results_were_made_with_the_constants_that_are_shipped(making: ModuleType) -> None:
    assert making.result("sim_calibration")["constants"] == making.sim_calibration.shipped()


def test_pictures_are_there_and_small(making: ModuleType) -> None:
    names = re.findall(r"\]\((simulation-\w+\.png)\)", making.PAGE.read_text())
    assert len(names) == 4
    for name in names:
        assert (making.DOCS / name).stat().st_size < 150_000, name
