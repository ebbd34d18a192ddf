"""A setting's step, and what it costs on pools that others use in its waits: not the same order.

    python benchmarks/plan_shared.py       # half a minute

7B with a slow judge on eight H20s and eight H800s; the settings are compared on the same seeds, as
`rollpacker plan --shared` does. docs/simulation.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lab import ROOT, markdown, write_result

from rollpacker.cluster.sim.profiles import on_pools
from rollpacker.cluster.sim.spec import load_cluster
from rollpacker.sim.plan import compare
from rollpacker.sim.plan_ideas import (
    OFF,
    Candidate,
    ScenarioEvaluate,
    on_shared_pools,
    order_idea,
    plan_base,
)
from rollpacker.sim.plan_shared import pool_prices
from rollpacker.sim.scenario import load_scenario

SCENARIO, CLUSTER = "configs/scenarios/7b-8k.yaml", "configs/clusters/mixed.yaml"
SETTINGS = ("rollout.prompts_per_step=32", "cluster.gpus=8", "rewards.2.calls_per_s=0.5")
SEEDS, STEPS = 3, 40


def rows() -> list[dict[str, Any]]:
    """Seconds and cost of a step, for each setting."""
    cluster = load_cluster(ROOT / CLUSTER)
    scenario = on_pools(load_scenario(ROOT / SCENARIO, SETTINGS), cluster.pools)
    gpus = {"rollout": scenario.cluster.gpus, "train": scenario.cluster.trainer_gpus}
    prices = pool_prices(cluster.core_pools(), gpus, scenario.rollout.prompts_per_step)
    base = on_shared_pools(plan_base(scenario), prices)
    tried = {
        "a pool at factor 2, as it is": Candidate(),
        "a pool at factor 1.25": Candidate(ideas=(order_idea(1.25),)),
        "a queue at factor 1.25": Candidate(ideas=(order_idea(1.25, stragglers="queue"),)),
        "no tail batching": Candidate(ideas=(OFF,)),
    }
    found = compare(
        base,
        ScenarioEvaluate(scenario=scenario),
        [*tried.values()],
        seeds=range(SEEDS),
        steps=STEPS,
    )
    return [
        {
            "setting": name,
            "step_s": one.step_s,
            "busy_s": one.cost_s,
            "saved_error_s": one.saved_error_s,
            "price_per_1k_prompts": prices.price_of_1k_prompts(one.cost_s),
        }
        for name, one in zip(tried, found, strict=True)
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as the page has them."""
    head = ("setting", "step", "busy", "price of 1,000 prompts")
    cells = [
        (row["setting"], f"{row['step_s']:.1f} s", f"{row['busy_s']:.1f} s", price)
        for row in rows
        for price in [f"{row['price_per_1k_prompts']:.2f}"]
    ]
    return markdown(head, cells)


if __name__ == "__main__":
    found = rows()
    settings = {"scenario": SCENARIO, "cluster": CLUSTER, "settings": SETTINGS}
    write_result("plan_shared", {**settings, "seeds": SEEDS, "steps": STEPS, "rows": found})
    print(table(found))
