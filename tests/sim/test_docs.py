"""docs/simulation.md tells what the code and the committed results say."""

import hashlib
import importlib
import json
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


def test_tables_of_tail_batching_are_up_to_date(making: ModuleType) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        page = importlib.import_module("make_tail_batching")
    finally:
        sys.path.pop(0)
    text = page.PAGE.read_text()
    filled = making.filled(text, page.TABLES)
    assert filled == text, "run: python docs/make_tail_batching.py --tables"
    places = re.findall(r"<!-- table: (\w+) -->", text)
    assert sorted(places) == sorted(page.TABLES)


def test_every_table_has_a_place(making: ModuleType) -> None:
    places = re.findall(r"<!-- table: (\w+) -->", making.PAGE.read_text())
    assert sorted(places) == sorted(making.TABLES)


def test_every_constant_is_told(making: ModuleType) -> None:
    text = making.PAGE.read_text()
    for name in {*Calibration().constants(), *making.sim_calibration.SOURCES}:
        assert f"| `{name}` |" in text, name


def test_what_is_fitted_is_told_and_is_little(making: ModuleType) -> None:
    constants = making.sim_published.shipped()
    assert set(making.sim_calibration.SOURCES) == constants.keys()
    assert set(making.sim_calibration.BEFORE) == constants.keys()
    assert 6 * len(constants) < len(making.sim_published.facts())


def test_results_were_made_with_the_constants_that_are_shipped(making: ModuleType) -> None:
    for name in ("sim_calibration", "sim_published"):
        assert making.result(name)["constants"] == making.sim_published.shipped(), name


def test_every_fact_has_a_weight_and_a_result(making: ModuleType) -> None:
    facts = making.sim_published.facts()
    assert {fact.group for fact in facts} == set(making.sim_calibration.WEIGHTS)
    published = {row["fact"]: row["published"] for row in making.result("sim_published")["facts"]}
    assert published == {fact.name: fact.published for fact in facts}


def test_blind_predictions_are_those_that_were_committed(making: ModuleType) -> None:
    """What was predicted before anybody compared is not made better by a later run."""
    predicted = making.result("sim_predictions")
    assert predicted["commit"].startswith("5813de274a41")
    kept = {name: predicted[name] for name in ("ablation", "sensitivity", "scaling")}
    text = json.dumps(kept, sort_keys=True).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == "b850ad693542e064"


def test_pictures_are_there_and_small(making: ModuleType) -> None:
    names = re.findall(r"\]\((simulation-\w+\.png)\)", making.PAGE.read_text())
    assert len(names) == 4
    for name in names:
        assert (making.DOCS / name).stat().st_size < 150_000, name
