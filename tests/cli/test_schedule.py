"""`rollpacker plan SCENARIO --csv FILE`: a schedule that torch takes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import schedules

from rollpacker.cli.main import main
from rollpacker.pipeline.plan.order import orders_from_csv

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
STAGED = str(ROOT / "configs/scenarios/pipeline-14b.yaml")
FOUR = (
    *("train.pipeline.op_times=null", "train.pipeline.stages=4", "train.pipeline.micro_batches=6"),
    "train.pipeline.slow_links_s={1: 0.5}",
)


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.mark.parametrize("order", ["1f1b", "zero-bubble", "adapted", "ready"])
def test_torch_takes_what_is_written(order, tmp_path, capsys):
    """Loads it, finds every send a receive, and none that waits for ever."""
    path = tmp_path / "plan.csv"
    assert plan(STAGED, *FOUR, f"train.pipeline.order={order}", "--csv", str(path)) == 0
    out, err = capsys.readouterr()
    assert "4 stages, 6 micro-batches" in out and order in out and not err
    text = path.read_text()
    assert len(orders_from_csv(text, num_stages=4, num_micro_batches=6)) == 4
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row.split(",")]
        for rank, row in enumerate(text.splitlines())
    }
    schedules._validate_schedule(actions, 4, 4, 6)
    sent = schedules._add_send_recv(actions, stage_to_rank=lambda stage: stage, num_stages=4)
    assert {rank: len(row) for rank, row in sent.items()} == {0: 30, 1: 42, 2: 42, 3: 30}


def test_json_tells_where_it_is(tmp_path, capsys):
    path = tmp_path / "plan.csv"
    assert plan(STAGED, "--csv", str(path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["csv"] == str(path) and told["stages"] == 8 and told["micro_batches"] == 24
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((str(ROOT / "configs/scenarios/7b-8k.yaml"), "--csv", "plan.csv"), "no train.pipeline"),
        ((STAGED, "--csv", "plan.txt"), "must end in .csv"),
        ((STAGED, "--csv", "nowhere/plan.csv"), "no folder nowhere"),
        ((STAGED, "--csv", "plan.csv", "--max-shift", "0.1"), "--max-shift exclude"),
        (("runs/quickstart", "--csv", "plan.csv"), "needs a scenario"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(
    arguments, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert plan(*arguments) == 2
    err = capsys.readouterr().err
    assert reason in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
