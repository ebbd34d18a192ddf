"""The simulated pipeline against what is published of ADAPTRA (arXiv 2504.19232; PipeMorph, NSDI
'26), and what it says of measurements that were left aside.

    python benchmarks/pipeline_published.py

Seconds of ops are the authors' profiles; of each model one fixed cost a transport (launches,
optimizer, copies) is fitted to iterations without a delay, and nothing else. `model` holds the
delay law's thresholds and slopes, `compared` what the authors measured with a delay, `predicted`
what nobody here has compared with anything: 30B and 60B, several slow links, delays that change.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab import PUBLISHED, bench

from rollpacker.pipeline.plan.choosers import Op, StageState
from rollpacker.pipeline.plan.plan import plan_zero_bubble, ready_choosers
from rollpacker.pipeline.plan.virtual_time import replay, run
from rollpacker.pipeline.plan.work import Link, Work, constant
from rollpacker.pipeline.sim.machine import op_costs
from rollpacker.pipeline.sim.phase import Pipeline, PipelineMachine
from rollpacker.pipeline.sim.spec import PIPELINES, DrawnDelays, OpTimes, PipelineSpec

HELD = PUBLISHED["pipeline"]
OP_MS, NO_DELAY_MS, SWEEP_MS, SWEEP = (
    HELD[name] for name in ("op_ms", "no_delay_ms", "sweep_ms", "sweep")
)
NAMES = tuple(SWEEP)
SEVERAL: Mapping[str, Sequence[Sequence[int]]] = {
    "7b": ((0, 2), (0, 1, 2)),
    "14b": ((0, 6), (0, 3, 6), (2, 3, 6), tuple(range(7))),
}
HOLDS_S = ((0.05, 0.4), (1.0, 5.0), (10.0, 30.0))
"""How long a drawn delay stays, seconds."""
ITERATIONS = 60


def machine_of(spec: PipelineSpec) -> PipelineMachine:
    return PipelineMachine(
        costs=op_costs(spec),
        layers=(),
        caps=(None,) * spec.stages,
        num_replicas=1,
        stage_gpus=1,
        bytes_per_token=0.0,
    )


def iterations_ms(
    model: str,
    name: str,
    delays_ms: Mapping[int, float],
    *,
    fixed_ms: Mapping[str, float] | None = None,
    drawn: DrawnDelays | None = None,
    num: int = 1,
) -> float:
    """Mean milliseconds of an iteration of this order and these links."""
    f, i, w = (tuple(ms / 1000 for ms in row) for row in OP_MS[model])
    order, links = PIPELINES[name]
    spec = PipelineSpec(
        stages=len(f),
        order=order,
        links=links,
        live_tokens=None,
        micro_batches=3 * len(f),
        op_times=OpTimes(f_s=f, i_s=i, w_s=w),
        slow_links_s={link: ms / 1000 for link, ms in delays_ms.items()},
        drawn_delays=drawn,
        direct_fixed_s=(fixed_ms or {}).get("direct", 0.0) / 1000,
        host_fixed_s=(fixed_ms or {}).get("host", 0.0) / 1000,
    )
    pipeline = Pipeline(spec, machine_of(spec), seed=0)
    now_s, seconds = 0.0, []
    for _ in range(num):
        step = pipeline.train([1] * (3 * len(f)), now_s)
        now_s += step.seconds
        seconds.append(step.sweep_s)
    return 1000 * statistics.fmean(seconds)


def fixed_costs_ms(model: str) -> dict[str, float]:
    """Least squares of the relative errors over the rows without a delay."""
    found = {}
    for links in ("direct", "host"):
        rows = {name: ms for name, ms in NO_DELAY_MS[model].items() if PIPELINES[name][1] == links}
        lacking = {name: ms - iterations_ms(model, name, {}) for name, ms in rows.items()}
        weights = {name: ms**-2 for name, ms in rows.items()}
        total = sum(weights[name] * lacking[name] for name in rows)
        found[links] = round(total / sum(weights.values()), 1)
    return found


# -- the model -----------------------------------------------------------------------------


def dependency_bubbles() -> list[dict[str, float]]:
    """Four stages, twelve micro-batches, ops of 10 ms, a delay before the first link's end."""
    work = Work.even(12, f_s=[0.01] * 4, i_s=[0.01] * 4, w_s=[0.01] * 4)
    orders = plan_zero_bubble(work)
    rows = []
    for delay_ms in (0, 5, 10, 15, 20, 25, 30):
        links = constant([Link(delay_ms / 1000), Link(), Link()])
        fixed = replay(orders, work, links).makespan_s
        ready = run(ready_choosers(4), work, links).makespan_s
        rows.append(
            {
                "delay_ms": delay_ms,
                "zero_bubble_ms": round(1000 * fixed, 3),
                "ready_ms": round(1000 * ready, 3),
            }
        )
    return rows


