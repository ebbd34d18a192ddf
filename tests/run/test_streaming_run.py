"""A real run of a tiny model whose gradients begin while slow verdicts are awaited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.core.commands import StartGradients, TrainOn
from rollpacker.core.records import Note, Record
from rollpacker.report.log import EventLog
from rollpacker.report.metrics import read_metrics
from rollpacker.run.replay import replay

SLOW_REWARD = """
import time

def vowels(completions, **columns):
    found = []
    for text in completions:
        time.sleep(0.2 if len(text) > 15 else 0.0)
        found.append(sum(c in "aeiou" for c in text) / max(1, len(text)))
    return found
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    path = write_config(tmp_path, steps=3)
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    yield path  # type: ignore[misc]
    torch.set_num_threads(threads)


def train(config: Path, name: str, *overrides: str) -> tuple[rollpacker.Run, list[Any]]:
    run = rollpacker.train(config, [f"name={name}", "save_samples=false", *overrides])
    return run, list(EventLog(run.folder / "events.jsonl"))


def rows(run: rollpacker.Run) -> list[dict[str, Any]]:
    return [row for _, row in read_metrics(run.folder / "metrics.jsonl") if "actor/loss" in row]


def test_it_replays_adds_up_and_takes_the_same_steps(config: Path) -> None:
    run, log = train(config, "stream", "stream_trainer={enabled: true, reward_wait: true}")
    commands = [c for entry in log if isinstance(entry, Record) for c in entry.commands]
    streamed = {s for c in commands if isinstance(c, StartGradients) for g in c.groups for s in g}
    trained = {s for c in commands if isinstance(c, TrainOn) for g in c.groups for s in g}
    assert streamed and streamed <= trained
    assert any(isinstance(entry, Note) and entry.name == "gradients" for entry in log)
    replayed = replay(log)
    assert replayed.difference is None and replayed.num_steps == run.summary["steps"]["total"]
    seconds = run.summary["seconds"]
    assert sum(seconds.values()) == pytest.approx(run.summary["wall_s"], abs=1e-6)
    # Both begin with the same weights, so the first step is the same but for rounding.
    plain, _ = train(config, "plain")
    first, expected = rows(run)[0], rows(plain)[0]
    assert first["perf/samples_streamed"] > 0 == expected["perf/samples_streamed"]
    for name in ("actor/grad_norm", "actor/entropy", "tokens/trained", "critic/rewards/mean"):
        assert first[name] == pytest.approx(expected[name], rel=1e-5), name
    assert first["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-5, abs=1e-6)
