"""The closed form of a group's period against its turns, event by event, on random groups.

    python benchmarks/coexecution_period.py          # 20,000 groups, about 1 minute

One to five jobs on one to five rollout nodes, with switches, stages outside of the pools, and jobs
that span several nodes. Where the closed form is claimed (`closed_form_holds`) it must be exact;
elsewhere the largest cycle mean must, and the closed form is a lower bound.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from machine import write_result

from rollpacker.cluster.decide.forecast import GroupTimeline
from rollpacker.cluster.decide.group import (
    Holds,
    closed_form_holds,
    closed_period_s,
    cycle_s,
    load_s,
    period_s,
)

MAX_ITERATIONS = 4000
MAX_CYCLICITY = 12
Group = tuple[list[Holds], list[frozenset[object]]]


def random_group(seed: int) -> Group:
    """The same for a seed. A third has jobs on one node each, a third spans equal or separate sets
    of nodes, a third spans as it comes."""
    rng = random.Random(f"group/{seed}")
    jobs, nodes = rng.randint(1, 5), rng.randint(1, 5)
    largest = rng.choice((1.0, 2.0, 5.0))
    holds = [
        Holds(
            rng.uniform(10, 600) * rng.uniform(1, largest),
            rng.choice((0.0, rng.uniform(0, 60))),
            rng.uniform(10, 600) * rng.uniform(1, largest),
            rng.choice((0.0, rng.uniform(0, 60))),
        )
        for _ in range(jobs)
    ]
    kind = seed % 3
    if kind == 0:
        pins = [frozenset[object]({rng.randrange(nodes)}) for _ in range(jobs)]
    elif kind == 1:
        cuts = sorted(rng.sample(range(1, nodes), rng.randint(0, nodes - 1))) if nodes > 1 else []
        blocks = [
            frozenset[object](range(a, b)) for a, b in zip([0, *cuts], [*cuts, nodes], strict=True)
        ]
        pins = [rng.choice(blocks) for _ in range(jobs)]
    else:
        pins = [
            frozenset[object](rng.sample(range(nodes), rng.randint(1, nodes))) for _ in range(jobs)
        ]
    # Turns have jobs of more nodes first; equal ones as they joined.
    order = sorted(range(jobs), key=lambda k: -len(pins[k]))
    return [holds[k] for k in order], [pins[k] for k in order]


def period_by_events(holds: list[Holds], pins: list[frozenset[object]]) -> float:
    """Once begins of rollouts and ends of trainings repeat. Both are looked at: a training pool
    that is a little too slow shows in the rollouts only once the lead that they begin with is used
    up."""
    timeline = GroupTimeline([sorted(p) for p in pins], lambda job, _: holds[job])  # type: ignore[type-var]
    for target in (60, 240, 1000, MAX_ITERATIONS):
        timeline.run_until(target)
        for turns in range(1, MAX_CYCLICITY + 1):
            window = 2 * MAX_CYCLICITY
            steps = [
                (times[at] - times[at - turns]) / turns
                for times in (*timeline.begins_s, *timeline.ends_s)
                for at in range(target - window - 1, target - 1)
            ]
            if max(steps) - min(steps) <= 1e-11 * max(steps):
                return steps[0]
    raise AssertionError("the turns do not repeat")


def compare(seed: int) -> dict[str, Any]:
    """One group: relative errors against its events."""
    holds, pins = random_group(seed)
    seen_s = period_by_events(holds, pins)
    closed_s = closed_period_s(holds, pins)
    return {
        "claimed": closed_form_holds(holds, pins),
        "spans": any(len(pinned) > 1 for pinned in pins),
        "saturated": load_s(holds, pins) >= cycle_s(holds),
        "closed_error": (closed_s - seen_s) / seen_s,
        "cycle_mean_error": abs(period_s(holds, pins) - seen_s) / seen_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=20_000)
    args = parser.parse_args()
    began = time.monotonic()
    rows = [compare(seed) for seed in range(args.groups)]
    claimed = [row for row in rows if row["claimed"]]
    crosswise = [row for row in rows if not row["claimed"]]
    payload = {
        "groups": len(rows),
        "seconds": round(time.monotonic() - began, 1),
        "claimed": {
            "groups": len(claimed),
            "that_span_nodes": sum(row["spans"] for row in claimed),
            "over_saturated": sum(row["saturated"] for row in claimed),
            "largest_error": max(abs(row["closed_error"]) for row in claimed),
        },
        "not_claimed": {
            "groups": len(crosswise),
            "largest_error_of_cycle_mean": max(row["cycle_mean_error"] for row in crosswise),
            "closed_form_short_by_more_than_1e-9": sum(
                row["closed_error"] < -1e-9 for row in crosswise
            ),
            "closed_form_above_by_more_than_1e-9": sum(
                row["closed_error"] > 1e-9 for row in crosswise
            ),
            "closed_form_most_short": -min(row["closed_error"] for row in crosswise),
        },
    }
    assert payload["claimed"]["largest_error"] <= 1e-9, payload  # type: ignore[index]
    assert payload["not_claimed"]["largest_error_of_cycle_mean"] <= 1e-9, payload  # type: ignore[index]
    print(payload)
    write_result("coexecution_period", payload)


if __name__ == "__main__":
    main()
