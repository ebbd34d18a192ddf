"""`report.html` in a browser: it shows what the run was, asks nobody for anything, and nothing that
a model wrote is more than text in it."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollpacker.report.files import write_reports
from tests.report.page.browser import opened, samples, url
from tests.report.page.runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("page") / "plain")
    write_reports(folder)
    return folder


def told(page: Any) -> str:
    return str(page.inner_text("#samples-section p[aria-live]"))


def test_it_shows_the_run_and_asks_nobody(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    with opened(url(run)) as (page, seen):
        text = page.inner_text("main")
        assert "plain" in page.inner_text("h1")
        assert f"{summary['steps']['total']} steps" in text
        last = summary["evaluations"][-1]["eval/pass@1"]
        assert f"{last:.3f}" in page.inner_text(".tiles")
        for cause in summary["seconds"]:
            assert cause.replace("_", " ") in text
        for heading in ("Learning", "Lengths", "Time", "Timeline", "Checks", "Samples", "Settings"):
            assert heading in page.inner_text("nav")
        assert "train.learning_rate" in page.inner_text("#settings")
        assert "0.0003" in page.inner_text("#settings")
        samples(page)
        assert seen.requests == [url(run)]
        assert seen.errors == []


def test_clips_of_each_update_and_what_did_not_change(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "updates", steps=5)
    rows = [
        {"step": step, **{f"actor/clip_ratio_high/update_{n}": n * step / 100 for n in (1, 2, 10)}}
        for step in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = (folder / "events.jsonl").read_text()
    later = re.sub('("eval/pass@1": ?)0.25', r"\g<1>0.2", log)  # as before the first step
    assert later != log
    (folder / "events.jsonl").write_text(later)
    write_reports(folder)
    with opened(url(folder)) as (page, seen):
        assert "0.200\nas at the start" in page.inner_text(".tiles")
        learning = page.inner_text("#learning")
        assert "Clipped above, by update" in learning
        assert learning.index("update 1") < learning.index("update 2") < learning.index("update 10")
        assert seen.errors == []


def test_its_policy_stops_requests(run: Path) -> None:
    heard: list[str] = []

    class Ear(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Ear) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{server.server_address[1]}"
        with opened(url(run)) as (page, seen):
            page.evaluate(f"fetch('{there}/fetch').catch(() => {{}})")
            page.evaluate(f"new Image().src = '{there}/image'")
            page.evaluate(f"navigator.sendBeacon('{there}/beacon')")
            page.wait_for_timeout(500)
            assert sum("Content Security Policy" in error for error in seen.errors) >= 3
        with opened(there + "/awake", ready="body") as _:
            pass
        server.shutdown()
    assert [path for path in heard if path != "/favicon.ico"] == ["/awake"]


def test_filters_keep_what_fits(run: Path) -> None:
    with opened(url(run)) as (page, _):
        samples(page)
        num = int(re.match(r"[\d,]+ of ([\d,]+)", told(page))[1].replace(",", ""))
        listed = page.evaluate("window.rollpackerSamples.data.num")
        assert num == listed > 1000

        def rows() -> list[dict[str, Any]]:
            return page.evaluate(
                """() => { const { data, rows } = window.rollpackerSamples; return Array.from(rows,
                (r) => ({step: data.step[r], reward: data.reward[r], evaluation: data.evaluation[r],
                kind: data.round_kind.words[data.round_kind.of[r]], tokens: data.tokens[r]})) }"""
            )

        page.fill("[aria-label=from]", "5")
        page.fill("[aria-label=to]", "7")
        page.wait_for_timeout(300)
        assert {row["step"] for row in rows()} == {5, 6, 7}
        page.select_option("[aria-label=Source]", "0")
        page.fill("[aria-label=least]", "0.5")
        page.wait_for_timeout(300)
        assert {row["reward"] for row in rows()} == {1.0}
        assert {row["evaluation"] for row in rows()} == {0}
        page.fill("[aria-label=least]", "")
        page.select_option("[aria-label='Round kind']", "long")
        page.select_option("[aria-label=Order]", "tokens-")
        page.wait_for_timeout(300)
        kept = rows()
        assert {row["kind"] for row in kept} == {"long"}
        assert [row["tokens"] for row in kept] == sorted((r["tokens"] for r in kept), reverse=True)
        page.fill("[aria-label='Search texts']", "no such text at all")
        page.wait_for_timeout(300)
        assert told(page).startswith("0 of")
        assert "No sample fits" in page.inner_text(".list")


def test_the_first_sample_is_shown_until_one_is_chosen(run: Path) -> None:
    with opened(url(run)) as (page, _):
        samples(page)

        def first() -> str:
            return str(page.evaluate("((s) => s.id(s.rows[0]))(window.rollpackerSamples)"))

        before = first()
        assert before in page.inner_text(".detail")
        page.fill("[aria-label=from]", "7")
        page.wait_for_timeout(300)
        assert first() != before and first() in page.inner_text(".detail")
        page.click(".row >> nth=1")
        chosen = page.inner_text(".detail h3")
        page.fill("[aria-label=from]", "")
        page.wait_for_timeout(300)
        assert page.inner_text(".detail h3") == chosen


def test_ticks_of_the_timeline_differ_however_far_it_is_zoomed(run: Path) -> None:
    with opened(url(run)) as (page, _):
        page.evaluate(
            """() => { window.drawn = []; const pen = CanvasRenderingContext2D.prototype,
            draw = pen.fillText; let open = false; pen.fillText = function (text, ...rest) {
            if (this.canvas.className === "lane") {
              if (!open) { window.drawn = []; open = true; queueMicrotask(() => open = false); }
              window.drawn.push(text); }
            draw.call(this, text, ...rest); } }"""  # one drawing's texts
        )
        page.evaluate("document.getElementById('timeline').scrollIntoView()")
        page.focus("canvas.lane")
        page.keyboard.press("End")
        for _ in range(14):
            page.evaluate("window.drawn.length = 0")
            page.keyboard.press("+")
            page.wait_for_timeout(60)
            page.wait_for_function("window.drawn.length")
            times = [text for text in page.evaluate("window.drawn") if re.search(r"[:.]| s$", text)]
            assert len(times) > 1 and len(set(times)) == len(times), times
        told = [page.evaluate(f"moment({time}, {step})") for time, step in MOMENTS]
        assert told == list(MOMENTS.values())


MOMENTS = {
    (5.0, 1.0): "5 s",
    (5.025, 0.025): "5.025 s",
    (89.03, 0.01): "1:29.03",
    (59.9999, 0.01): "1:00.00",
    (3661.0, 20.0): "1:01:01",
    (65.0, 5.0): "1:05",
}


def test_a_search_finds_one_sample_and_shows_all_of_it(run: Path) -> None:
    with opened(url(run)) as (page, _):
        samples(page)
        wanted = page.evaluate("window.rollpackerSamples.id(40)")
        page.fill("[aria-label='Search texts']", f"It is {wanted}.")
        page.wait_for_timeout(300)
        page.click(".row")
        detail = page.inner_text(".detail")
        assert wanted in detail
        assert "<s>What is" in detail  # the prompt as the model saw it
        assert "rows.jsonl, line" in detail and "note" in detail
        assert page.inner_text(".detail mark") == f"It is {wanted}."


def test_a_click_on_a_slow_check_leads_to_its_sample(run: Path) -> None:
    with opened(url(run)) as (page, _):
        link = page.locator("#checks a").first
        name = link.inner_text()
        link.click()
        page.wait_for_selector(".detail code")
        page.wait_for_timeout(200)
        assert name in page.inner_text(".detail")


def test_the_timeline_moves_by_keys_and_names_samples(run: Path) -> None:
    with opened(url(run)) as (page, seen):
        page.evaluate("document.getElementById('timeline').scrollIntoView()")
        shown = page.locator("#timeline .tools span[aria-live]")
        before = shown.inner_text()
        page.focus("canvas.lane")
        page.keyboard.press("+")
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(200)
        assert shown.inner_text() != before
        page.keyboard.press("0")
        page.wait_for_timeout(200)
        assert shown.inner_text().startswith("steps 1 to 30")
        page.keyboard.press("Home")
        page.wait_for_timeout(200)
        box = page.locator("canvas.lane").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.06, box["y"] + box["height"] - 60)
        page.wait_for_timeout(200)
        assert "fake/0/" in page.inner_text("#tip")
        assert seen.errors == []
