"""Do released devices pay? Two engines and two training replicas that share two cores, without tail
batching, so that every round waits for its longest response.

    kept       the round ends, then both replicas train on all of it
    released   towards the end of a round engine 1 lets go: its samples go on in engine 0, and
               replica 1 begins on the groups that are complete; both train on the rest

Two runs of a random model with responses of forced, long-tailed lengths, the same in both; a
learning rate of next to nothing keeps the policy as it is. They take turns, one step each, so that
neither has the machine at a better time, and step k of one is compared with step k of the other. A
third run, like `kept` and alone, is all that the simulator is given to predict the ratio.

    python benchmarks/released_devices.py [--steps 60] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np
from engine_process import write_model
from machine import write_result

from rollpacker.report.accounting import Accounting
from rollpacker.report.log import EventLog, events_path

WANTED = 1.10
PREDICTED_WITHIN = 0.10
SKIPPED_STEPS = 3
"""Not timed: the first ones of a process are slower."""
WIDTH = 256
PROMPTS, SAMPLES, LONGEST = 16, 4, 400
COLOCATED = ("train.processes=2", "train.replicas=2", "train.colocate=true")
RELEASING = "stream_trainer={enabled: true, kinds: [plain]}"
ARMS = {"kept": (*COLOCATED,), "released": (*COLOCATED, RELEASING)}
MANY_TURNS = 10_000
RESAMPLES = 10_000


def write_config(folder: Path, steps: int, width: int) -> Path:
    write_model(folder / "model", width)
    (folder / "reward.py").write_text(
        "def letters(completions, **columns):\n"
        "    return [sum(c in 'aeiou' for c in text) / len(text) for text in completions]\n"
    )
    rows = [{"prompt": f"{n}+{n % 7}="} for n in range(PROMPTS * (steps + 1))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "released",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model"), "device": "cpu", "dtype": "float32"},
        "data": {
            "train": {"kind": "jsonl", "path": str(folder / "rows.jsonl")},
            "eval_fraction": 0,
        },
        "rollout": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": LONGEST,
            "engines": 2,
        },
        "tail_batching": {"enabled": False},
        "train": {
            "steps": steps,
            "learning_rate": 1e-12,
            "threads": 2,
            "micro_batch_tokens": 1024,
        },
        "rewards": [{"function": f"{folder / 'reward.py'}:letters"}],
        "checkpoint": {"every_steps": 1_000_000},
        "deadlines": {"heartbeat_s": 60},
        "save_samples": False,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def length(row: int, index: int) -> int:
    """Of a response: prompts differ by a factor of up to some ten, responses to one by three."""
    of_prompt = random.Random(row).lognormvariate(4.0, 0.8)
    own = random.Random(f"{row}/{index}").uniform(0.5, 1.5)
    return min(max(int(of_prompt * own), 1), LONGEST)


def force_lengths() -> None:
    from rollpacker.run.ports.carried import CarriedTokens

    requests = CarriedTokens.requests

    def forced(self: CarriedTokens, *arguments: Any) -> Any:
        return [
            replace(one, forced_length=length(one.sample.prompt.row, one.sample.index))
            for one in requests(self, *arguments)
        ]

    CarriedTokens.requests = forced  # type: ignore[method-assign]


def train(config: str, overrides: list[str], log: str) -> None:
    """`rollpacker train` with forced lengths."""
    from rollpacker.cli.main import main as rollpacker

    force_lengths()
    with (
        open(log, "w") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        code = rollpacker(["train", config, *overrides])
    if code:
        raise SystemExit(code)


def train_in_turns(
    config: str, overrides: list[str], log: str, mine: Semaphore, other: Semaphore
) -> None:
    """The same, in a process of its own, which hands over after each optimizer step and writes the
    seconds of its own turns beside the log."""
    import asyncio

    from rollpacker.trainer.process_trainer import ProcessTrainer

    apply = ProcessTrainer.apply
    seconds: list[float] = []
    began_s = time.perf_counter()

    async def apply_and_hand_over(self: ProcessTrainer) -> Mapping[str, float]:
        nonlocal began_s
        metrics = await apply(self)
        seconds.append(time.perf_counter() - began_s)
        other.release()
        await asyncio.to_thread(mine.acquire)
        began_s = time.perf_counter()
        return metrics

    ProcessTrainer.apply = apply_and_hand_over  # type: ignore[method-assign]
    mine.acquire()
    try:
        train(config, overrides, log)
    finally:
        Path(log).with_suffix(".json").write_text(json.dumps(seconds))
        for _ in range(MANY_TURNS):
            other.release()


def run_pair(config: Path, folder: Path) -> dict[str, list[float]]:
    """Seconds of each step of both arms, in turns."""
    context = multiprocessing.get_context("spawn")
    turns = (context.Semaphore(1), context.Semaphore(0))
    processes = []
    for number, (arm, own) in enumerate(ARMS.items()):
        arguments = (str(config), [f"name={arm}", *own], str(folder / f"{arm}.txt"))
        processes.append(
            context.Process(
                target=train_in_turns, args=(*arguments, turns[number], turns[1 - number])
            )
        )
    for process in processes:
        process.start()
    for process, arm in zip(processes, ARMS, strict=True):
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"a run failed: {(folder / f'{arm}.txt').read_text()[-2000:]}")
    return {arm: json.loads((folder / f"{arm}.json").read_text())[SKIPPED_STEPS:] for arm in ARMS}


def predicted_ratio(config: Path, folder: Path) -> float:
    """By the simulator, which is given a run that releases nothing."""
    from rollpacker.sim.whatif import load_run

    arguments = (str(config), ["name=alone", *ARMS["kept"]], str(folder / "alone.txt"))
    process = multiprocessing.get_context("spawn").Process(target=train, args=arguments)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"a run failed: {(folder / 'alone.txt').read_text()[-2000:]}")
    alone = load_run(folder / "runs" / "alone")
    kept, released = (
        statistics.fmean(step.total_s for step in alone.simulate(settings).steps)
        for settings in ([], [RELEASING])
    )
    return kept / released


def interval(kept: Sequence[float], released: Sequence[float]) -> list[float]:
    """95 % interval of the ratio of the means, by a bootstrap over pairs of steps."""
    pairs = np.array([kept, released])
    picks = np.random.default_rng(0).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    ratios = pairs[0][picks].mean(axis=1) / pairs[1][picks].mean(axis=1)
    return [float(bound) for bound in np.quantile(ratios, [0.025, 0.975])]


def rollouts(run: Path) -> dict[str, float]:
    """Mean seconds of generation, and the share of samples that were trained on before a round was
    over."""
    accounting = Accounting()
    steps = [s for s in map(accounting.feed, EventLog(events_path(run))) if s is not None]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    streamed = [row["perf/samples_streamed"] for row in rows if "perf/samples_streamed" in row]
    return {
        "rollout_s": statistics.fmean(step.rollout_s for step in steps[SKIPPED_STEPS:]),
        "streamed_share": statistics.fmean(streamed[SKIPPED_STEPS:]) / (PROMPTS * SAMPLES),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps of each run (default: 60)")
    parser.add_argument("--keep", type=Path, help="a folder for the runs (default: thrown away)")
    parser.add_argument("--quick", action="store_true", help="a smoke test; no result is written")
    args = parser.parse_args()
    steps = args.steps or (6 if args.quick else 60)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        config = write_config(folder, steps, WIDTH // 4 if args.quick else WIDTH)
        seconds = run_pair(config, folder)
        arms = {
            arm: {"step_s": statistics.fmean(of_arm), **rollouts(folder / "runs" / arm)}
            for arm, of_arm in seconds.items()
        }
        predicted = predicted_ratio(config, folder)
    ratio = arms["kept"]["step_s"] / arms["released"]["step_s"]
    low, high = interval(seconds["kept"], seconds["released"])
    for arm, found in arms.items():
        print(arm, {name: round(value, 3) for name, value in found.items()})
    print(f"released against kept: {ratio:.3f}x ({low:.3f} to {high:.3f})")
    print(f"predicted from a run that releases nothing: {predicted:.3f}x")
    if args.quick:
        return 0
    met = ratio >= WANTED and low > 1 and abs(predicted - ratio) <= PREDICTED_WITHIN
    payload = {
        "steps": steps - SKIPPED_STEPS,
        "ratio": ratio,
        "interval_95": [low, high],
        "wanted": WANTED,
        "predicted_ratio": predicted,
        "predicted_within": PREDICTED_WITHIN,
        "met": met,
        "arms": arms,
        "seconds": seconds,
    }
    print(f"written: {write_result('released_devices', payload).name}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
