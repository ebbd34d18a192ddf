"""Pipelines that tests plan and watch: small sweeps with proven optima, and slow parts to be found.

The optima in `pipeline_optima.json` were proven by the CP-SAT solver of OR-Tools, once: instances
have 2 to 4 stages and 2 to 8 micro-batches, with ops of unequal length, links of unequal latency
and rate, and in a third of them a cap on live tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollpacker.core.packs import plan_packs
from rollpacker.pipeline.plan.choosers import KINDS
from rollpacker.pipeline.plan.plan import plan_adapted
from rollpacker.pipeline.plan.virtual_time import replay
from rollpacker.pipeline.plan.watch import PipelineWatch, SweepTimes
from rollpacker.pipeline.plan.work import Link, Load, OpCost, StageCost, Work, constant

SEED = 16
OPTIMA = Path(__file__).with_name("pipeline_optima.json")


def instance(number: int) -> dict[str, Any]:
    """Of whole milliseconds, so that the solver's answer is exact; `bytes` are milliseconds too,
    over links of one byte a millisecond."""
    rng = random.Random(SEED * 100_003 + number)
    stages, batches = rng.randint(2, 4), rng.randint(2, 8)
    sizes = [rng.randint(10, 40) for _ in range(batches)]
    speeds = {kind: [rng.uniform(0.5, 1.5) for _ in range(stages)] for kind in "FIW"}
    times = {
        kind: [[max(round(speeds[kind][s] * size), 1) for size in sizes] for s in range(stages)]
        for kind in "FIW"
    }
    capped = number % 3 == 0
    room = [rng.randint(1, batches) for _ in range(stages)]
    latency = [rng.choice((0, rng.randint(0, 20), rng.randint(0, 80))) for _ in range(stages - 1)]
    return {
        **times,
        "tokens": sizes,
        "latency": latency,
        "message": [rng.randint(0, 15) if number % 2 else 0] * batches,
        "caps": [
            max(max(sizes), sum(sorted(sizes)[: room[s]])) if capped else None
            for s in range(stages)
        ],
    }


def digest(case: dict[str, Any]) -> str:
    """By which an instance is known to be the one whose optimum was proven."""
    return hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]


def kept_optima() -> list[tuple[dict[str, Any], int]]:
    """Instances and their optima, in milliseconds, from the file."""
    rows = json.loads(OPTIMA.read_text())["optima"]
    cases = [instance(row["instance"]) for row in rows]
    for case, row in zip(cases, rows, strict=True):
        assert digest(case) == row["digest"], f"instance {row['instance']} is another one here"
    return [(case, row["optimum"]) for case, row in zip(cases, rows, strict=True)]


def case_work(case: dict[str, Any]) -> tuple[Work, list[Link]]:
    """An instance, whose milliseconds are this sweep's seconds."""
    table = {kind: tuple(tuple(map(float, row)) for row in case[kind]) for kind in KINDS}
    work = Work(
        f_s=table["F"],
        i_s=table["I"],
        w_s=table["W"],
        tokens=tuple(case["tokens"]),
        message_bytes=tuple(case["message"]),
    )
    return work, [Link(float(latency), 1.0) for latency in case["latency"]]


def planned_ms(case: dict[str, Any]) -> float:
    """The makespan of `adapted`'s plan."""
    work, links = case_work(case)
    orders = plan_adapted(work, links, caps=case["caps"])
    return replay(orders, work, constant(links)).makespan_s


def _workloads() -> list[dict[str, Any]]:
    """Stages, samples, lengths (median and spread of a lognormal, cut), fixed milliseconds of an
    op, milliseconds of each link."""
    names = ("stages", "samples", "median", "sigma", "longest", "fixed_ms", "link_ms")
    rows = [
        (2, 64, 500, 0.5, 2048, 1.0, 0.0),
        (2, 256, 500, 1.0, 4096, 1.0, 1.0),
        (2, 32, 2000, 0.8, 8192, 4.0, 5.0),
        (4, 128, 1000, 0.9, 8192, 1.0, 1.0),
        (4, 512, 300, 0.6, 2048, 3.0, 1.0),
        (4, 64, 3000, 0.7, 16384, 1.0, 20.0),
        (4, 128, 1000, 0.9, 8192, 10.0, 5.0),
        (8, 256, 1500, 0.8, 8192, 1.0, 1.0),
        (8, 512, 400, 0.7, 4096, 2.0, 10.0),
        (8, 128, 3000, 1.0, 16384, 5.0, 5.0),
    ]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _lengths(rng: random.Random, row: dict[str, Any]) -> list[int]:
    return [
        max(min(round(row["median"] * rng.lognormvariate(0, row["sigma"])), row["longest"]), 16)
        for _ in range(row["samples"])
    ]


