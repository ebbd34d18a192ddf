"""What models and data wrote never reaches a terminal as more than text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rollpacker.bus import Bus
from rollpacker.cli.main import main
from rollpacker.report.files import write_reports
from rollpacker.report.metrics import MetricsWriter, read_metrics
from rollpacker.report.summary_table import render
from rollpacker.run.ports.reasons import Reasons
from tests.report.page.runs import HOSTILE, write_run

FORBIDDEN = [*map(chr, [*range(9), *range(11, 32), 127]), "\u202e", "\u2028", "\ud800"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "ho[bold]stile\x1b[31m", steps=6, text=HOSTILE)
    log = (folder / "events.jsonl").read_text()
    name = json.dumps(HOSTILE + "\ud800[red]")[1:-1].replace("/", "")
    log = log.replace('"exact"', f'"{name}"').replace("fewer than two verdicts", name)
    log = log.replace('"cap"', name).replace("fake", f"fake{name}")
    (folder / "events.jsonl").write_text(log)
    return folder


def forbidden(text: str) -> list[str]:
    return [repr(one) for one in FORBIDDEN if one in text]


def test_the_table_holds_no_control_characters(run: Path) -> None:
    summary = write_reports(run)
    kind = next(iter(summary["checks"].values()))
    kind["longest_s"] = 1.0  # so that the checks are in the table
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(render(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert forbidden(text) == []
    assert "ho[bold]stile" in text and "\\x1b[31mred" in text.replace("\n", "")


def test_report_and_compare_print_none_either(run: Path, capsys, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=4)
    assert main(["report", str(run)]) == 0
    assert main(["compare", str(run), str(other)]) == 0
    assert forbidden(capsys.readouterr().out) == []


def test_metrics_hold_a_half_surrogate_as_json_does(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"rewards/\ud800/mean": 1.0, "perf/checks/slowest": "\udfff#0.0 1 s"})
    writer.close()
    ((_, row),) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["rewards/\ud800/mean"] == 1.0


def test_a_reason_that_quotes_a_model_is_told_without_its_escapes(caplog) -> None:
    Reasons(Bus(None, None, sinks=[]))._tell("said \x1b[2J\u2028")  # type: ignore[arg-type]
    assert "said" in caplog.text and "\x1b" not in caplog.text and "\u2028" not in caplog.text
