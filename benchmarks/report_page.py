"""`report.html` of a big run: how large it is, how soon it shows itself, how quick its filters are.

The run is made up (10,000 steps, 100,000 trained samples of about 2,000 characters each) and
written by the project's own log and sample writers; the page is opened in headless Chromium.

    python benchmarks/report_page.py [--steps 10000] [--looks 5]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from machine import write_result  # noqa: E402

FILTERS = {
    "steps": ("[aria-label=from]", "2500"),
    "reward": ("[aria-label=least]", "0.5"),
    "text": ("[aria-label='Search texts']", "lemur quartz"),
    "rare text": ("[aria-label='Search texts']", "no such words"),
}
WORDS = """lemur quartz the of and therefore we find sum number seven eleven let x be since then
thus prove assume integer prime root divide multiply carry answer check again wait maybe however"""


def completion(sample: str) -> str:
    """Words and numbers of about 2,000 characters."""
    draw, words = random.Random(sample), WORDS.split()
    return " ".join(
        draw.choice(words) if draw.random() < 0.8 else str(draw.randrange(10**6))
        for _ in range(380)
    )


def write(folder: Path, steps: int) -> dict[str, Any]:
    """The run, and what its page weighs."""
    from rollpacker.report.files import write_reports
    from tests.report.page.runs import write_run

    run = write_run(folder, steps=steps, complete=completion, p0=2, r0=5)
    began = time.perf_counter()
    write_reports(run)
    return {
        "report_s": round(time.perf_counter() - began, 2),
        "events_mb": round((run / "events.jsonl").stat().st_size / 1e6, 1),
        "samples_mb": round(sum(p.stat().st_size for p in (run / "samples").iterdir()) / 1e6, 1),
        "page_mb": round((run / "report.html").stat().st_size / 1e6, 2),
    }


def look(folder: Path) -> dict[str, Any]:
    """Open the page once."""
    from tests.report.page.browser import opened

    with opened((folder / "report.html").as_uri()) as (page, seen):
        found: dict[str, Any] = {"first_view_ms": int(page.get_attribute("html", "data-ready"))}
        began = time.perf_counter()
        page.evaluate("document.getElementById('samples-section').scrollIntoView()")
        page.wait_for_selector(".row")
        found["samples_ms"] = round((time.perf_counter() - began) * 1e3)
        # The first search waits for the texts, which are made ready while nothing else is done.
        while not page.evaluate("window.rollpackerSamples.isWarm"):
            page.wait_for_timeout(50)
        found["search_ready_ms"] = round((time.perf_counter() - began) * 1e3)
        data = "window.rollpackerSamples.data"
        found |= page.evaluate(
            f"({{num: {data}.num, listed: {data}.num_listed, texts: {data}.num_texts}})"
        )
        for name, (where, text) in FILTERS.items():
            page.fill(where, text)
            page.wait_for_timeout(700)
            # From the key to the drawn list: 90 ms of it wait for the next key.
            found[f"filter {name} ms"] = round(
                page.evaluate("window.rollpackerSamples.filterMs"), 1
            )
            page.fill(where, "")
            page.wait_for_timeout(300)
        page.select_option("[aria-label=Order]", "tokens-")
        page.wait_for_timeout(500)
        found["order ms"] = round(page.evaluate("window.rollpackerSamples.filterMs"), 1)
        found["requests"] = len(seen.requests) - 1
        found["errors"] = seen.errors
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--folder", help="keep the run here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary) / "big"
        written = write(folder, args.steps)
        print(written, flush=True)
        looks = [look(folder) for _ in range(args.looks)]
        for one in looks:
            print(one, flush=True)
    times = [key for key, value in looks[0].items() if key.endswith("ms")]
    result = {
        "steps": args.steps,
        **written,
        **{key: looks[0][key] for key in ("num", "listed", "texts")},
        "median": {key: statistics.median(one[key] for one in looks) for key in times},
        "worst": {key: max(one[key] for one in looks) for key in times},
        "requests": sum(one["requests"] for one in looks),
        "errors": [error for one in looks for error in one["errors"]],
    }
    print(write_result("report_page", result))


if __name__ == "__main__":
    main()
