"""How episodes went, in the page: seconds by tool, and the tools of the slowest answers."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from rollpacker.core.events import Acted, SampleScored, ToolCall
from rollpacker.core.records import Entry, Record
from rollpacker.report.files import write_reports
from tests.report.fake_run import FakeRun, write
from tests.report.page.browser import opened, url
from tests.report.page.runs import CONFIG, HOSTILE


def test_tools_have_a_table_and_their_names_are_text(tmp_path: Path) -> None:
    entries: list[Entry] = []
    for entry in FakeRun(1).run(3):
        if isinstance(entry, Record) and isinstance(entry.event, SampleScored):
            calls = (ToolCall("search", 0.25, is_well=True), ToolCall(HOSTILE, None, is_well=False))
            answer = Acted(time_s=0.0, sample=entry.event.sample, turn=2, seconds=0.5, calls=calls)
            entries.append(structs.replace(entry, event=answer, commands=()))
        entries.append(entry)
    folder = tmp_path / "run"
    folder.mkdir()
    write(entries, folder / "events.jsonl")
    (folder / "config.yaml").write_text(CONFIG)
    write_reports(folder)
    num = sum(isinstance(one, Record) and isinstance(one.event, Acted) for one in entries)
    with opened(url(folder)) as (page, seen):
        page.locator("h3", has_text="Tools").wait_for()
        told = page.locator(".card", has=page.locator("h3", has_text="Tools")).inner_text()
        assert f"search\t{num}\t0\t0\t250 ms\t250 ms\t250 ms" in told
        assert f"\t{num}\t{num}\t0\t" in told  # no seconds: it was never run
        slowest = page.locator(".card", has=page.locator("h3", has_text="Slowest answers"))
        assert slowest.locator("td", has_text="search").count() == 10
        assert page.evaluate("window.hacked") is None
        assert seen.errors == []
