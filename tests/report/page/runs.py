"""Run folders made up for the page: a fake log, and sample files by the project's own writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollpacker.core.commands import TrainOn
from rollpacker.core.events import SampleGenerated, SampleScored
from rollpacker.core.records import Entry, Note, Record
from rollpacker.run.folder.samples import SampleWriter
from tests.report.fake_run import FakeRun, write

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "\u2028\u2029\x1b[31mred\x1b[0m\x07\u202eevil\x00 &lt;b&gt; {{core}} <!-- "
)
"""Everything that is something else than text somewhere."""

CONFIG = """\
name: fake
model: {path: some/model}
data: {train: {kind: jsonl, path: rows.jsonl}}
rollout: {prompts_per_step: 8, samples_per_prompt: 8, max_response_tokens: 384}
train: {steps: 30, learning_rate: 0.0003}
rewards: [{function: "reward.py:exact", weight: 2.0}]
"""


Complete = Callable[[str], str]
"""The completion of a sample, by its id."""


def write_run(
    folder: Path,
    *,
    steps: int = 30,
    text: str = "an answer",
    complete: Complete = lambda sample: f"It is {sample}. ",
    **fake: Any,
) -> Path:
    """A finished run with samples and evaluations; every text of it holds `text`."""
    folder.mkdir(parents=True)
    entries = FakeRun(1, **fake).run(steps)
    write(entries, folder / "events.jsonl")
    (folder / "config.yaml").write_text(CONFIG)
    write_samples(folder, entries, text, complete)
    return folder


def write_samples(folder: Path, entries: list[Entry], text: str, complete: Complete) -> None:
    writer = SampleWriter(folder)
    tokens: dict[Any, SampleGenerated] = {}
    values: dict[Any, float | None] = {}
    for entry in entries:
        if isinstance(entry, Note) and entry.name == "evaluation":
            writer.write_evaluation(entry.step, [_evaluated(entry.step, n, text) for n in range(6)])
        if not isinstance(entry, Record):
            continue
        if isinstance(entry.event, SampleGenerated):
            tokens[entry.event.sample] = entry.event
        if isinstance(entry.event, SampleScored):
            values[entry.event.sample] = entry.event.value
        for command in entry.commands:
            if isinstance(command, TrainOn):
                of_step = [s for group in command.groups for s in group]
                rows = [_trained(command.step, s, tokens[s], values[s], text) for s in of_step]
                writer.add(
                    [{**row, "completion": complete(row["sample_id"]) + text} for row in rows]
                )
                if command.step % 10 == 0:
                    writer.write()
    writer.write()


def _trained(
    step: int, sample: Any, end: SampleGenerated, value: float | None, text: str
) -> dict[str, Any]:
    return {
        "step": step,
        "round_kind": "short" if sample.attempt == 0 else "long",
        **_texts(str(sample.prompt), str(sample), sample.prompt.row, text),
        "finish_reason": end.finish_reason,
        "num_tokens": end.num_tokens,
        "reward": value,
        "reward/exact": value,
        f"reward/{text[:40]}": value,
        "check_s": end.num_tokens / 1000,
        "trained": True,
        "advantage": 0.5,
        "loss_weight": 1.0,
    }


def _evaluated(step: int, number: int, text: str) -> dict[str, Any]:
    passed = number % 3 == 0
    name = f"eval/0/{number}"
    return {
        "step": step,
        **_texts(name, f"{name}#0.0", number, text),
        "finish_reason": "stop",
        "num_tokens": 10 + number,
        "reward": None if number == 5 else float(passed),
        "reward/exact": None if number == 5 else float(passed),
        "check_s": 0.01,
        "passed": None if number == 5 else passed,
        "failure": text if number == 5 else None,
    }


def _texts(prompt_id: str, sample_id: str, row: int, text: str) -> dict[str, str]:
    return {
        "prompt_id": prompt_id,
        "sample_id": sample_id,
        "row_where": f"rows.jsonl, line {row + 1}",
        "row": json.dumps({"answer": str(row), "note": text}),
        "prompt": f"What is {row}? {text}",
        "rendered_prompt": f"<s>What is {row}? {text}",
        "completion": text,
    }
