"""Makes the page of a run: one HTML document with markup, style, script and data. The document
loads nothing from the network, which its content security policy forbids."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from rollpacker.report.page.packing import embedded, pack
from rollpacker.writing import printable, replacing

PAGE_FILE = "report.html"

_SCRIPTS = (
    *("data.js", "text.js", "charts.js", "time_line.js", "dialogue.js", "samples.js"),
    *("episodes.js", "overview.js", "page.js", "live.js", "start.js"),
)
Kind = Literal["report", "live"]


def write_page(path: Path, run: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
    """Write the page of one run. `run` is the result of `RunBook.plain`, `samples` that of
    `read_samples`."""
    text = document(
        f"{run['name']} · RollPacker",
        "report",
        core=embedded(pack(run)),
        samples=embedded(pack(samples)),
    )
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def document(title: str, kind: Kind, *, core: str = "", samples: str = "") -> str:
    """The HTML of a page named `title`. `core` has the data of the run, `samples` those of its
    samples, both as `embedded` packs them. A "live" page has none."""
    style, script = _file("page.css"), "\n".join(map(_file, _SCRIPTS))
    connect = "'self'" if kind == "live" else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": html.escape(policy),
        "title": html.escape(printable(title)),
        "kind": kind,
        "version": html.escape(version("rollpacker")),
        "style": style,
        "script": script,
        "core": core,
        "samples": samples,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files("rollpacker.report.page") / "files" / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"
