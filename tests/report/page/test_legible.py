"""`report.html` in a browser: legible in both schemes and widths, and safe with hostile texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollpacker.report.files import write_reports
from tests.report.page.browser import opened, samples, url
from tests.report.page.runs import HOSTILE, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("page") / "plain", steps=12)
    write_reports(folder)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1800])
def test_it_fits_and_is_legible(run: Path, scheme: str, width: int) -> None:
    settings = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with opened(url(run), **settings) as (page, seen):
        samples(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.get_attribute("html", "data-theme") == scheme
        page.click("#theme")
        other = "dark" if scheme == "light" else "light"
        assert page.get_attribute("html", "data-theme") == other
        assert contrasts(page) == []
        assert seen.errors == []


def contrasts(page: Any) -> list[str]:
    """Texts whose colour is closer to their ground than WCAG's 4.5."""
    return page.evaluate(
        """() => {
      const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
      const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (c.startsWith("rgb") && !/, 0\\)$/.test(c) && rgb(c).length === 3) return rgb(c); } return [255, 255, 255]; };
      const found = new Set();
      for (const e of document.querySelectorAll("main *")) {
        if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
        const a = light(rgb(getComputedStyle(e).color)), b = light(ground(e));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.add(`${e.tagName}.${e.className} ${ratio.toFixed(2)}`);
      }
      return [...found];
    }"""  # noqa: E501
    )


def test_hostile_text_is_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>{{core}}", text=HOSTILE)
    log = (folder / "events.jsonl").read_text()
    name = json.dumps(HOSTILE)[1:-1]
    log = log.replace('"exact"', f'"{name}"').replace("fewer than two verdicts", name)
    (folder / "events.jsonl").write_text(log.replace("fake", f"fake{name}"))
    write_reports(folder)
    raw = (folder / "report.html").read_bytes()
    assert raw.count(b"<script") == 3 and b"hacked" not in raw
    with opened(url(folder)) as (page, seen):
        samples(page)
        page.click(".row")
        page.fill("[aria-label='Search texts']", "</script>")
        page.wait_for_timeout(300)
        page.click(".row")
        page.fill("[aria-label=Metric]", "rewards")
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0
        assert "<img src=x" in page.inner_text("h1")
        detail = page.inner_text(".detail")
        assert "</script><script>window.hacked" in detail
        assert "␛[31mred" in detail and "\\u202e" in detail and "\\u2028" in detail
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2028\u2029]", page.inner_text("main"))
        assert seen.errors == []
        assert seen.requests == [url(folder)]