def _loads(lengths: Sequence[int], tokens: int) -> list[Load]:
    packs = plan_packs(lengths, tokens)
    rows = [[lengths[place] for place in pack] for pack in packs]
    return [Load.of(pack, round(0.8 * sum(pack))) for pack in rows]


def _stage_costs(rng: random.Random, stages: int, fixed_s: float) -> list[StageCost]:
    """About 8 us a token and op; the last stage has an output layer."""
    costs = []
    for stage in range(stages):
        unit = 8e-6 * rng.uniform(0.9, 1.1)
        head = 1.5e-6 if stage == stages - 1 else 0.0
        f, i, w = (
            OpCost(
                fixed_s=fixed_s, per_token_s=unit * part, per_pair_s=unit * part * pairs / 24_000,
                per_target_s=head,
            )
            for part, pairs in ((1.0, 1.0), (1.1, 2.0), (0.9, 0.0))
        )  # fmt: skip
        costs.append(StageCost(f, i, w))
    return costs


class WatchedPipeline:
    """Steps of a simulated run: RL's heavy-tailed lengths, times that are off by 30 %, a clock of
    its own on every stage."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.stages = rng.choice((2, 4, 8))
        self.row = {
            "samples": rng.choice((32, 64, 128)),
            "median": rng.choice((300, 1000)),
            "sigma": 0.9,
            "longest": 8192,
        }
        self.budget = rng.choice((2048, 4096))
        self.costs = _stage_costs(rng, self.stages, 1e-3)
        self.links = [
            Link(rng.uniform(1e-4, 2e-3), rng.choice((1e9, 5e9))) for _ in range(self.stages - 1)
        ]
        self.slow_stage: tuple[int, float] | None = None
        """Which, and how many times longer it takes."""
        self.slow_link: tuple[int, Link] | None = None
        self._clocks = [rng.uniform(-5.0, 5.0) for _ in range(self.stages)]

    def typical_s(self) -> float:
        """F, I and W of a full micro-batch on the first stage."""
        load = Load.of([1024] * (self.budget // 1024))
        return sum(self.costs[0].of(kind)(load) for kind in KINDS)

    def step(self) -> SweepTimes:
        loads = _loads(_lengths(self.rng, self.row), self.budget)
        ops, down, up = [], [], []
        for stage, cost in enumerate(self.costs):
            slow = self.slow_stage
            factor = slow[1] if slow is not None and slow[0] == stage else 1.0
            ops.append(
                {
                    kind: [(load, factor * cost.of(kind)(load) * self._jitter()) for load in loads]
                    for kind in KINDS
                }
            )
        for number, usual in enumerate(self.links):
            slow_link = self.slow_link
            slowed = slow_link is not None and slow_link[0] == number
            link = slow_link[1] if slow_link is not None and slowed else usual
            ahead = self._clocks[number + 1] - self._clocks[number]
            sizes = [load.tokens * 8192 for load in loads]
            down.append([(size, link.seconds(size) * self._jitter() + ahead) for size in sizes])
            up.append([(size, link.seconds(size) * self._jitter() - ahead) for size in sizes])
        return SweepTimes(ops=ops, down=down, up=up)

    def _jitter(self) -> float:
        return self.rng.lognormvariate(0.0, 0.3)


def episode(seed: int) -> tuple[str, str, int | None]:
    """What was slow, what the watch said in the end (`+` where it named several), and after how
    many steps. Five to fifteen healthy steps, then six of something."""
    pipeline = WatchedPipeline(seed)
    rng = pipeline.rng
    watch = PipelineWatch(pipeline.stages)
    for _ in range(rng.randint(5, 15)):
        watch.observe(pipeline.step())
    what = rng.choice(("nothing", "stage", "link latency", "link rate"))
    truth = "nothing"
    if what == "stage":
        number = rng.randrange(pipeline.stages)
        pipeline.slow_stage = (number, rng.uniform(1.5, 3.0))
        truth = f"stage {number}"
    elif what != "nothing":
        number = rng.randrange(pipeline.stages - 1)
        usual, extra_s = pipeline.links[number], rng.uniform(0.25, 1.5) * pipeline.typical_s()
        rate = 1 / (1 / usual.bytes_per_s + extra_s / (pipeline.budget * 8192))
        pipeline.slow_link = (
            (number, Link(usual.latency_s + extra_s, usual.bytes_per_s))
            if what == "link latency"
            else (number, Link(usual.latency_s, rate))
        )
        truth = f"link {number}"
    named_after = None
    for number in range(1, 7):
        if watch.observe(pipeline.step()) and named_after is None:
            named_after = number
    named = [f"stage {n}" for n in watch.slow_stages] + [f"link {n}" for n in watch.slow_links]
    return truth, "+".join(named) or "nothing", named_after
