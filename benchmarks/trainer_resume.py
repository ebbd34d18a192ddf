"""A trainer with processes of its own goes on exactly, at any number of them, whoever dies.

Real runs of the quickstart's model, in small steps, without streaming, whose order of sums depends
on the clock. Each is compared with a run that nothing disturbed:

    resume   killed as soon as step k is committed, resumed at as many processes (bit for bit at the
             end) or at others (one step later, but for rounding)
    kills    one rank of two is killed at random moments of start-up and steps, in a run that one
             loss ends (`trainer_faults.py` has those that go on): exit code 6, and what resumes
             ends bit for bit where the undisturbed run did. `exactly_once.py` checks the log

    python benchmarks/trainer_resume.py [--steps 5] [--kills 6]

Needs the quickstart's warmed-up model in runs/, and Linux (/proc).
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from exactly_once import check
from lab import ROOT, bench
from resume import committed
from resume import run as resume_run

CONFIG = ROOT / "configs" / "quickstart.yaml"
SMALL = (
    *("data.train.size=400", "data.eval=null", "eval.every_steps=null", "save_samples=false"),
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4"),
    *("rollout.max_response_tokens=96", "checkpoint={every_steps: 1, keep_last: 100}"),
)
TOLERANCE = 1e-6
TRAINER_PROCESS_ENDED = 6


class _AtFirstEntry:
    """An observer that does something at the first entry of the log."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def feed(self, entry: Any) -> None:
        if self._act is not None:
            self._act()
            self._act = None

    def close(self) -> None:
        pass


def _kill_a_rank_after(delay_s: float) -> None:
    threading.Thread(target=_kill_a_rank, args=(delay_s,), daemon=True).start()


def _rank_pids() -> list[int]:
    """The trainer's processes that this process has started."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"rollpacker.trainer.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def _kill_a_rank(delay_s: float) -> None:
    """After so long, or as soon as there is one."""
    time.sleep(delay_s)
    while not (pids := _rank_pids()):
        time.sleep(0.01)
    os.kill(random.Random(delay_s).choice(pids), signal.SIGKILL)


def _prepare(delay_s: float | None) -> None:
    from rollpacker.config import schema

    schema.MAX_TRAINER_LOSSES = 1
    if delay_s is not None:
        _kill_a_rank_after(delay_s)


class Runs:
    """Runs of one configuration in one folder."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        config: Path = CONFIG,
        overrides: tuple[str, ...] = SMALL,
    ) -> None:
        self.folder = folder
        self._config = config
        self._overrides = [*overrides, f"train.steps={steps}", f"runs_dir={folder}"]

    def run(
        self,
        name: str,
        processes: int,
        *further: str,
        resume: bool = False,
        kill_run_after: int | None = None,
        kill_rank_after_s: float | None = None,
        kill_rank_after_first_entry_s: float | None = None,
    ) -> int:
        """Train in a forked process (see `resume.start`). `further` overrides. Returns its exit
        code."""
        after_s = kill_rank_after_first_entry_s
        return resume_run(
            self._config,
            name,
            resume=resume,
            kill=None if kill_run_after is None else committed(kill_run_after),
            prepare=partial(_prepare, kill_rank_after_s),
            overrides=(*self._overrides, f"train.processes={processes}", *further),
            observers=[]
            if after_s is None
            else [_AtFirstEntry(partial(_kill_a_rank_after, after_s))],
        )

    def checkpoint(self, name: str, step: int | None = None) -> Path:
        """The checkpoint of a step; None: the last one."""
        checkpoints = self.folder / name / "checkpoints"
        if step is None:
            return checkpoints / (checkpoints / "latest").read_text().strip()
        return checkpoints / f"step_{step:06d}"

    def log_problems(self, name: str) -> list[str]:
        problems: list[str] = check(self.folder / name / "events.jsonl")["problems"]
        return problems


def tensors(checkpoint: Path) -> dict[str, Any]:
    """Weights and the trainer's state, by folder, file and name. What all processes have alike, any
    of them may have written."""
    from safetensors.torch import load_file

    return {
        f"{path.parent.name}/{'' if '/step.' in name else path.name}/{name}": value
        for path in sorted(checkpoint.glob("*/*.safetensors"))
        for name, value in load_file(path).items()
    }


def different(one: Path, other: Path) -> list[str]:
    """Names of tensors that are not equal bit for bit."""
    first, second = tensors(one), tensors(other)
    common = first.keys() & second.keys()
    unequal = {name for name in common if not first[name].equal(second[name])}
    return sorted(unequal | (first.keys() ^ second.keys()))


