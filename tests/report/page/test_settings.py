"""What differs from the defaults: a named algorithm's switches are its defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.report.page.settings import read_settings


def told(folder: Path, text: str) -> list[tuple[str, str, str | None]]:
    (folder / "config.yaml").write_text(text)
    return [(one.key, one.value, one.default) for one in read_settings(folder)[0]]


def test_a_named_algorithms_switches_are_its_defaults(tmp_path: Path) -> None:
    text = "algorithm: {name: dapo, clip_low: 0.2, clip_high: 0.28, objective: clipped}\n"
    assert told(tmp_path, text) == [("algorithm.name", "dapo", "grpo")]
    text = "algorithm: {name: dapo, clip_high: 0.3}\n"
    assert told(tmp_path, text)[1:] == [("algorithm.clip_high", "0.3", "0.28")]
    assert told(tmp_path, "algorithm: {clip_low: 0.2, kl_in: loss}\n") == []


@pytest.mark.parametrize("other", ["name: of_another_version", "function: 'no/such.py:algorithm'"])
def test_without_a_row_null_is_the_default(tmp_path: Path, other: str) -> None:
    found = told(tmp_path, f"algorithm: {{{other}, clip_high: 0.3}}\n")
    assert found[1:] == [("algorithm.clip_high", "0.3", "null")]
