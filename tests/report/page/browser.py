"""A headless Chromium for the tests of pages: the machine's own, through playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@contextmanager
def opened(
    url: str, *, ready: str = "html[data-ready]", **settings: Any
) -> Iterator[tuple[Any, Seen]]:
    """A page that has drawn itself (`ready` is there), what it asked for, and its complaints."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if EXECUTABLE is None:
        pytest.skip(MISSING)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=["--no-sandbox"])
        settings = {"viewport": {"width": 1300, "height": 900}, **settings}
        page = browser.new_context(**settings).new_page()
        page.set_default_timeout(20_000)
        seen = Seen()
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("console", seen.said)
        page.goto(url)
        page.wait_for_selector(ready, state="attached")
        try:
            yield page, seen
        finally:
            browser.close()
