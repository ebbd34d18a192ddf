"""The pipeline's planner, chooser, budget and watch, each against what it is measured by.

    optimum   200 small sweeps: the planned makespan over the proven optimum (`pipeline_optimum.py`)
    speed     milliseconds of a plan for 16 stages and 64 micro-batches, microseconds of a choice
    dynamic   link delays redrawn every 50 to 400 ms: `ready`, which knows none, against the same
              rule with hindsight (the better of it with quotas for the step's true mean or greatest
              delays, and without), against a plan from the last step's median delays, and
              against the rule with quotas from those
    budget    the budget chosen from measured ops against the best of five fixed ones, ten workloads
    watch     1,000 episodes of a slow link, a slow stage or nothing, and 10,000 healthy steps

    python benchmarks/pipeline_planner.py [--arms optimum,speed,...]

Everything but `speed` is in virtual time and deterministic; `speed` wants a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from machine import RESULTS, write_result
from pipeline_optimum import kept_optima

from rollpacker.core.packs import plan_packs
from rollpacker.pipeline.plan.choosers import KINDS, ReadyFirst, StageState, adapted_quotas
from rollpacker.pipeline.plan.plan import plan_adapted, plan_zero_bubble, ready_choosers
from rollpacker.pipeline.plan.split import plan_budget
from rollpacker.pipeline.plan.virtual_time import replay, run
from rollpacker.pipeline.plan.watch import PipelineWatch, SweepTimes
from rollpacker.pipeline.plan.work import (
    Link,
    Load,
    OpCost,
    StageCost,
    Work,
    constant,
    fit_stage_cost,
)

# -- against proven optima -------------------------------------------------------------


def case_work(case: dict[str, Any]) -> tuple[Work, list[Link]]:
    """An instance of `pipeline_optimum.py`, whose milliseconds are this sweep's seconds."""
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


def optimum() -> dict[str, Any]:
    cases = kept_optima()
    arms: dict[str, Callable[[dict[str, Any]], float]] = {
        "adapted": planned_ms,
        "ready": _ready_ms,
    }
    report: dict[str, Any] = {"instances": len(cases)}
    for name, makespan in arms.items():
        gaps = sorted(makespan(case) / least - 1 for case, least in cases)
        report[name] = {
            "mean_gap": round(statistics.fmean(gaps), 5),
            "p95_gap": round(gaps[max(round(0.95 * len(gaps)) - 1, 0)], 5),
            "largest_gap": round(gaps[-1], 5),
            "optimal": sum(gap < 1e-9 for gap in gaps),
        }
    return report


def _ready_ms(case: dict[str, Any]) -> float:
    work, links = case_work(case)
    return run(ready_choosers(work.num_stages, caps=case["caps"]), work, constant(links)).makespan_s


# -- speed -----------------------------------------------------------------------------


def speed() -> dict[str, Any]:
    rng = random.Random(1)

    def table() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(rng.uniform(0.005, 0.02) for _ in range(64)) for _ in range(16))

    work = Work(
        f_s=table(), i_s=table(), w_s=table(), tokens=(1,) * 64, message_bytes=(1 << 20,) * 64
    )
    links = [Link(rng.uniform(0, 0.03), 1e9) for _ in range(15)]
    plans, processor = [], []
    for _ in range(15):
        started, busy = time.perf_counter(), time.process_time()
        plan_adapted(work, links)
        plans.append(time.perf_counter() - started)
        processor.append(time.process_time() - busy)
    state = StageState(3, 16)
    state.add([1] * 64)
    for _ in range(20):
        state.arrive("F")
    choosers = {
        "warming up": ReadyFirst(3, quotas=[40] * 16, caps=[None] * 16),
        "capped": ReadyFirst(3, quotas=[1] * 16, caps=[48] * 16),
    }
    choices = {}
    for name, chooser in choosers.items():
        started = time.perf_counter()
        for _ in range(20_000):
            chooser.choose(state)
        choices[name] = round((time.perf_counter() - started) / 20_000 * 1e6, 3)
    return {
        "plan_ms": {
            "median": round(statistics.median(plans) * 1e3, 1),
            "largest": round(max(plans) * 1e3, 1),
            "processor_median": round(statistics.median(processor) * 1e3, 1),
        },
        "choice_us": choices,
    }


# -- delays that change ----------------------------------------------------------------


class _Delays:
    """Of each link, redrawn after 50 to 400 ms: around 30 ms, or mostly none and sometimes 60."""

    def __init__(self, rng: random.Random, num_links: int, kind: str) -> None:
        self._rng = rng
        self._kind = kind
        self._drawn: list[list[tuple[float, float]]] = [[] for _ in range(num_links)]
        """By link: (until, delay), rising."""

    def __call__(self, number: int, now_s: float) -> Link:
        drawn = self._drawn[number]
        while not drawn or drawn[-1][0] <= now_s:
            since = drawn[-1][0] if drawn else 0.0
            drawn.append((since + self._rng.uniform(0.05, 0.4), self._draw()))
        low, high = 0, len(drawn) - 1
        while low < high:
            middle = (low + high) // 2
            if drawn[middle][0] > now_s:
                high = middle
            else:
                low = middle + 1
        return Link(drawn[low][1])

    def _draw(self) -> float:
        if self._kind == "normal":
            return max(self._rng.gauss(0.03, 0.01), 0.0)
        return self._rng.choice((0.0, 0.0, 0.01, 0.06))


