"""How fast the simulator is: 1,000 steps of 128 GPUs through the real core, on one core.

Every response is an event of its own, through the same `Job.handle` as in a real run. Reported are
processor and wall seconds, events per second, and the peak of memory at the first tenth of the
steps and at the end; with --history once more while the log's history is kept. Exit code 1 above
20 s.

    python benchmarks/sim_speed.py [--steps 1000] [--history]
"""

from __future__ import annotations

import resource
import time
from typing import Any
from unittest.mock import patch

from lab import ROOT, bench

from rollpacker.bus import Sink
from rollpacker.core.job.job import Job
from rollpacker.report.history import History
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

BOUND_S = 20.0


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(steps: int, overrides: list[str], observe: Sink | None = None) -> dict[str, float]:
    early = [0.0]

    def progress(done: int) -> None:
        if done == max(steps // 10, 1):
            early[0] = peak_mib()

    num_events = 0
    handle = Job.handle

    def counted(job: Job, event: object) -> list:
        nonlocal num_events
        num_events += 1
        return handle(job, event)  # type: ignore[arg-type]

    path = ROOT / "configs/scenarios/128-gpus.yaml"
    with patch.object(Job, "handle", counted):
        simulate(load_scenario(path, ["steps=5", *overrides]))
    scenario = load_scenario(path, [f"steps={steps}", *overrides])
    began_cpu, began = time.process_time(), time.perf_counter()
    result = simulate(scenario, progress=progress, observe=observe)
    return {
        "steps": steps,
        "cpu_s": time.process_time() - began_cpu,
        "wall_s": time.perf_counter() - began,
        "events_per_step": num_events / 5,
        "peak_mib_at_a_tenth": early[0],
        "peak_mib": peak_mib(),
        "simulated_hours": sum(step.total_s for step in result.steps) / 3600,
    }


def main(steps: int = 1000, history: bool = False) -> dict[str, Any]:
    found = {
        name: measure(steps, settings)
        for name, settings in {
            "with rewards": [],
            "without a reward stage": ["rewards=[]", "lengths={preset: rollpacker-code}"],
        }.items()
    }
    if history:
        found["with rewards and the history"] = measure(steps, [], History().feed)
    return {**found, "quick_enough": is_quick(found, steps)}


def is_quick(found: dict[str, Any], steps: int) -> bool:
    """Within the bound of processor time for 1,000 steps."""
    bound = ("with rewards", "without a reward stage")
    return all(found[name]["cpu_s"] * 1000 / steps <= BOUND_S for name in bound)


if __name__ == "__main__":
    bench(main, holds=lambda found: found["quick_enough"])
