"""Proven optima of small pipeline sweeps, by the CP-SAT solver of OR-Tools.

    pip install ortools
    python benchmarks/pipeline_optimum.py            # benchmarks/results/pipeline_optima.json

Optima do not change, so that they are computed once and kept: `pipeline_planner.py` and a test
compare the planner with the file and need no solver. Instances have 2 to 4 stages and 2 to 8
micro-batches, with ops of unequal length, links of unequal latency and rate, and in a third of them
a cap on live tokens. What a sweep may do is what the package's executor does: each kind of op in
the order of the micro-batches on every stage, messages in that order too.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import time
from collections.abc import Sequence
from typing import Any

from machine import RESULTS, write_result

NUM_INSTANCES = 200
SEED = 16


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
    rows = json.loads((RESULTS / "pipeline_optima.json").read_text())["optima"]
    cases = [instance(row["instance"]) for row in rows]
    for case, row in zip(cases, rows, strict=True):
        assert digest(case) == row["digest"], f"instance {row['instance']} is another one here"
    return [(case, row["optimum"]) for case, row in zip(cases, rows, strict=True)]


def optimum(case: dict[str, Any], *, limit_s: float, most_ms: int) -> int | None:
    """The least makespan in milliseconds, which is known to be `most_ms` at most; None where it was
    not proven in time."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    stages, batches = len(case["F"]), len(case["tokens"])
    horizon = most_ms
    end: dict[tuple[str, int, int], Any] = {}
    begin: dict[tuple[str, int, int], Any] = {}
    for s in range(stages):
        intervals = []
        for kind, m in itertools.product("FIW", range(batches)):
            key = (kind, s, m)
            begin[key] = model.new_int_var(0, horizon, f"{key}")
            length = case[kind][s][m]
            end[key] = begin[key] + length
            model.add(end[key] <= horizon)
            intervals.append(model.new_fixed_size_interval_var(begin[key], length, f"i{key}"))
            if m:
                model.add(begin[key] >= end[kind, s, m - 1])
        model.add_no_overlap(intervals)
    for s, m in itertools.product(range(stages), range(batches)):
        model.add(begin["W", s, m] >= end["I", s, m])
        if s == stages - 1:
            model.add(begin["I", s, m] >= end["F", s, m])
    for link, kind in itertools.product(range(stages - 1), "FI"):
        source, target = (link, link + 1) if kind == "F" else (link + 1, link)
        left = None
        for m in range(batches):
            leaves = model.new_int_var(0, horizon, f"{kind}{link}{m}")
            model.add(leaves >= end[kind, source, m] + case["message"][m])
            if left is not None:
                model.add(leaves >= left + case["message"][m])
            model.add(begin[kind, target, m] >= leaves + case["latency"][link])
            left = leaves
    for s, cap in enumerate(case["caps"]):
        if cap is None:
            continue
        # F m may begin once so many W are over that it fits; with both in order, that is one W.
        for m in range(batches):
            total = sum(case["tokens"][: m + 1])
            freed = 0
            for w in range(m):
                if total - freed <= cap:
                    break
                freed += case["tokens"][w]
                if total - freed <= cap:
                    model.add(begin["F", s, m] >= end["W", s, w])
                    break
    makespan = model.new_int_var(0, horizon, "makespan")
    for s in range(stages):
        model.add(makespan >= end["W", s, batches - 1])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    return round(solver.objective_value) if status == cp_model.OPTIMAL else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit-s", type=float, default=30.0, help="of the solver, an instance")
    options = parser.parse_args(arguments)
    from pipeline_planner import planned_ms  # which imports this file

    rows: list[dict[str, Any]] = []
    unproven = 0
    started = time.perf_counter()
    number = 0
    while len(rows) < NUM_INSTANCES:
        case = instance(number)
        best = optimum(case, limit_s=options.limit_s, most_ms=round(planned_ms(case)))
        if best is None:
            unproven += 1
        else:
            rows.append({"instance": number, "optimum": best, "digest": digest(case)})
        number += 1
    write_result(
        "pipeline_optima",
        {
            "unit": "milliseconds",
            "unproven": unproven,
            "seconds": round(time.perf_counter() - started, 1),
            "optima": rows,
        },
    )
    print(
        f"{len(rows)} optima, {unproven} not proven in time -> {RESULTS / 'pipeline_optima.json'}"
    )


if __name__ == "__main__":
    main()