DYNAMIC = [(4, 12), (4, 32), (8, 24), (8, 64)]
"""Stages and micro-batches."""


def dynamic() -> dict[str, Any]:
    rows = []
    for index, (stages, count) in enumerate(DYNAMIC):
        for kind, room in itertools.product(("normal", "bursts"), (None, 2 * stages)):
            row = {"stages": stages, "micro_batches": count, "delays": kind, "live": room}
            rows.append(row | _dynamic(stages, count, kind, room, seed=index))
    ratios = [row["ready_over_hindsight"] for row in rows]
    return {
        "rows": rows,
        "largest_ready_over_hindsight": max(ratios),
        "largest_ready_over_last_medians": max(row["ready_over_last_medians"] for row in rows),
    }


def _dynamic(
    stages: int, count: int, kind: str, room: int | None, *, seed: int, steps: int = 20
) -> dict[str, float]:
    """Sums over steps that follow each other without a break. `room`: live micro-batches of a
    stage, as in ZB-H2."""
    caps = [room] * stages
    rng = random.Random(seed * 1009 + len(kind))
    delays = _Delays(rng, stages - 1, kind)
    sums = dict.fromkeys(("ready", "hindsight", "led", "last_medians", "zero_bubble"), 0.0)
    now_s = 0.0
    last: list[Link] = [Link() for _ in range(stages - 1)]
    for _ in range(steps):
        work = _uneven(rng, stages, count)

        def makespan(choosers: Sequence[Any], work: Work = work, now_s: float = now_s) -> float:
            return run(choosers, work, delays, start_s=now_s).makespan_s - now_s

        ready = run(ready_choosers(stages, caps=caps), work, delays, start_s=now_s)
        seen = [
            [m.arrived_s - m.sent_s for m in ready.messages if m.link == link]
            for link in range(stages - 1)
        ]
        ready_s = ready.makespan_s - now_s
        known = [
            adapted_quotas(work.mean_s("F"), work.mean_s("I"), [of(one) for one in seen], count)
            for of in (statistics.fmean, max)
        ]
        hindsight = [makespan(ready_choosers(stages, quotas=quotas, caps=caps)) for quotas in known]
        usual = [link.latency_s for link in last]
        led = adapted_quotas(work.mean_s("F"), work.mean_s("I"), usual, count)
        sums["led"] += makespan(ready_choosers(stages, quotas=led, caps=caps))
        planned = plan_adapted(work, last, caps=caps)
        sums["ready"] += ready_s
        sums["hindsight"] += min(ready_s, *hindsight)
        sums["last_medians"] += replay(planned, work, delays, start_s=now_s).makespan_s - now_s
        zero_bubble = replay(plan_zero_bubble(work, caps=caps), work, delays, start_s=now_s)
        sums["zero_bubble"] += zero_bubble.makespan_s - now_s
        last = [Link(statistics.median(one)) for one in seen]
        now_s += ready_s
    return {
        "ready_s": round(sums["ready"], 3),
        "ready_over_hindsight": round(sums["ready"] / sums["hindsight"], 4),
        "ready_over_last_quotas": round(sums["ready"] / sums["led"], 4),
        "ready_over_last_medians": round(sums["ready"] / sums["last_medians"], 4),
        "ready_over_zero_bubble": round(sums["ready"] / sums["zero_bubble"], 4),
    }


def _uneven(rng: random.Random, stages: int, count: int) -> Work:
    """About 10 ms an op; stages within 10 % of each other, micro-batches within 40 %."""
    sizes = [rng.uniform(0.6, 1.0) for _ in range(count)]
    speeds = [rng.uniform(0.95, 1.05) for _ in range(stages)]
    f, i, w = (
        tuple(tuple(base * speed * size for size in sizes) for speed in speeds)
        for base in (0.009, 0.010, 0.006)
    )
    return Work(f_s=f, i_s=i, w_s=w, tokens=(1,) * count, message_bytes=(0,) * count)


# -- the budget of a micro-batch -------------------------------------------------------

BUDGETS = (2048, 4096, 8192, 16384, 32768)


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


def budget() -> dict[str, Any]:
    rows = [_budget(random.Random(index), row) for index, row in enumerate(_workloads())]
    return {
        "rows": rows,
        "largest_over_best_of_five": max(row["auto_over_best_of_five"] for row in rows),
    }