class KeepsLead:
    """So many forwards more than backwards for inputs, from the first to the last forward: slack
    that stays. Backwards for weights fill what is left at the end."""

    def __init__(self, lead: int) -> None:
        self._lead = lead

    def choose(self, state: StageState) -> Op | None:
        """See `Chooser`."""
        left = state.num_f < len(state.tokens)
        if left and state.num_f < self._lead + state.num_i:
            return state.next_op("F") if state.ready("F") else None
        if state.ready("I"):
            return state.next_op("I")
        return state.next_op("W") if not left and state.ready("W") else None


def delay_law(slack: int, num: int = 420, op_ms: float = 10.0) -> dict[str, float]:
    """Two stages with this slack: from which delay on it cascades, and how fast then."""
    seconds = op_ms / 1000
    work = Work.even(num, f_s=[seconds] * 2, i_s=[seconds] * 2, w_s=[seconds] * 2)
    bears_s = (slack - 1) * seconds
    choosers = [KeepsLead(1 + slack), KeepsLead(1)]
    planned = run(choosers, work, constant([Link(bears_s)]))

    def makespan_ms(delay_ms: float) -> float:
        links = constant([Link(delay_ms / 1000)])
        return 1000 * replay(planned.orders, work, links).makespan_s

    bears_ms = 1000 * bears_s
    base_ms = makespan_ms(0)
    slow = [bears_ms + op_ms, bears_ms + 5 * op_ms]
    slope = (makespan_ms(slow[1]) - makespan_ms(slow[0])) / (slow[1] - slow[0])
    below = (makespan_ms(bears_ms / 2) - base_ms) / (bears_ms / 2)
    meets_ms = (makespan_ms(slow[0]) - slope * slow[0] - base_ms) / (below - slope)
    return {
        "slack": slack,
        "threshold_ms": round(meets_ms, 3),
        "expected_threshold_ms": bears_ms,
        "slope": round(slope, 4),
        "expected_slope": round(2 * num / (slack + 1), 4),
        "slope_below": round(below, 4),
    }


# -- what is published ---------------------------------------------------------------------


def row(model: str, delays_ms: Mapping[int, float], fixed: Mapping[str, float]) -> dict[str, Any]:
    """Predicted milliseconds of every order, ready's too."""
    return {
        "model": model,
        "delays_ms": {str(link): ms for link, ms in delays_ms.items()},
        "simulated_ms": {
            name: round(iterations_ms(model, name, delays_ms, fixed_ms=fixed), 1)
            for name in PIPELINES
        },
    }


def against(found: dict[str, Any], published: Sequence[int]) -> dict[str, Any]:
    """The row with what was measured, and the relative error of each."""
    measured = dict(zip(NAMES, published, strict=True))
    errors = {name: round(found["simulated_ms"][name] / ms - 1, 4) for name, ms in measured.items()}
    return found | {"published_ms": measured, "errors": errors}


def compared(fixed: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    sweep = [
        against(
            row("14b", {6: delay}, fixed["14b"]),
            [SWEEP[name][place] for name in NAMES],
        )
        for place, delay in enumerate(SWEEP_MS)
    ]
    single = [
        against(row(model, {link: delay}, fixed[model]), published)
        for model, link, delay, *published in HELD["single"]
    ]
    largest = {name: max(abs(one["errors"][name]) for one in sweep) for name in NAMES}
    return {"sweep": sweep, "largest_error_of_sweep": largest, "single": single}


def predicted(fixed: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    larger = [
        row(model, {link: delay}, fixed[model])
        for model in ("30b", "60b")
        for link, delays in ((0, (30, 60)), (6, SWEEP_MS))
        for delay in delays
    ]
    several = [
        row(model, dict.fromkeys(links, delay), fixed[model])
        for model, sets in SEVERAL.items()
        for links in sets
        for delay in (30, 60)
    ]
    changing = []
    for model in ("7b", "14b"):
        stages = len(OP_MS[model][0])
        for links in (None, (0,), (stages - 2,)):
            for hold_s in HOLDS_S:
                drawn = DrawnDelays(mean_s=0.03, sd_s=0.01, hold_s=hold_s, links=links)
                simulated = {
                    name: iterations_ms(
                        model, name, {}, fixed_ms=fixed[model], drawn=drawn, num=ITERATIONS
                    )
                    for name in PIPELINES
                }
                changing.append(
                    {
                        "model": model,
                        "links": "all" if links is None else list(links),
                        "hold_s": list(hold_s),
                        "simulated_ms": {name: round(ms, 1) for name, ms in simulated.items()},
                    }
                )
    return {"larger": larger, "several_links": several, "changing": changing}


def main() -> dict[str, Any]:
    fixed = {model: fixed_costs_ms(model) for model in OP_MS}
    return {
        "op_ms": {model: list(map(list, rows)) for model, rows in OP_MS.items()},
        "no_delay_ms": NO_DELAY_MS,
        "fixed_ms": fixed,
        "model": {
            "dependency_bubbles": dependency_bubbles(),
            "delay_law": [delay_law(slack) for slack in range(2, 7)],
        },
        "compared": compared(fixed),
        "predicted": predicted(fixed),
    }


if __name__ == "__main__":
    bench(main)