def weight_difference(one: Path, other: Path) -> float:
    """The largest between two models' weights."""
    first, second = tensors(one), tensors(other)
    names = [name for name in first if name.startswith("model/")]
    return max((first[name] - second[name]).abs().max().item() for name in names)


def resumed(runs: Runs, before: int, after: int, step: int) -> dict[str, Any]:
    """Killed after `step` at `before` processes, resumed at `after`."""
    name, reference = f"{before}-to-{after}", f"undisturbed-{before}"
    code = runs.run(name, before, kill_run_after=step)
    assert code == -signal.SIGKILL, f"the run was to be killed, it exited {code}"
    assert runs.run(name, after, resume=True) == 0
    result = {
        "processes": [before, after],
        "killed_after_step": step,
        "different_at_the_end": len(different(runs.checkpoint(name), runs.checkpoint(reference))),
        "weight_difference_one_step_later": weight_difference(
            runs.checkpoint(name, step + 1), runs.checkpoint(reference, step + 1)
        ),
        "weight_difference_at_the_end": weight_difference(
            runs.checkpoint(name), runs.checkpoint(reference)
        ),
        "log_problems": runs.log_problems(name),
    }
    result["good"] = not result["log_problems"] and (
        result["different_at_the_end"] == 0
        if before == after
        else result["weight_difference_one_step_later"] <= TOLERANCE
    )
    print(json.dumps(result), flush=True)
    return result


def killed_at_random(
    runs: Runs,
    kills: int,
    within_s: tuple[float, float],
    *further: str,
    reference: str = "undisturbed-2",
) -> dict[str, Any]:
    """One rank of two killed `kills` times, each time resumed; a new run after each that ended.
    `within_s`: how long the steps of a run take, and how long the start-up. `reference` is the run
    that nothing disturbed, `further` its overrides."""
    draw = random.Random(0)
    whole = runs.checkpoint(reference)
    found: list[dict[str, Any]] = []
    while (so_far := sum(len(one["exit_codes"]) for one in found)) < kills:
        name, codes, steps = f"random-{len(found)}", [], []
        while True:
            number = so_far + len(codes)
            when = "kill_rank_after_first_entry_s" if number % 2 == 0 else "kill_rank_after_s"
            delay_s = draw.uniform(0, within_s[number % 2])
            kill = {when: delay_s} if number < kills else {}
            code = runs.run(name, 2, *further, resume=bool(codes), **kill)
            if code == 0:
                break
            latest = runs.folder / name / "checkpoints" / "latest"
            steps.append(int(latest.read_text().strip()[-6:]) if latest.exists() else 0)
            codes.append(code)
            print(f"{name}: a rank killed after {delay_s:.1f} s, step {steps[-1]} is committed")
        found.append(
            {
                "exit_codes": codes,
                "committed_steps": steps,
                "different_at_the_end": len(different(runs.checkpoint(name), whole)),
                "log_problems": runs.log_problems(name),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    good = all(
        set(one["exit_codes"]) <= {TRAINER_PROCESS_ENDED}
        and one["committed_steps"] == sorted(one["committed_steps"])
        and not one["different_at_the_end"]
        and not one["log_problems"]
        for one in found
    )
    return {"kills": so_far, "runs": found, "good": good}


def measure(steps: int, kills: int) -> dict[str, Any]:
    import torch
    import transformers  # noqa: F401  (imported once, before the forks)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(Path(temporary), steps)
        for processes in (1, 2):
            began = time.perf_counter()
            assert runs.run(f"undisturbed-{processes}", processes) == 0
            whole_s = time.perf_counter() - began
        summary = json.loads((runs.folder / "undisturbed-2" / "summary.json").read_text())
        start_s = summary["seconds"]["startup"]
        at = steps // 2
        pairs = [resumed(runs, b, a, at) for b, a in ((1, 1), (2, 2), (1, 2), (2, 1))]
        by_kill = killed_at_random(runs, kills, within_s=(0.7 * (whole_s - start_s), start_s))
        apart = weight_difference(
            runs.checkpoint("undisturbed-1", 1), runs.checkpoint("undisturbed-2", 1)
        )
    return {
        "steps": steps,
        "first_step_of_1_and_2_processes_weight_difference": apart,
        "resumed": pairs,
        "killed_ranks": by_kill,
        "all_good": by_kill["good"] and all(pair["good"] for pair in pairs),
    }


def main(steps: int = 5, kills: int = 6) -> dict[str, Any]:
    os.chdir(ROOT)  # the quickstart's paths are relative
    return measure(steps, kills)


if __name__ == "__main__":
    bench(main, holds=lambda found: found["all_good"])
