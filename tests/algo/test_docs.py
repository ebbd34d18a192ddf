"""The tables of the page are those of the code."""

from pathlib import Path

from rollpacker.algo.base import AlgorithmConfig
from rollpacker.algo.describe import trl_table, with_tables
from rollpacker.algo.trl import EQUAL_SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_page_is_up_to_date():
    page = PAGE.read_text()
    command = "python -m rollpacker.algo.describe docs/algorithms.md"
    assert page == with_tables(page), f"run: {command}"
    assert trl_table() in page


def test_every_switch_is_explained():
    page = PAGE.read_text()
    missing = {name for name in AlgorithmConfig.__dataclass_fields__ if f"`{name}" not in page}
    assert missing <= {"name", "value_clip"}, missing


def test_every_line_of_the_trl_table_is_a_config():
    for equal in EQUAL_SETTINGS:
        AlgorithmConfig(**equal.ours)
