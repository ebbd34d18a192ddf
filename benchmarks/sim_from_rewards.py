"""`simulate --from` on short real runs with rewards of four kinds: is the step met, and the wait?

Three runs of the quickstart with function rewards (its own; one whose first call takes a second;
one that sleeps 5 to 50 ms a response) and one of `configs/code-tiny.yaml`, with programs in the
sandbox. Each run's log is all that the simulator is given. Compared are the mean step and the wait
for rewards; and a run without tail batching with what the simulator says of that change.

    python benchmarks/sim_from_rewards.py [--steps 40] [--folder FOLDER]

Needs the warmed-up models of the quickstart and of configs/code-tiny.yaml in runs/.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import bench, rollpacker

from rollpacker.sim.result import SystemResult
from rollpacker.sim.whatif import load_run

STEP_BOUND = 0.10
"""The simulated step is off by this share at most ..."""
WAIT_FACTOR, WAIT_SHARE = 2.0, 0.01
"""... and the exposed wait for rewards by this factor, or by this share of the step."""
FUNCTIONS = '''"""Rewards of a benchmark."""

import random
import time

_loaded = []


def _values(completions, answer, finish_reasons):
    pairs = zip(completions, answer, finish_reasons, strict=True)
    return [float(r == "stop" and c.rpartition("=")[2].rstrip("!") == a) for c, a, r in pairs]


def slow_first(completions, answer, finish_reasons, **columns):
    if not _loaded:
        time.sleep(1.0)
        _loaded.append(True)
    return _values(completions, answer, finish_reasons)


def sleeps(completions, answer, finish_reasons, **columns):
    for _ in completions:
        time.sleep(random.uniform(0.005, 0.05))
    return _values(completions, answer, finish_reasons)
'''
COMMON = ("data.eval=null", "eval.every_steps=null", "checkpoint.every_steps=1000000")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    config: str
    overrides: tuple[str, ...] = ()


CASES = (
    Case("function", "quickstart.yaml"),
    Case("slow first call", "quickstart.yaml", ("rewards.0.function={functions}:slow_first",)),
    Case("5 to 50 ms a response", "quickstart.yaml", ("rewards.0.function={functions}:sleeps",)),
    Case("code", "code-tiny.yaml"),
)
CHANGE = "tail_batching.enabled=false"


def record(case: Case, folder: Path, steps: int) -> Path:
    """A real run; where it is there already it is taken as it is."""
    name = case.name.replace(" ", "-")
    run = folder / name
    if run.exists():
        return run
    functions = folder / "functions.py"
    functions.write_text(FUNCTIONS)
    own = [override.format(functions=functions) for override in case.overrides]
    overrides = [*COMMON, *own, f"name={name}", f"runs_dir={folder}", f"train.steps={steps}"]
    rollpacker("train", f"configs/{case.config}", *overrides)
    return run


def compare(measured: SystemResult, simulated: SystemResult) -> dict[str, Any]:
    """The step and the wait, measured and simulated, and whether both are near enough."""
    step, wait = measured.mean["total_s"], measured.mean["reward_s"]
    found, waited = simulated.mean["total_s"], simulated.mean["reward_s"]
    near = abs(waited - wait) <= WAIT_SHARE * step or (
        wait > 0 and 1 / WAIT_FACTOR <= waited / wait <= WAIT_FACTOR
    )
    return {
        "step_s": step,
        "simulated_step_s": found,
        "step_error": found / step - 1,
        "wait_s": wait,
        "simulated_wait_s": waited,
        "wait_ratio": waited / wait if wait else None,
        "holds": abs(found / step - 1) <= STEP_BOUND and near,
    }


def without_tail_batching(folder: Path, steps: int) -> dict[str, float]:
    """How many times as long a step takes without tail batching, measured and simulated."""
    first = load_run(record(CASES[0], folder, steps))
    off = Case("function off", "quickstart.yaml", (CHANGE,))
    other = load_run(record(off, folder, steps)).measured()
    same, changed = first.simulate(), first.simulate([CHANGE])
    found = {
        "measured": other.mean["total_s"] / first.measured().mean["total_s"],
        "simulated": changed.mean["total_s"] / same.mean["total_s"],
    }
    print("a step without tail batching, over one with it:", found)
    return found


def main(
    steps: int = 40, code_steps: int = 30, folder: Path | None = None, quick: bool = False
) -> dict[str, Any]:
    """`folder`: the runs are kept there, and those that are there are taken."""
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        place = (folder or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        for case in CASES[: 1 if quick else None]:
            count = code_steps if case.config == "code-tiny.yaml" else steps
            model = load_run(record(case, place, 12 if quick else count))
            found = compare(model.measured(), model.simulate())
            results[case.name] = {**found, "drafted": model.fitted.drafted}
            print(case.name, found, flush=True)
        changed = without_tail_batching(place, 12 if quick else steps)
    return {
        "cases": results,
        "without_tail_batching": changed,
        "holds": all(found["holds"] for found in results.values()),
    }


if __name__ == "__main__":
    bench(main, holds=lambda found: found["holds"])
