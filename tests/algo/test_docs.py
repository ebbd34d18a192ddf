"""The tables of the page are those of the code."""

import runpy
from pathlib import Path

from rollpacker.algo.config import AlgorithmConfig
from tests.algo.trl_settings import EQUAL_SETTINGS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "algorithms.md"
MAKING = runpy.run_path(str(DOCS / "make_algorithms.py"))


def test_the_page_is_up_to_date():
    page = PAGE.read_text()
    assert page == MAKING["with_tables"](page), "run: python docs/make_algorithms.py"
    assert MAKING["trl_table"]() in page


def test_every_switch_is_explained():
    page = PAGE.read_text()
    missing = {name for name in AlgorithmConfig.__dataclass_fields__ if f"`{name}" not in page}
    assert missing <= {"name", "value_clip"}, missing


def test_every_line_of_the_trl_table_is_a_config():
    for equal in EQUAL_SETTINGS:
        AlgorithmConfig(**equal.ours)
