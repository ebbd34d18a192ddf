"""A made-up engine: one file and one row of the table of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.core.events import SampleGenerated
from rollpacker.core.records import Record
from rollpacker.engines.engine import EngineConfig
from rollpacker.engines.table import ENGINES
from rollpacker.report.log import EventLog


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    yield write_config(tmp_path, steps=2)
    torch.set_num_threads(threads)


def test_a_run_with_an_engine_of_one_row(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "echo", "tests.drills.echo_engine:EchoEngine")
    overrides = ["name=echo", "rollout.engine.name=echo", "tail_batching.carry=none"]
    run = rollpacker.train(config, overrides)
    log = list(EventLog(run.folder / "events.jsonl"))
    events = [entry.event for entry in log if isinstance(entry, Record)]
    assert any(isinstance(event, SampleGenerated) for event in events)
    assert run.summary["steps"]["total"] >= 2


def test_an_engine_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="name must be one of torch, vllm, not vlm"):
        EngineConfig(name="vlm")
