"""Help, dry runs, configuration keys and public names are what they were; see `texts.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.cli.verbs import VERBS
from tests.golden.texts import (
    CONFIGS,
    FOLDER,
    config_keys,
    dry_run,
    file_of,
    help_texts,
    public_names,
)

REWRITE = "to rewrite it: python -m tests.golden.texts --write"


def kept(name: str) -> str:
    return file_of(name).read_text()


def test_help() -> None:
    for name, text in help_texts().items():
        assert text == kept(name), f"{name} is another text; {REWRITE}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_dry_runs(config: Path) -> None:
    assert dry_run(config) == kept(f"dry-run {config.stem}"), REWRITE


def test_configuration_keys() -> None:
    assert config_keys() == kept("configuration keys"), REWRITE


def test_public_names() -> None:
    assert public_names() == kept("public names"), REWRITE


def test_no_text_is_kept_that_is_compared_by_none() -> None:
    names = ["help", *(f"help {verb}" for verb in VERBS), "configuration keys", "public names"]
    names += [f"dry-run {config.stem}" for config in CONFIGS]
    assert {path.name for path in FOLDER.glob("*.txt")} == {file_of(name).name for name in names}
