"""A headless Chromium for the tests of pages: the machine's own, through playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no Chromium on this machine (make browser installs it, or says how)"


@dataclass
class Seen:
    """What a page did that nobody sees."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


_shared: list[Any] = []
"""Playwright and its browser, once a test of the module has asked for a page."""


def _browser() -> Any:
    sync_api = pytest.importorskip("playwright.sync_api")
    if EXECUTABLE is None:
        pytest.skip(MISSING)
    if not _shared:
        playwright = sync_api.sync_playwright().start()
        _shared.append(playwright)
        launch = playwright.chromium.launch
        _shared.append(launch(executable_path=EXECUTABLE, args=["--no-sandbox"]))
    return _shared[1]


def end_browser() -> None:
    """Playwright holds the thread's event loop, so no other module may find it running."""
    playwright, *browsers = _shared or [None]
    _shared.clear()
    for browser in browsers:
        browser.close()
    if playwright is not None:
        playwright.stop()


@contextmanager
def opened(
    url: str, *, ready: str = "html[data-ready]", **settings: Any
) -> Iterator[tuple[Any, Seen]]:
    """A page that has drawn itself (`ready` is there), what it asked for, and its complaints. It
    has nothing of other pages; their browser is one for a module. It jumps where it would scroll
    smoothly: a place that was measured on the way is somewhere else when the mouse comes."""
    usual = {"viewport": {"width": 1300, "height": 900}, "reduced_motion": "reduce"}
    context = _browser().new_context(**{**usual, **settings})
    try:
        page = context.new_page()
        page.set_default_timeout(20_000)
        seen = Seen()
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("console", seen.said)
        page.goto(url)
        page.wait_for_selector(ready, state="attached")
        yield page, seen
    finally:
        context.close()


def url(folder: Path) -> str:
    return (folder / "report.html").resolve().as_uri()


def samples(page: Any) -> None:
    """Go to the browser of samples and wait until it is there."""
    page.evaluate("document.getElementById('samples-section').scrollIntoView()")
    page.wait_for_selector(".row")
