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
from rollpacker.sim.scenario import load_scenario

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


def test_tables_of_pipelines_are_up_to_date(making: ModuleType) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        page = importlib.import_module("make_pipeline")
    finally:
        sys.path.pop(0)
    text = page.PAGE.read_text()
    assert making.filled(text, page.TABLES) == text, "run: python docs/make_pipeline.py --tables"
    places = re.findall(r"<!-- table: (\w+) -->", text)
    assert sorted(places) == sorted(page.TABLES)


def test_what_the_page_says_of_published_pipelines_holds(making: ModuleType) -> None:
    found = making.result("pipeline_published")
    for row in found["model"]["delay_law"]:
        assert row["slope"] == pytest.approx(row["expected_slope"], rel=0.01)
        assert row["threshold_ms"] == pytest.approx(row["expected_threshold_ms"], rel=0.01)
    by_delay = {
        row["delay_ms"]: row["zero_bubble_ms"] for row in found["model"]["dependency_bubbles"]
    }
    assert [by_delay[delay] for delay in (0, 10, 20)] == [390, 400, 440]
    largest = found["compared"]["largest_error_of_sweep"]
    assert largest["zero-bubble"] < 0.05 and max(largest.values()) < 0.10
    missing = {
        (row["model"], *row["delays_ms"].items(), name)
        for row in found["compared"]["single"]
        for name, error in row["errors"].items()
        if abs(error) >= 0.10
    }
    assert missing == {
        ("7b", ("2", 30), "1f1b"),
        ("7b", ("2", 60), "1f1b"),
        ("7b", ("0", 60), "zero-bubble"),
        ("14b", ("0", 30), "adapted"),
        ("14b", ("6", 60), "adapted"),
    }


def test_the_scenario_has_the_fitted_costs(making: ModuleType) -> None:
    fitted = making.result("pipeline_published")["fixed_ms"]["14b"]
    scenario = load_scenario(ROOT / "configs/scenarios/pipeline-14b.yaml")
    assert scenario.train.pipeline is not None
    assert scenario.train.pipeline.direct_fixed_s == pytest.approx(
        fitted["direct"] / 1000, abs=1e-3
    )
    assert scenario.train.pipeline.host_fixed_s == pytest.approx(fitted["host"] / 1000, abs=1e-3)


def test_predictions_of_pipelines_are_those_that_were_committed(making: ModuleType) -> None:
    text = json.dumps(making.result("pipeline_published")["predicted"], sort_keys=True).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == "8c59f39d569120ac"


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
