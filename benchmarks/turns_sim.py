"""What races and carrying are worth over trajectories, in simulation.

`configs/scenarios/agent-7b.yaml`, whose numbers are made up for want of published ones, on half of
its GPUs; and the same with environments that hang at one of a hundred answers. No races, races
whose deferred trajectories begin anew, that are carried, that race on in a pool, and the published
races with surplus samples. A multiple of three steps sees as many long rounds as come in the long
run.

    python benchmarks/turns_sim.py [--steps 18] [--seeds 1]
"""

from __future__ import annotations

from typing import Any

from lab import ROOT, bench

from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

SCENARIO = ROOT / "configs/scenarios/agent-7b.yaml"
SMALL = ("cluster.gpus=8", "rollout.prompts_per_step=16")
VARIANTS = {"as it is": (), "one answer of 100 hangs": ("unkind={act_hang_rate: 0.01}",)}
ARMS = {
    "none": ("tail_batching.enabled=false",),
    "anew": ("tail_batching.stragglers=queue", "tail_batching.carry=none"),
    "carried": ("tail_batching.stragglers=queue", "tail_batching.carry=exact"),
    "pool": ("tail_batching.stragglers=pool", "tail_batching.carry=exact"),
    "surplus": ("tail_batching={selection: published}",),
}


def measured(overrides: tuple[str, ...], steps: int, seeds: int) -> dict[str, Any]:
    step_s, generated, trained, lengths, policy = [], 0, 0, [], []
    for seed in range(seeds):
        scenario = load_scenario(SCENARIO, [*SMALL, *overrides, f"steps={steps}", f"seed={seed}"])
        result = simulate(scenario)
        step_s += [step.total_s for step in result.steps]
        generated += result.tokens_generated
        trained += result.tokens_trained
        lengths.append(result.trained_length_mean)
        policy.append(result.own_length_mean)
    return {
        "step_s": round(sum(step_s) / len(step_s), 1),
        "longest_step_s": round(max(step_s), 1),
        "generated_over_trained": round(generated / trained, 3),
        "length_shift": round(sum(lengths) / sum(policy) - 1, 4),
        "trained_tokens_per_s": round(trained / sum(step_s)),
    }


def main(steps: int = 18, seeds: int = 1, quick: bool = False) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for variant, of_variant in VARIANTS.items():
        found[variant] = {}
        for arm, of_arm in ARMS.items():
            one = measured((*of_variant, *of_arm), 2 if quick else steps, seeds)
            first = found[variant].get("none", one)
            one["over_none"] = round(first["step_s"] / one["step_s"], 2)
            found[variant][arm] = one
            print(variant, arm, one, flush=True)
    return {"steps": steps, "seeds": seeds, "overrides": list(SMALL), "variants": found}


if __name__ == "__main__":
    bench(main)
