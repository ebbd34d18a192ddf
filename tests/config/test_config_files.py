"""Every config that the repository ships loads, and the reference page is up to date."""

import runpy
from pathlib import Path

import pytest
import yaml

from rollpacker.cluster.sim.spec import ClusterSpec, load_cluster
from rollpacker.config.load import load_config, save_config
from rollpacker.config.schema import RunConfig
from rollpacker.config.warmup import WarmupConfig
from rollpacker.sim.scenario import Scenario, load_scenario

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "configs" / "scenarios").rglob("*.yaml"))
CLUSTERS = sorted((ROOT / "configs" / "clusters").rglob("*.yaml"))
FILES = sorted({*(ROOT / "configs").rglob("*.yaml")} - {*SCENARIOS} - {*CLUSTERS})


def test_there_are_configs() -> None:
    assert len(FILES) >= 2
    assert len(SCENARIOS) >= 4
    assert len(CLUSTERS) >= 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_loads_and_survives_saving(path: Path, tmp_path: Path) -> None:
    schema = WarmupConfig if "stages" in yaml.safe_load(path.read_text()) else RunConfig
    config = load_config(path, [], schema)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml", [], schema) == config


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)
def test_scenario_loads_and_survives_saving(path: Path, tmp_path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    save_config(scenario, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml", [], Scenario) == scenario
    assert load_scenario(tmp_path / "resolved.yaml") == scenario


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_cluster_loads_and_survives_saving(path: Path, tmp_path: Path) -> None:
    cluster = load_cluster(path)
    assert cluster.name == path.stem
    save_config(cluster, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml", [], ClusterSpec) == cluster


@pytest.mark.parametrize("name", ["configuration.md", "scenarios.md"])
def test_reference_pages_are_up_to_date(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["PAGES"][name]()
    command = "python docs/make_configuration.py"
    assert (ROOT / "docs" / name).read_text() == made, f"run: {command}"


def test_every_key_of_a_scenario_has_a_meaning() -> None:
    describe = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["describe"]
    silent = [row.path for row in describe(Scenario) if not row.text]
    assert not silent
