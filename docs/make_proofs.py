"""The page `docs/proofs.md`, from `tests/docs/proofs.yaml`: what holds each section to its word.

`python docs/make_proofs.py` rewrites it.
"""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "proofs.md"
TABLE = ROOT / "tests" / "docs" / "proofs.yaml"

Proofs = str | list[str]
"""Tests below `tests/` and benchmarks; or a text `none: ...` that says why there are none."""

_HEAD = """\
# What is promised, and what proves it

For each section of the README and of these pages: the tests and benchmarks that fail if it is no
longer so. Tests run by `make test` or `make nightly`; benchmarks run by themselves and keep what
they measured in `benchmarks/results`. (Made by `python docs/make_proofs.py`.)
"""


def proofs() -> dict[str, dict[str, Proofs] | Proofs]:
    """Page (its path from the root) -> section -> its proofs, or those of the whole page."""
    table: dict[str, dict[str, Proofs] | Proofs] = yaml.safe_load(TABLE.read_text("utf-8"))
    return table


def page() -> str:
    parts = [_HEAD]
    for path, sections in proofs().items():
        link = f"../{path}" if "/" not in path else path.removeprefix("docs/")
        parts.append(
            f"\n## {path}\n\nThe page: [{path}]({link}).\n\n| section | proof |\n|---|---|\n"
        )
        rows = sections if isinstance(sections, dict) else {"all of it": sections}
        parts += [f"| {section} | {_cell(names)} |\n" for section, names in rows.items()]
    return "".join(parts)


def _cell(names: Proofs) -> str:
    if isinstance(names, str):
        return names.removeprefix("none: ")
    return ", ".join(f"`{_short(name)}`" for name in names)


def _short(name: str) -> str:
    return name if name.startswith("benchmarks/") else f"tests/{name}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
