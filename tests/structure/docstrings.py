"""Prints docstrings of the package, drawn at random, for somebody to say whether each is clear.

    python -m tests.structure.docstrings [--count 60] [--commit HASH]

The draw is that of the commit: whoever runs it on the same files with the same hash has the same
docstrings. Each is printed with its place and with the line of code that it is about.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Docstring:
    place: str
    """File and line."""
    about: str
    """The line that the docstring belongs to: of a definition, or of the value above it."""
    text: str


def docstrings(path: Path) -> Iterator[Docstring]:
    """Those of a file: of itself, of classes, functions, fields and constants."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for number, one in enumerate(body):
            if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)):
                continue
            text = one.value.value
            if not isinstance(text, str):
                continue
            owner = body[number - 1] if number else node
            at = getattr(owner, "lineno", None)
            about = lines[at - 1].strip() if at else path.stem
            place = f"{path.relative_to(ROOT)}:{one.lineno}"
            yield Docstring(place, about, " ".join(text.split()))


def drawn(commit: str, count: int) -> list[Docstring]:
    """So many of the whole package, the same for the same files and the same `commit`."""
    paths = sorted((ROOT / "rollpacker").rglob("*.py"))
    return random.Random(commit).sample([one for path in paths for one in docstrings(path)], count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--commit", help="the seed; without it the commit checked out")
    options = parser.parse_args()
    commit = options.commit or subprocess.check_output(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, text=True
    )
    commit = commit.strip()
    print(f"{options.count} docstrings of {commit}")
    for number, one in enumerate(drawn(commit, options.count), start=1):
        print(f"\n{number}. {one.place}    {one.about}\n   {one.text}")


if __name__ == "__main__":
    main()
