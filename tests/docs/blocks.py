"""The code blocks of the README and of the pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(
        ROOT / name
        for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "benchmarks/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
)


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    """Empty for an indented block."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced and indented code blocks."""
    lines = page.read_text("utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = re.match(r"(\s*)(```+|~~~+)\s*(\w*)", lines[number])
        if opening:
            end = number + 1
            while not lines[end].strip().startswith(opening[2]):
                end += 1
            body = (line.removeprefix(opening[1]) for line in lines[number + 1 : end])
            yield Block(page, number + 2, opening[3], "\n".join(body))
            number = end + 1
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield Block(page, number + 1, "", "\n".join(line[4:] for line in lines[number:end]))
            number = end
        else:
            number += 1


def commands(block: Block) -> Iterator[tuple[str, ...]]:
    """The words of each `rollpacker ...` line; a backslash joins lines. What is answered with
    `rollpacker: ...` in the next line is an example of what is refused, and left out."""
    if block.language not in ("", "bash", "sh", "console", "shell"):
        return
    lines = [line.strip() for line in block.text.replace("\\\n", " ").splitlines()]
    for line, answer in zip(lines, [*lines[1:], ""], strict=True):
        line = line.removeprefix("$ ")
        if line.startswith("rollpacker ") and not answer.startswith("rollpacker: "):
            words = shlex.split(line, comments=True)
            ends = [words.index(word) for word in ("&&", "|", ";", ">") if word in words]
            yield tuple(words[1 : min(ends, default=len(words))])


def named_files(page: Path) -> dict[str, str]:
    """Blocks of a page that begin with a comment such as `# my_run.yaml`, and configs by the name
    that they begin with -> their text."""
    found = {}
    for block in blocks(page):
        first = block.text.split("\n", 1)[0]
        if name := re.match(r"# ([\w.-]+\.(?:yaml|py|jsonl))$", first):
            found[name[1]] = block.text
        elif name := re.match(r"name: ([\w-]+)", first):
            found[f"{name[1]}.yaml"] = block.text
    return found
