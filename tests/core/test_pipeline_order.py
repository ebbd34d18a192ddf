"""Orders of a pipeline that cannot be run, and torch's file of them."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    _Action,
    _PipelineScheduleRuntime,
)

from rollpacker.pipeline.plan.order import check_orders, orders_from_csv, orders_to_csv
from rollpacker.pipeline.plan.plan import (
    plan_1f1b,
    plan_adapted,
    plan_zero_bubble,
    ready_choosers,
)
from rollpacker.pipeline.plan.virtual_time import run
from rollpacker.pipeline.plan.work import Link, Work, constant


def random_case(rng: random.Random) -> tuple[Work, list[Link]]:
    stages, count = rng.randint(1, 6), rng.randint(1, 12)

    def table():
        return tuple(tuple(rng.uniform(1, 30) for _ in range(count)) for _ in range(stages))

    work = Work(f_s=table(), i_s=table(), w_s=table(), tokens=(1,) * count,
                message_bytes=(0,) * count)  # fmt: skip
    return work, [Link(rng.choice((0.0, rng.uniform(0, 100)))) for _ in range(stages - 1)]


def _simulated(action: _Action) -> bool:
    return action.computation_type not in (UNSHARD, RESHARD, REDUCE_GRAD)


def test_torch_accepts_a_hundred_plans(tmp_path, monkeypatch) -> None:
    torch.set_num_threads(1)
    rng = random.Random(5)
    path = tmp_path / "plan.csv"
    # A schedule of torch wants a process group; only its size is read.
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    for number in range(100):
        work, links = random_case(rng)
        stages, count = work.num_stages, work.num_micro_batches
        orders = [
            lambda s=stages, n=count: plan_1f1b(s, n),
            lambda w=work: plan_zero_bubble(w),
            lambda w=work, ls=links: plan_adapted(w, ls, search_ops=500),
            lambda w=work, ls=links: list(
                run(ready_choosers(w.num_stages), w, constant(ls)).orders
            ),
        ][number % 4]()
        path.write_text(orders_to_csv(orders))
        monkeypatch.setattr(dist, "get_world_size", lambda group=None, size=stages: size)
        stage = PipelineStage(torch.nn.Identity(), 0, stages, torch.device("cpu"))
        schedule = _PipelineScheduleRuntime([stage], n_microbatches=count)
        schedule._load_csv(str(path))
        # Loading adds actions that torch's simulator does not know.
        for actions in schedule.pipeline_order_with_comms.values():
            actions[:] = [action for action in actions if _simulated(action)]
        simulated = schedule._simulate()
        for rank, order in enumerate(orders):
            ran = [str(action) for action in simulated[rank] if action is not None]
            ours = {f"{rank}{op}" for op in order}
            assert [cell for cell in ran if cell in ours] == [f"{rank}{op}" for op in order]
        text = path.read_text()
        assert orders_from_csv(text, num_stages=stages, num_micro_batches=count) == orders


GOOD = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


def test_empty_cells_are_waits_and_b_is_both_backwards() -> None:
    written = "0F0,0F1,,0B0,,0B1\n\n,1F0,1B0,1F1, 1I1 ,1W1\n"
    assert orders_from_csv(written, num_stages=2, num_micro_batches=2) == orders_from_csv(
        GOOD, num_stages=2, num_micro_batches=2
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0I1,", "", r"stage 0, op 4 \(0W1\): comes before 0I1"),
        (",1W1", "", "stage 1: 1W1 is missing"),
        ("0F0,0F1", "0F1,0F0", r"stage 0, op 0 \(0F1\): 0F0 is missing or comes later"),
        ("0F0,", "0F0,0F0,", r"stage 0, op 1 \(0F0\): the stage has run it before"),
        ("1F0,1I0", "1I0,1F0", r"stage 1, op 0 \(1I0\): comes before 1F0"),
        ("0F0,", "0F0,0F7,", r"stage 0, op 1 \(0F7\): the plan is of another size, there are 2"),
        ("1F0,", "0F0,", r"line 2, cell 1 \(0F0\): line 2 is that of stage 1"),
        ("1F0,", "1SEND_F0,", r"line 2, cell 1 \(1SEND_F0\): a cell is a stage"),
        ("1F0,", "F0,", r"line 2, cell 1 \(F0\): a cell is a stage"),
        ("\n1F0", "\n2F0\n1F0", "line 2, cell 1"),
    ],
)
def test_a_broken_file_is_refused_by_its_place(old: str, new: str, message: str) -> None:
    assert GOOD.replace(old, new, 1) != GOOD
    with pytest.raises(ValueError, match=message):
        orders_from_csv(GOOD.replace(old, new, 1), num_stages=2, num_micro_batches=2)


def test_a_file_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="the plan has 2 stages, but there are 3"):
        orders_from_csv(GOOD, num_stages=3, num_micro_batches=2)
    with pytest.raises(ValueError, match="0F2 is missing"):
        orders_from_csv(GOOD, num_stages=2, num_micro_batches=3)
    with pytest.raises(ValueError, match="another size"):
        orders_from_csv(GOOD, num_stages=2, num_micro_batches=1)


def test_a_deadlock_is_named() -> None:
    # Stage 0 wants the gradient of 0 before it sends 1, which stage 1 wants first.
    text = "0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n"
    with pytest.raises(ValueError, match=r"deadlocks: stage 0 at op 1 \(0I0\), stage 1 at op 1"):
        orders_from_csv(text, num_stages=2, num_micro_batches=2)


def test_a_plan_above_the_cap_is_refused() -> None:
    orders = orders_from_csv(GOOD, num_stages=2, num_micro_batches=2)
    sizes = {"num_stages": 2, "num_micro_batches": 2, "tokens": [4, 3]}
    check_orders(orders, **sizes, caps=[7, 4])
    with pytest.raises(ValueError, match=r"stage 0, op 1 \(0F1\): the plan keeps 7 tokens alive"):
        check_orders(orders, **sizes, caps=[6, 4])
