"""Every benchmark has a claim in its head, and finds what it imports. Most run for minutes, and
nothing else would notice a function that has moved."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(next(iter(benchmarks.__path__)))
NAMES = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
PAGES = [FOLDER / "README.md", FOLDER.parent / "README.md", *FOLDER.parent.glob("docs/*.md")]
OPTIONAL = ("ray", "vllm")


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python benchmarks/NAME.py` does, which finds the others of its folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_each_says_what_it_claims_and_how_it_is_run() -> None:
    """A file that ends with `bench(main)`: its head begins with a sentence, and has its command."""
    ways: dict[str, list[str]] = {}
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text()
        if not re.search(r"^    bench\(", text, re.MULTILINE):
            continue
        head = ast.get_docstring(ast.parse(text)) or ""
        first = head.partition("\n\n")[0]
        missing = [] if first.endswith((".", "?", ":")) and len(first) > 30 else ["a claim"]
        missing += [] if f"python benchmarks/{name}.py" in head else ["its command"]
        ways |= {name: missing} if missing else {}
    assert not ways


def test_pages_name_benchmarks_and_results_that_are_there() -> None:
    named = re.compile(r"benchmarks/([a-z_/]+\.(?:py|json))")
    rows = re.compile(r"`([a-z_]+\.(?:py|json))`")
    gone = []
    for page in PAGES:
        text = page.read_text()
        files = set(named.findall(text))
        if page.parent == FOLDER:
            own = (row for row in rows.findall(text) if row.endswith(".py"))
            files |= {row for row in own if not row.startswith("test_")}
        gone += [(page.name, file) for file in sorted(files) if not (FOLDER / file).exists()]
    assert not gone
