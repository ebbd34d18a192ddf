"""The simulator against real runs: fit to a run without tail batching, predict one with it.

Two runs of the quickstart's model per workload, the policy frozen. One waits for all; its log is
all that the simulator is given, with the other's settings: tail batching, another seed and, by
workload, another length limit, other factors, fewer slots than samples or another temperature.
Compared are seconds of generation, on average and by kind of round. The runs take turns, a step
each; what a run waits for its turn is inside its training step, which is not compared.

    python benchmarks/sim_vs_real.py [--steps 120] [--workloads same-limit ...] [--quick]
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

from lab import ROOT, bench

from rollpacker.report.accounting import Accounting
from rollpacker.report.fit import fit_run, predict_rounds
from rollpacker.report.log import EventLog, events_path

MEAN_BOUND = 0.15
KIND_BOUND = 0.20
KINDS = ("short", "long")
COMMON = (
    *("train.learning_rate=1e-12", "train.warmup_steps=0", "train.threads=1"),
    *("eval.every_steps=null", "eval.max_prompts=1", "checkpoint.every_steps=1000000"),
    "save_samples=false",
)
PUBLISHED = ("tail_batching.selection=published", "tail_batching.carry=none")
"""Responses may be left out, as the sample factor asks for."""
SIMULATED_STEPS = 4
"""Simulated for each real one."""
MANY_TURNS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Overrides of the quickstart's config."""

    name: str
    both: tuple[str, ...] = ()
    race: tuple[str, ...]
    """Settings of the run with tail batching, which the simulator is told."""


WORKLOADS = (
    Workload(
        name="same-limit",
        race=(*PUBLISHED, "tail_batching.prompt_factor=1.25", "tail_batching.sample_factor=1.25"),
    ),
    Workload(
        name="other-limit",
        race=(
            *(*PUBLISHED, "tail_batching.prompt_factor=1.5", "tail_batching.sample_factor=1.0"),
            "rollout.max_response_tokens=128",
        ),
    ),
    Workload(
        name="hotter-few-slots",
        both=(
            *("rollout.temperature=1.15", "rollout.prompts_per_step=24"),
            "rollout.engine.max_slots=96",
        ),
        race=(*PUBLISHED, "tail_batching.prompt_factor=1.25", "tail_batching.sample_factor=1.125"),
    ),
)


def run_pair(workload: Workload, config: Path, folder: Path, num_steps: int) -> tuple[Path, Path]:
    """Both real runs, in turns. Returns their folders: without tail batching, with it."""
    context = multiprocessing.get_context("spawn")
    turns = (context.Semaphore(1), context.Semaphore(0))
    settings = ((*workload.both, "tail_batching.enabled=false"), (*workload.both, *workload.race))
    runs, processes = [], []
    for number, own in enumerate(settings):
        run = folder / f"{workload.name}-{('plain', 'race')[number]}"
        overrides = [*COMMON, *own, f"seed={number}", f"train.steps={num_steps}"]
        overrides += [f"name={run.name}", f"runs_dir={folder.resolve()}"]
        arguments = (str(config), overrides, turns[number], turns[1 - number], str(run) + ".txt")
        processes.append(context.Process(target=_train, args=arguments))
        runs.append(run)
    for process in processes:
        process.start()
    for process, run in zip(processes, runs, strict=True):
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"a run failed: {Path(str(run) + '.txt').read_text()[-2000:]}")
    return runs[0], runs[1]


def _train(config: str, overrides: list[str], mine: Semaphore, other: Semaphore, log: str) -> None:
    """`rollpacker train`, in a process of its own, that hands over after each optimizer step."""
    from rollpacker.cli.main import main as rollpacker
    from rollpacker.trainer.torch_trainer import TorchTrainer

    apply = TorchTrainer.apply

    async def apply_and_hand_over(self: TorchTrainer) -> Mapping[str, float]:
        metrics = await apply(self)
        other.release()
        await asyncio.to_thread(mine.acquire)
        return metrics

    TorchTrainer.apply = apply_and_hand_over  # type: ignore[method-assign]
    mine.acquire()
    try:
        with (
            open(log, "w") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            code = rollpacker(["train", config, "--overwrite", *overrides])
    finally:
        for _ in range(MANY_TURNS):
            other.release()
    raise SystemExit(code)


def real_seconds(run: Path) -> dict[str, list[float]]:
    """Seconds of generation of each step, by kind of round and "mean"."""
    accounting = Accounting()
    steps = [s for s in map(accounting.feed, EventLog(events_path(run))) if s is not None]
    return _by_kind([(str(step.kind), step.rollout_s) for step in steps])


def simulated_seconds(
    run: Path, overrides: Sequence[str], num_steps: int
) -> dict[str, list[float]]:
    """The same of the run as it would be with these settings, over more steps: the simulator's own
    noise is not to count."""
    from rollpacker.sim.whatif import load_run

    result = load_run(run).simulate(overrides, steps=SIMULATED_STEPS * num_steps)
    return _by_kind([(step.kind, step.rollout_s) for step in result.steps])


def _by_kind(steps: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"mean": [value for _, value in steps]}
    for kind in KINDS:
        seconds[kind] = [value for of, value in steps if of == kind]
    return seconds


def compare(workload: Workload, plain: Path, race: Path, num_steps: int) -> dict[str, Any]:
    """A row of results."""
    fitted = fit_run(EventLog(events_path(plain)), may_draft=True)
    real = real_seconds(race)
    settings = [*workload.race, "tail_batching.enabled=true"]
    simulated = simulated_seconds(plain, settings, num_steps)
    entries = EventLog(events_path(race))
    row: dict[str, Any] = {
        "workload": workload.name,
        "both": list(workload.both),
        "race": list(workload.race),
        "fit": asdict(fitted.step),
        "fit_errors": asdict(fitted.errors["all"]),
        "with_recorded_lengths": {
            kind: errors.ratio
            for kind, errors in predict_rounds(fitted.step, entries, may_draft=True).items()
        },
    }
    for name, bound in (("mean", MEAN_BOUND), *((kind, KIND_BOUND) for kind in KINDS)):
        if not real[name] or not simulated[name]:
            raise SystemExit(f"{workload.name}: no {name} rounds; more --steps are needed")
        measured, predicted = statistics.fmean(real[name]), statistics.fmean(simulated[name])
        row[name] = {
            "rounds": len(real[name]),
            "real_s": measured,
            "real_s_standard_error": _standard_error(real[name]),
            "predicted_s": predicted,
            "ratio": predicted / measured,
            "bound": bound,
            "met": abs(predicted / measured - 1) <= bound,
        }
    return row


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


NAMES = tuple(workload.name for workload in WORKLOADS)


def main(
    config: Path = ROOT / "configs" / "quickstart.yaml",
    steps: int = 120,
    workloads: Sequence[str] = NAMES,
    keep: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """`steps`: of each run. `keep`: a folder for the runs, which else are thrown away."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    num_steps = 20 if quick else steps
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for workload in WORKLOADS:
            if workload.name in workloads:
                plain, race = run_pair(workload, config, folder, num_steps)
                rows.append(compare(workload, plain, race, num_steps))
    met = all(row[name]["met"] for row in rows for name in ("mean", *KINDS))
    return {"config": config.name, "steps": num_steps, "met": met, "rows": rows}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["met"], workloads=NAMES)
