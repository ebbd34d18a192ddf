"""The dialogue of a sample in the page, and that it is text there, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollpacker.report.files import write_reports
from rollpacker.run.folder.samples import SampleWriter
from tests.report.page.browser import opened, samples, url
from tests.report.page.runs import HOSTILE, write_run

CALL = {"type": "function", "function": {"name": HOSTILE, "arguments": {"it": HOSTILE}}}
DIALOGUE: dict[str, Any] = {
    "begin": [{"role": "system", "content": "Begin."}],
    "turns": [
        {
            "message": {"role": "assistant", "content": HOSTILE, "tool_calls": [CALL]},
            "answers": [{"role": HOSTILE, "name": HOSTILE, "content": HOSTILE}],
            "reward": 0.5,
            "policy_s": 2.0,
            "environment_s": 0.25,
        },
        7,
        {"message": {"role": "assistant", "content": "The end."}, "answers": [], "reward": None},
        {"message": None, "answers": "none", "reward": HOSTILE},
    ],
    "tokens": [[True, 3, HOSTILE], [False, 4, "given"], 2, [True, 1, "last"], HOSTILE],
}


def write(folder: Path, dialogue: str) -> None:
    """A run whose newest sample has this dialogue."""
    write_run(folder, steps=4)
    row = {
        "step": 9,
        "prompt_id": "train/0/77",
        "sample_id": "train/0/77#0.0",
        "rendered_prompt": "the prompt",
        "completion": "all of it",
        "dialogue": dialogue,
        "finish_reason": "turns",
        "num_tokens": 4,
        "reward": 99.0,
        "trained": True,
    }
    writer = SampleWriter(folder)
    writer.add([row])
    writer.write()
    write_reports(folder)


def test_a_dialogue_is_shown_by_turns_and_as_text(tmp_path: Path) -> None:
    write(tmp_path / "run", json.dumps(DIALOGUE))
    with opened(url(tmp_path / "run")) as (page, seen):
        samples(page)
        page.get_by_label("Order").select_option("reward-")
        page.locator(".row").first.click()
        page.locator(".detail h4", has_text="Dialogue").wait_for()
        told = page.locator(".detail").inner_text()
        assert "turn 1" in told and "drawn in 2.00 s" in told and "answered in 250 ms" in told
        assert "reward 0.5" in told and "7 turns left out" in told and "turn 9" in told
        assert "The end." in told and "Completion" not in told and "null" not in told
        page.locator(".detail details summary").click()
        assert page.locator(".tokens .drawn").count() == 2
        assert page.locator(".tokens .given").inner_text() == "given"
        assert page.evaluate("window.hacked") is None
        assert page.locator(".detail img, .detail script").count() == 0
        assert seen.errors == [] and len(seen.requests) == 1


def test_what_is_no_dialogue_leaves_the_response(tmp_path: Path) -> None:
    write(tmp_path / "run", '{"turns": [')
    with opened(url(tmp_path / "run")) as (page, seen):
        samples(page)
        page.get_by_label("Order").select_option("reward-")
        page.locator(".row").first.click()
        page.locator(".completion", has_text="all of it").wait_for()
        assert seen.errors == []
