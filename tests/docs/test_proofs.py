"""Each section of README and docs has a test or a benchmark that fails if it is no longer so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from tests.docs.blocks import ROOT

MAKING = runpy.run_path(str(ROOT / "docs" / "make_proofs.py"))
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "proofs.md"),
]


def sections(page: Path) -> list[str]:
    """The headings of the second and third level, without those inside of code blocks."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", page.read_text("utf-8"), flags=re.M | re.S)
    return re.findall(r"^###? (.+?)\s*$", text, flags=re.M)


def test_each_section_has_its_row_and_no_row_is_of_none() -> None:
    listed = MAKING["proofs"]()
    assert set(listed) == {str(page.relative_to(ROOT)) for page in PAGES}
    for page in PAGES:
        rows = listed[str(page.relative_to(ROOT))]
        if isinstance(rows, dict):
            assert set(rows) == set(sections(page)), page


def test_each_proof_is_there() -> None:
    lacking = [
        f"{page}, {section}: {name}"
        for page, rows in MAKING["proofs"]().items()
        for section, names in (rows if isinstance(rows, dict) else {"all": rows}).items()
        if not (isinstance(names, str) and names.startswith("none: "))
        for name in names
        if not is_there(name)
    ]
    assert lacking == []


def is_there(name: str) -> bool:
    """A benchmark; or a file of tests, or one of its tests, below `tests`."""
    if name.startswith("benchmarks/"):
        return (ROOT / name).is_file()
    path, _, test = name.partition("::")
    place = ROOT / "tests" / path
    return place.is_file() and bool(
        re.search(rf"^(async )?def {test or 'test_'}", place.read_text("utf-8"), flags=re.M)
    )


def test_what_is_not_there_is_found() -> None:
    assert is_there("docs/test_proofs.py::test_what_is_not_there_is_found")
    assert is_there("benchmarks/order_only.py")
    assert not is_there("docs/test_proofs.py::test_of_nothing")
    assert not is_there("docs/test_nothing.py")
    assert not is_there("benchmarks/nothing.py")


def test_the_page_is_what_the_table_says() -> None:
    page = (ROOT / "docs" / "proofs.md").read_text("utf-8")
    assert page == MAKING["page"](), "run: python docs/make_proofs.py"
