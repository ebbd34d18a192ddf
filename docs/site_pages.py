"""What the site needs beyond the pages in docs/, as a hook of mkdocs.

In the repository a page links to code, configs and other texts by relative paths. On the site each
file that is linked so becomes a page of its own, and the links lead there."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/quickstart.ipynb": "notebook.md",
}
"""Texts outside of docs/ -> their pages. The README's place is taken by a landing page."""

_LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".md": "markdown", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each text in `TEXTS`, and for each file that some page links to."""
    for text, page in TEXTS.items():
        if page not in files.src_uris:
            files.append(File.generated(config, page, content=_text(text)))
    linked: set[str] = set()
    for file in files.documentation_pages():
        _rewritten(file.content_string, file.src_uri, linked.add)
    for path in sorted(linked):
        files.append(File.generated(config, _source_page(path), content=_source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ lead to the pages that `on_files` made."""
    return _rewritten(markdown, page.file.src_uri, lambda path: None)


def _rewritten(markdown: str, page: str, note: Callable[[str], None]) -> str:
    """`note` is called with each file of the repository that a link names."""
    origins = {made: text for text, made in TEXTS.items() if made != "index.md"}
    folder = posixpath.dirname(origins.get(page, f"docs/{page}"))

    def moved(found: re.Match[str]) -> str:
        target, hash_sign, anchor = found[1].partition("#")
        if not target or ":" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in TEXTS:
            goal = TEXTS[path]
        elif path.startswith("docs/"):
            goal = path.removeprefix("docs/")
        elif page.startswith("source/") or not (ROOT / path).exists():
            return found[0]
        else:
            note(path)
            goal = _source_page(path)
        return posixpath.relpath(goal, posixpath.dirname(page) or ".") + hash_sign + anchor

    return "\n".join(
        _LINK.sub(moved, line) if is_text else line for line, is_text in _lines(markdown)
    )


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is text rather than part of a code block."""
    fence = ""
    for line in markdown.split("\n"):
        mark = line.lstrip()[:3]
        if mark in ("```", "~~~") and fence in ("", mark):
            fence = mark if not fence else ""
        yield line, not fence and not line.startswith("    ")


def _text(path: str) -> str:
    content = (ROOT / path).read_text("utf-8")
    return _cells(content) if path.endswith(".ipynb") else content


def _cells(notebook: str) -> str:
    """A notebook's texts and code, without outputs."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts)


def _source_page(path: str) -> str:
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def _source(path: str) -> str:
    """A page that shows the file, or what is in the folder."""
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n"
    place = ROOT / path
    if place.is_dir():
        names = sorted(one.name for one in place.iterdir() if not one.name.startswith(("_", ".")))
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = _LANGUAGES.get(place.suffix, "text")
    return f"{head}``````{language}\n{place.read_text('utf-8').rstrip()}\n``````\n"
