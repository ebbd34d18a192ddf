"""Every config that the repository ships loads, and the reference page is up to date."""

from pathlib import Path

import pytest
import yaml

from rollpacker.config.describe import reference_page
from rollpacker.config.load import load_config, save_config
from rollpacker.config.schema import RunConfig, WarmupConfig

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))


def test_there_are_configs() -> None:
    assert len(FILES) >= 2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_loads_and_survives_saving(path: Path, tmp_path: Path) -> None:
    schema = WarmupConfig if "stages" in yaml.safe_load(path.read_text()) else RunConfig
    config = load_config(path, [], schema)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml", [], schema) == config


def test_reference_page_is_up_to_date() -> None:
    command = "python -m rollpacker.config.describe > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text() == reference_page(), f"run: {command}"
