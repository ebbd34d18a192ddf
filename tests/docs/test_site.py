"""The site builds without a warning, has every page, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

pytest.importorskip("material", reason="pip install 'rollpacker[dev]'")

ROOT = Path(__file__).parents[2]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without running what it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)["nav"]
    listed = set(re.findall(r"[\w-]+\.md", str(nav)))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= listed
    home = (site / "index.html").read_text()
    for name in listed - {"index.md"}:
        assert f'href="{name.removesuffix(".md")}/"' in home, name


def test_links_out_of_docs_lead_to_pages(site: Path) -> None:
    algorithms = (site / "algorithms" / "index.html").read_text()
    assert 'href="../source/tests/algo/test_parity_trl.py/"' in algorithms
    made = site / "source/tests/algo/test_parity_trl.py/index.html"
    assert "def test_" in re.sub(r"<[^>]+>", "", made.read_text())
    assert (site / "notebook" / "index.html").exists()


def test_every_link_to_a_page_or_picture_has_its_file(site: Path) -> None:
    missing = []
    for page in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if re.match(r"[a-z]+:|//", target) or page.name == "404.html":
                continue
            place = (page.parent / target).resolve()
            if not (place / "index.html" if target.endswith(("/", ".")) else place).exists():
                missing.append(f"{page.relative_to(site)}: {target}")
    assert missing == []


def test_nothing_comes_from_another_host(site: Path) -> None:
    """Links to other pages of the web are fine; what a browser loads by itself is not."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|link|source)\b[^>]*>", text)
        for tag in loaded:
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (page, tag)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(?:https?:)?//|@import", sheet.read_text()), sheet


def test_the_page_on_installing_has_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (`[\w-]+`.*?) \|", (ROOT / "docs/install.md").read_text(), re.M)
    assert set(project["optional-dependencies"]) <= set(re.findall(r"`([\w-]+)`", " ".join(rows)))
