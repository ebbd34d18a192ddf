"""A pipeline over a slow link, with everything real but the work: 4 processes, each a stage, whose
F, I and W are sleeps of 20 ms, and 12 micro-batches a step.

The executor, the choosers and the host links are those of a run. Both directions of the link
between the first two stages take so many milliseconds more, put on by `InjectedSender`:

    blocking     zero-bubble's order; a stage waits until its message has crossed
    zero-bubble  the same order; messages wait by themselves
    ready        what is ready next, as the run does it

    closed, open the same step, without a delay, in portions of two micro-batches, each given to all
                 stages once all have taken the one before: as sweeps of their own, or as one

Every arm takes a step in turn. Measured is a step's time on the stage that took longest, against
the same choosers in virtual time. Then the link turns slow between two steps of `ready`: the first
step after it against the later ones. Exit code 1 if a ratio misses its mark.

    python benchmarks/pipeline_emulated.py [--steps 5]          # 3 minutes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import write_result
from torch import Tensor

from rollpacker.pipeline.plan.choosers import Chooser, FixedOrder, Op
from rollpacker.pipeline.plan.plan import plan_zero_bubble, ready_choosers
from rollpacker.pipeline.plan.virtual_time import Timeline, replay, run
from rollpacker.pipeline.plan.work import Link, Load, Work, constant
from rollpacker.pipeline.stages.connect import Connected
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.orders import Ready, SweepChooser
from rollpacker.trainer.trainer import PipelineConfig
from tests.trainer.pipeline.injected import Delay, InjectedSender

NUM_STAGES = 4
NUM_MICRO_BATCHES = 12
OP_S = 0.02
DELAYS_S = (0.0, 0.02, 0.04, 0.06)
ARMS = ("blocking", "zero-bubble", "ready")
STREAMED_ARMS = ("closed", "open")
PORTION = 2
"""Micro-batches."""
MESSAGE_ELEMENTS = 1 << 14
LOAD = Load(tokens=1)
START_S = 60.0


def work_of(count: int) -> Work:
    seconds = [OP_S] * NUM_STAGES
    return Work.even(count, f_s=seconds, i_s=seconds, w_s=seconds)


WORK = work_of(NUM_MICRO_BATCHES)


class Sleeps:
    """Ops that take their time and nothing else."""

    def __init__(self) -> None:
        self._message = torch.zeros(MESSAGE_ELEMENTS)

    def forward(self, micro_batch: int, arrived: Tensor | None) -> Tensor:
        time.sleep(OP_S)
        return self._message

    def backward(self, micro_batch: int, arrived: Tensor | None) -> Tensor:
        time.sleep(OP_S)
        return self._message

    def weights(self, micro_batch: int) -> None:
        time.sleep(OP_S)


def chooser(arm: str, stage: int) -> Chooser:
    if arm == "ready":
        return ready_choosers(NUM_STAGES)[stage]
    return FixedOrder(plan_zero_bubble(WORK)[stage])


def predicted_s(arm: str, delay_s: float) -> float:
    """By the same choosers in virtual time."""
    links = constant([Link(latency_s=delay_s), *[Link()] * (NUM_STAGES - 2)])
    if arm == "ready":
        return run(ready_choosers(NUM_STAGES), WORK, links).makespan_s
    sends = "paired" if arm == "blocking" else "free"
    return replay(plan_zero_bubble(WORK), WORK, links, sends=sends).makespan_s


def run_chooser(stage: int) -> SweepChooser:
    """As a run has it, with its cap on live tokens."""
    return Ready(Place(index=stage, count=NUM_STAGES), PipelineConfig(stages=NUM_STAGES))


def predicted_streamed_s(arm: str) -> float:
    """Closed, a portion comes when the one before is over; open, when all stages have done the
    forwards of the one before that."""

    def swept(added_s: list[float]) -> Timeline:
        choosers = [run_chooser(stage) for stage in range(NUM_STAGES)]
        for one in choosers:
            one.add([LOAD] * len(added_s))
        links = constant([Link()] * (NUM_STAGES - 1))
        return run(choosers, work_of(len(added_s)), links, added_s=added_s)

    if arm == "closed":
        return swept([0.0] * PORTION).makespan_s * NUM_MICRO_BATCHES / PORTION
    added_s = [0.0] * 2 * PORTION
    while len(added_s) < NUM_MICRO_BATCHES:
        awaited = Op("F", len(added_s) - PORTION - 1)
        spans = [span for of_stage in swept(added_s).spans for span in of_stage]
        at_s = max(span.end_s for span in spans if span.op == awaited)
        added_s += [at_s] * PORTION
    return swept(added_s).makespan_s


class StageRun:
    """One stage's part of the steps."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._connected = Connected(
            [list(range(NUM_STAGES))], kind="host", device=torch.device("cpu"), timeout_s=START_S
        )
        self._executor = self._connected.executor
        to_next, to_previous = self._connected.to_next, self._connected.to_previous
        self._slow: InjectedSender | None = None
        if stage == 0:
            assert to_next is not None
            self._slow = InjectedSender(to_next, Delay())
            self._executor.connect(self._slow, to_previous)
        elif stage == 1:
            assert to_previous is not None
            self._slow = InjectedSender(to_previous, Delay())
            self._executor.connect(to_next, self._slow)

    def step_s(self, arm: str, delay_s: float) -> float:
        """Of the stage that took longest."""
        if self._slow is not None:
            self._slow.delay = Delay(latency_s=delay_s)
            self._slow.is_blocking = arm == "blocking"
        planned = chooser(arm, self._stage)
        dist.barrier()
        started = time.perf_counter()
        self._executor.sweep([LOAD] * NUM_MICRO_BATCHES, Sleeps(), planned)
        return longest_s(started)

    def streamed_step_s(self, arm: str) -> float:
        """The same, of a step that comes in portions."""
        if self._slow is not None:
            self._slow.delay = Delay()
            self._slow.is_blocking = False
        portions = [[LOAD] * PORTION] * (NUM_MICRO_BATCHES // PORTION)
        dist.barrier()
        started = time.perf_counter()
        if arm == "closed":
            for loads in portions:
                planned = run_chooser(self._stage)
                planned.add(loads)
                self._executor.sweep(loads, Sleeps(), planned)
                dist.barrier()
        else:
            sweep = self._executor.open(Sleeps(), run_chooser(self._stage))
            for loads in portions:
                sweep.add(loads)
                dist.barrier()
            sweep.drain()
        return longest_s(started)

    def close(self) -> None:
        dist.barrier()
        if self._slow is not None:
            self._slow.close()
        self._connected.close()


def longest_s(started_s: float) -> float:
    """Since then, of the stage that took longest."""
    own = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.item()


def stage_process(stage: int, port: int, num_steps: int, output: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=stage, world_size=NUM_STAGES)
    own = StageRun(stage)
    own.step_s("ready", 0.0)
    steps: dict[str, list[float]] = {}
    for _ in range(num_steps):
        for delay_s in DELAYS_S:
            for arm in ARMS:
                steps.setdefault(f"{arm} {delay_s}", []).append(own.step_s(arm, delay_s))
        for arm in STREAMED_ARMS:
            steps.setdefault(arm, []).append(own.streamed_step_s(arm))
    turned = []
    for _ in range(num_steps):
        own.step_s("ready", 0.0)
        turned.append([own.step_s("ready", DELAYS_S[-1]) for _ in range(4)])
    own.close()
    if stage == 0:
        output.write_text(json.dumps({"steps": steps, "turned": turned}))
    dist.destroy_process_group()


def measured(num_steps: int) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        processes = [
            context.Process(target=stage_process, args=(stage, store.port, num_steps, output))
            for stage in range(NUM_STAGES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a stage failed; its messages stand above")
        return json.loads(output.read_text())  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=5, help="of each arm at each delay")
    found = measured(parser.parse_args().steps)
    rows = []
    median: dict[tuple[str, float], float] = {}
    arms = [
        (arm, delay_s, f"{arm} {delay_s}", predicted_s(arm, delay_s))
        for delay_s in DELAYS_S
        for arm in ARMS
    ]
    arms += [(arm, 0.0, arm, predicted_streamed_s(arm)) for arm in STREAMED_ARMS]
    for arm, delay_s, steps, expected in arms:
        seconds = statistics.median(found["steps"][steps])
        median[arm, delay_s] = seconds
        rows.append(
            {
                "arm": arm,
                "delay_ms": delay_s * 1e3,
                "step_ms": round(seconds * 1e3, 1),
                "predicted_ms": round(expected * 1e3, 1),
                "over_predicted": round(seconds / expected, 4),
            }
        )
        print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ")
    worst = DELAYS_S[-1]
    first = statistics.median(steps[0] for steps in found["turned"])
    later = statistics.median(one for steps in found["turned"] for one in steps[1:])
    marks = {
        "over_blocking": (median["blocking", worst] / median["ready", worst], 1.9, None),
        "over_zero_bubble": (median["zero-bubble", worst] / median["ready", worst], 1.12, None),
        "slower_than_at_20_ms": (median["ready", worst] / median["ready", 0.02], None, 1.10),
        "open_over_closed": (median["closed", 0.0] / median["open", 0.0], 1.5, None),
        "first_slow_step_over_later": (first / later, None, 1.10),
        "worst_over_predicted": (max(row["over_predicted"] for row in rows), None, 1.05),
    }
    failed = False
    for name, (value, least, most) in marks.items():
        holds = (least is None or value >= least) and (most is None or value <= most)
        failed |= not holds
        bound = f">= {least}" if least is not None else f"<= {most}"
        print(f"{name} {value:.3f} ({bound}{'' if holds else ': missed'})")
    write_result(
        "pipeline_emulated",
        {
            "op_ms": OP_S * 1e3,
            "micro_batches": NUM_MICRO_BATCHES,
            "stages": NUM_STAGES,
            "medians": rows,
            "ratios": {name: round(value, 4) for name, (value, _, _) in marks.items()},
            "steps": found["steps"],
            "turned_slow": found["turned"],
        },
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
