"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report.page.browser import end_browser


@pytest.fixture(scope="module", autouse=True)
def one_browser() -> Iterator[None]:
    yield
    end_browser()