def _budget(rng: random.Random, row: dict[str, Any], steps: int = 8) -> dict[str, Any]:
    costs = _stage_costs(rng, row["stages"], row["fixed_ms"] / 1e3)
    links = [Link(row["link_ms"] / 1e3, 5e9) for _ in range(row["stages"] - 1)]
    fitted = _measured_costs(rng, costs, row)
    totals = dict.fromkeys((*BUDGETS, "auto"), 0.0)
    chosen = []
    for _ in range(steps):
        lengths = _lengths(rng, row)
        plan = plan_budget(
            lengths, fitted, links, most_tokens=max(BUDGETS), target_share=0.8,
            bytes_per_token=8192,
        )  # fmt: skip
        chosen.append(plan.micro_batch_tokens)
        seed = rng.random()
        for name, tokens in [*((one, one) for one in BUDGETS), ("auto", chosen[-1])]:
            totals[name] += _true_s(random.Random(seed), lengths, tokens, costs, links)
    best = min(BUDGETS, key=totals.__getitem__)
    return row | {
        "chosen_tokens": round(statistics.median(chosen)),
        "best_of_five": best,
        "auto_over_best_of_five": round(totals["auto"] / totals[best], 4),
        "worst_over_best_of_five": round(max(totals[b] for b in BUDGETS) / totals[best], 4),
    }


def _lengths(rng: random.Random, row: dict[str, Any]) -> list[int]:
    return [
        max(min(round(row["median"] * rng.lognormvariate(0, row["sigma"])), row["longest"]), 16)
        for _ in range(row["samples"])
    ]


def _loads(lengths: Sequence[int], tokens: int) -> list[Load]:
    packs = plan_packs(lengths, tokens)
    rows = [[lengths[place] for place in pack] for pack in packs]
    return [Load.of(pack, round(0.8 * sum(pack))) for pack in rows]


def _true_s(
    rng: random.Random, lengths: Sequence[int], tokens: int, costs: Sequence[StageCost],
    links: Sequence[Link],
) -> float:  # fmt: skip
    """Of a sweep whose ops take up to 10 % more or less than their costs say."""
    work = _jittered(rng, Work.of(costs, _loads(lengths, tokens), bytes_per_token=8192), 0.1)
    return run(ready_choosers(len(costs)), work, constant(links)).makespan_s


def _jittered(rng: random.Random, work: Work, share: float) -> Work:
    f, i, w = (
        tuple(tuple(s * rng.uniform(1 - share, 1 + share) for s in row) for row in work.table(kind))
        for kind in KINDS
    )
    return Work(f_s=f, i_s=i, w_s=w, tokens=work.tokens, message_bytes=work.message_bytes)


def _measured_costs(
    rng: random.Random, costs: Sequence[StageCost], row: dict[str, Any]
) -> list[StageCost]:
    """Fitted to four steps at two budgets, measured with 30 % jitter: packs of one budget are all
    about as large, which does not tell what an op costs by itself."""
    loads = [load for tokens in (2048, 8192) * 2 for load in _loads(_lengths(rng, row), tokens)]
    work = _jittered(rng, Work.of(costs, loads), 0.3)
    return [
        fit_stage_cost({kind: (loads, work.table(kind)[stage]) for kind in KINDS})
        for stage in range(len(costs))
    ]


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


# -- told apart ------------------------------------------------------------------------


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


def watch(num_episodes: int = 1000, num_healthy: int = 10_000) -> dict[str, Any]:
    wrong, delays = [], []
    for seed in range(num_episodes):
        truth, named, after = episode(seed)
        if truth != named:
            wrong.append({"seed": seed, "truth": truth, "named": named})
        elif after is not None:
            delays.append(after)
    alarms = 0
    per_run = 500
    for seed in range(num_healthy // per_run):
        pipeline = WatchedPipeline(10_000 + seed)
        watcher = PipelineWatch(pipeline.stages)
        alarms += sum(len(watcher.observe(pipeline.step())) for _ in range(per_run))
    return {
        "episodes": num_episodes,
        "right": round(1 - len(wrong) / num_episodes, 4),
        "wrong": wrong[:20],
        "steps_until_named": {
            "median": statistics.median(delays),
            "largest": max(delays),
        },
        "healthy_steps": num_healthy // per_run * per_run,
        "alarms": alarms,
    }


ARMS = {"optimum": optimum, "speed": speed, "dynamic": dynamic, "budget": budget, "watch": watch}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="of " + ", ".join(ARMS))
    names = parser.parse_args(arguments).arms.split(",")
    found = {}
    for name in names:
        started = time.perf_counter()
        found[name] = ARMS[name]()
        found[name]["seconds"] = round(time.perf_counter() - started, 1)
        print(name, json.dumps(found[name], indent=1), flush=True)
    path = RESULTS / "pipeline_planner.json"
    kept = (json.loads(path.read_text())["arms"] if path.exists() else {}) | found
    write_result("pipeline_planner", {"arms": {name: kept[name] for name in ARMS if name in kept}})


if __name__ == "__main__":
    main()
