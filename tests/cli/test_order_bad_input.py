"""A `train.pipeline.order` that cannot be, as the user of `rollpacker train` sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.pipeline.plan.order import orders_to_csv
from rollpacker.pipeline.plan.plan import plan_1f1b
from tests.cli.test_bad_input import Command, command
from tests.cli.test_stages_bad_input import TWO, model, no_processes

__all__ = ["command", "model", "no_processes"]
GOOD = orders_to_csv(plan_1f1b(2, 3))
STREAMED = "stream_trainer.enabled=true"
REFUSED = {
    "missing op": (GOOD.replace(",1W1", ""), (), "stage 1, op 7 (1W2): 1W1 is missing"),
    "stages": (orders_to_csv(plan_1f1b(3, 3)), (), "the plan has 3 stages, but there are 2"),
    "deadlock": (
        "0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n",
        (),
        "the plan deadlocks: stage 0 at op 1 (0I0)",
    ),
    "no plan": ("what is this\n", (), "line 1, cell 1 (what is this): a cell is a stage"),
    "empty": ("", (), "the plan has 0 stages"),
    "no file": (None, (), "No such file or directory"),
    "streaming": (GOOD, (STREAMED,), "stream_trainer.enabled begins with some of them"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("option", ["", "--dry-run"])
def test_a_file_that_is_no_plan_is_refused_before_anything_starts(
    command: Command, no_processes: None, tmp_path: Path, case: str, option: str
):
    text, overrides, why = REFUSED[case]
    path = tmp_path / "plan.csv"
    if text is not None:
        path.write_text(text)
    error = command.refused(
        *TWO, f"train.pipeline.order={path}", *overrides, *filter(None, [option])
    )
    assert f"train.pipeline.order={path}" in error and why in error, error
    assert error.count("\n") == 1


def test_an_order_of_another_name_is_refused(command: Command, no_processes: None):
    error = command.refused(*TWO, "train.pipeline.order=gpipe")
    assert 'order=gpipe) is "gpipe". Known: 1f1b, zero-bubble, adapted, ready, or the' in error


def test_a_file_of_another_size_is_refused_by_the_first_sweep(command: Command, tmp_path: Path):
    """It says how many micro-batches there are, and what that is up to."""
    path = tmp_path / "plan.csv"
    path.write_text(GOOD)
    order = f"train.pipeline.order={path}"
    assert command.train(*TWO, "train.micro_batch_tokens=1", order) == 2
    assert f"{order} is a plan for 3 micro-batches, and a sweep has" in command.err
    assert "train.micro_batch_tokens" in command.err and "order=ready" in command.err
