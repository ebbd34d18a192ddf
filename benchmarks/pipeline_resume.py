"""A run goes on exactly in as many pipeline stages, in others, and sharded or not.

Real runs of a tiny model of four layers. Each is killed as soon as step k is committed, resumed,
and compared with the run at its first layout that nothing disturbed:

    same      at its own layout: weights and optimizer are equal bit for bit at the end
    others    at another: weights after the next step, which trains on the same samples, differ by
              the rounding of sums alone; later ones may train on others, which is told
    direct    two stages over direct links, of which one is killed at random moments: exit code 6
              each time, and what resumes ends bit for bit where the undisturbed run does

The optimizer has a large epsilon: of a gradient that is rounding alone (the biases of keys), Adam
would make whole steps.

    python benchmarks/pipeline_resume.py [--steps 4] [--kills 4]

Needs Linux (/proc).
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from lab import bench
from pipeline_learning import parting_step
from resume import write_config, write_model
from trainer_resume import Runs, different, killed_at_random, tensors, weight_difference

DIRECT = ("train.pipeline.stages=2", "train.pipeline.links=direct")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 stage": (1, ()),
    "2 stages": (2, ("train.pipeline.stages=2",)),
    "2 direct": (2, DIRECT),
    "4 stages": (4, ("train.pipeline.stages=4",)),
    "2 x 2": (4, ("train.pipeline.stages=2",)),
}
"""Processes, and what is set besides. "2 x 2" is two stages of two shards."""
AFTER = {
    "1 stage": ("1 stage", "2 stages", "4 stages", "2 x 2"),
    "2 stages": ("2 stages", "1 stage", "4 stages"),
    "4 stages": ("4 stages", "1 stage"),
    "2 x 2": ("2 x 2", "1 stage", "2 stages"),
}
"""Where a run that began at a layout is resumed."""
OVERRIDES = (
    *("checkpoint={every_steps: 1, keep_last: 100}", "train.micro_batch_tokens=96"),
    *("train.eps=1e-4", "algorithm.kl_coef=0.01"),
)
TOLERANCE = 1e-6
"""The largest difference of weights, which are up to 0.1 in matrices and 1 in norms."""


def run(runs: Runs, name: str, layout: str, **settings: Any) -> int:
    processes, further = LAYOUTS[layout]
    return runs.run(name, processes, *further, **settings)


def name_of(*layouts: str) -> str:
    return "-to-".join(layout.replace(" ", "-") for layout in layouts)


def all_resumed(runs: Runs, before: str, step: int) -> list[dict[str, Any]]:
    """Killed once after `step` at one layout; the folder as it was then resumed at others."""
    killed = f"killed-{name_of(before)}"
    code = run(runs, killed, before, kill_run_after=step)
    assert code == -signal.SIGKILL, f"the run was to be killed, it exited {code}"
    found = []
    for after in AFTER[before]:
        shutil.copytree(runs.folder / killed, runs.folder / name_of(before, after), symlinks=True)
        found.append(resumed(runs, before, after, step))
    return found


def resumed(runs: Runs, before: str, after: str, step: int) -> dict[str, Any]:
    """The copy, against the undisturbed run."""
    name, reference = name_of(before, after), name_of(before)
    assert run(runs, name, after, resume=True) == 0
    ends = runs.checkpoint(name), runs.checkpoint(reference)
    unequal = len(different(*ends)) if before == after else None
    result = {
        "before": before,
        "after": after,
        "tensors_different_at_the_end": unequal,
        "weight_difference_one_step_later": weight_difference(
            runs.checkpoint(name, step + 1), runs.checkpoint(reference, step + 1)
        ),
        "weight_difference_at_the_end": weight_difference(*ends),
        "samples_part_in_step": parting_step(runs.folder / name, runs.folder / reference),
        "log_problems": runs.log_problems(name),
    }
    result["good"] = (
        not result["log_problems"]
        and not unequal
        and result["weight_difference_one_step_later"] <= TOLERANCE
    )
    print(json.dumps(result), flush=True)
    return result


def measure(steps: int, kills: int) -> dict[str, Any]:
    import torch
    import transformers  # noqa: F401  (imported once, before the forks)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder, at = Path(temporary), steps // 2
        write_model(folder / "model", num_hidden_layers=4)
        runs = Runs(folder / "runs", steps, write_config(folder, steps), OVERRIDES)
        for layout in LAYOUTS:
            assert run(runs, name_of(layout), layout) == 0
        reference = name_of("2 direct")
        summary = json.loads((runs.folder / reference / "summary.json").read_text())["seconds"]
        within_s = (0.7 * (sum(summary.values()) - summary["startup"]), summary["startup"])
        whole = tensors(runs.checkpoint("1-stage"))
        return {
            "steps": steps,
            "killed_after_step": at,
            "tolerance": TOLERANCE,
            "largest_weight": max(
                value.abs().max().item() for name, value in whole.items() if "model/" in name
            ),
            "resumed": [one for before in AFTER for one in all_resumed(runs, before, at)],
            "direct": killed_at_random(runs, kills, within_s, *DIRECT, reference=reference),
        }


def main(steps: int = 4, kills: int = 4) -> dict[str, Any]:
    result = measure(steps, kills)
    good = result["direct"]["good"] and all(one["good"] for one in result["resumed"])
    return result | {"all_good": good}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["all_good"])
