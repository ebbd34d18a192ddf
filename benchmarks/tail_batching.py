"""Tail batching against waiting for all, on a frozen policy.

The real engine and the real core (`Job`) run rounds of the quickstart's workload. Nothing is
trained and every response gets the reward 0 at once, so a round's seconds are those of generation,
from launch to the groups that would be trained on. Arms take turns round by round in one process.
All draw the same prompts in the same order, and the same response for the same (prompt, sample,
attempt): arms differ in what they wait for and in nothing else.

    python benchmarks/tail_batching.py [--sizes 8 16] [--rounds 30] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from machine import write_result
from workload import add_workload_arguments, describe_workload, load_workload

from rollpacker.bus import Bus, Recorded, Routes
from rollpacker.cli.parts import Policy, load_policy
from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.controller.clock import RealClock
from rollpacker.core.commands import (
    Abort,
    CancelScore,
    Command,
    Commit,
    Defer,
    Drop,
    FetchPrompts,
    Finish,
    Launch,
    Release,
    RoundKind,
    Score,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    Event,
    PromptsFetched,
    RunStarted,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import SampleId
from rollpacker.core.job import Job
from rollpacker.core.job_config import JobConfig
from rollpacker.core.tail_batching import TailBatchingConfig
from rollpacker.data.cursor import PromptCursor
from rollpacker.rollout.engine import EngineOutput, GenerationRequest, SamplingParams

SYNC = TailBatchingConfig(enabled=False)
FACTORS = ((1.25, 1.25), (1.25, 1.0), (1.5, 1.0), (1.0, 1.25))
ROUNDS = {8: 90, 16: 75, 32: 45, 64: 30}
"""Rounds per arm, by prompts per step. Multiples of 15: the long queue is then empty again for
every pair of factors, so that each arm has settled all the prompts that it started."""
QUICK_ROUNDS = {8: 15}
WARMUP_ROUNDS = 3
TARGETS = {8: 1.5, 16: 1.4}
"""Speed-ups of (1.25, 1.25) that the project promises, by prompts per step."""
MIN_TAIL_RATIO = 10.0
"""The workload must have a tail: its longest response over its median one."""
RESAMPLES = 10_000


@dataclass(slots=True)
class RoundResult:
    kind: RoundKind
    began_s: float
    seconds: float = 0.0
    trained: list[int] = field(default_factory=list)
    """Lengths in tokens of the samples that would be trained on."""
    generated_tokens: int = 0
    """All that was decoded for the round, aborted samples included."""


class Arm:
    """One setting: a job of its own, driven round by round on an engine that all arms share."""

    def __init__(self, policy: Policy, config: RunConfig, tail: TailBatchingConfig) -> None:
        rollout = config.rollout
        self.tail = tail
        self.rounds: list[RoundResult] = []
        self._policy = policy
        self._sampling = _sampling(rollout, config.seed)
        self._cursor = PromptCursor(
            "train", len(policy.train_prompts.rows), config.seed, True, None
        )
        job = Job(
            JobConfig(
                prompts_per_step=rollout.prompts_per_step,
                samples_per_prompt=rollout.samples_per_prompt,
                max_steps=None,
                tail_batching=tail,
            )
        )
        self._bus = Bus(job, RealClock(0.0), [self, Recorded(Defer, SyncWeights)])
        self._round_over = threading.Event()
        self._error: BaseException | None = None
        self._lengths: dict[SampleId, int] = {}
        self._next_event: Event = RunStarted(time_s=0.0)

    def run_round(self) -> None:
        """One round, from launch to the groups that would be trained on."""
        self._lengths.clear()
        self._round_over.clear()
        self._policy.engine.start(self._on_outputs, self._on_error)
        job = self._bus.job
        asyncio.run(self._policy.engine.update_weights(job.version))
        self._bus.take(self._next_event)
        self._round_over.wait()
        if self._error is not None:
            raise self._error
        version = job.version + 1
        self._bus.take(Trained(time_s=0.0, step=job.step + 1, version=version))
        self._bus.take(WeightsSynced(time_s=0.0, version=version))

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Called in the engine's thread, between two decode steps."""
        with self._bus.lock:
            for output in outputs:
                tokens = getattr(output.event, "num_tokens", 0)
                self._lengths[output.event.sample] = tokens
                self.rounds[-1].generated_tokens += tokens
                self._bus.take(output.event)

    def _on_error(self, error: BaseException) -> None:
        self._error = error
        self._round_over.set()

    def routes(self) -> Routes:
        surprises = (CancelScore, Drop, Finish, Release, StartGradients)
        return {
            FetchPrompts: self._fetch,
            Launch: self._launch,
            Abort: lambda command: self._policy.engine.abort(command.samples),
            Score: self._score,
            TrainOn: self._end_round,
            Commit: self._commit,
            **dict.fromkeys(surprises, _surprise),
        }

    def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self._cursor.take(command.count)
        self._bus.take(
            PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            )
        )

    def _launch(self, command: Launch) -> None:
        rows = self._policy.train_prompts.rows
        self.rounds.append(RoundResult(command.kind, time.perf_counter()))
        self._policy.engine.submit(
            [
                GenerationRequest(
                    sample=sample,
                    prompt_tokens=rows[sample.prompt.row].tokens,
                    sampling=self._sampling,
                )
                for sample in command.samples
            ]
        )

    def _score(self, command: Score) -> None:
        self._bus.take(SampleScored(time_s=0.0, sample=command.sample, value=0.0))

    def _end_round(self, command: TrainOn) -> None:
        result = self.rounds[-1]
        result.seconds = time.perf_counter() - result.began_s
        result.trained = [self._lengths[s] for group in command.groups for s in group]
        self._round_over.set()

    def _commit(self, command: Commit) -> None:
        self._next_event = Committed(time_s=0.0, step=command.step)

    @property
    def name(self) -> str:
        tail = self.tail
        return f"{tail.prompt_factor:g}, {tail.sample_factor:g}" if tail.enabled else "sync"

    def period(self, prompts_per_step: int) -> int:
        """Rounds after which the long queue is empty again."""
        deferred = self.tail.factors.num_prompts(prompts_per_step) - prompts_per_step
        assert deferred == 0 or prompts_per_step % deferred == 0, (prompts_per_step, deferred)
        return 1 + prompts_per_step // deferred if deferred else 1


def _surprise(command: Command) -> None:
    raise AssertionError(f"not expected here: {command}")


def _sampling(rollout: RolloutConfig, seed: int) -> SamplingParams:
    return SamplingParams(
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        seed=seed,
    )


def run_size(
    policy: Policy, config: RunConfig, prompts_per_step: int, num_rounds: int
) -> list[dict[str, Any]]:
    """All arms at one round size; a row of results for each, the arm that waits for all first."""
    rollout = dataclasses.replace(config.rollout, prompts_per_step=prompts_per_step)
    config = dataclasses.replace(config, rollout=rollout)
    settings = [SYNC] + [
        TailBatchingConfig(prompt_factor=p, sample_factor=r, flush_each_epoch=False)
        for p, r in FACTORS
    ]
    for _ in range(WARMUP_ROUNDS):
        for tail in settings:
            Arm(policy, config, tail).run_round()
    arms = [Arm(policy, config, tail) for tail in settings]
    for number in range(num_rounds):
        first = number % len(arms)  # nobody always runs behind the same neighbour
        for arm in arms[first:] + arms[:first]:
            arm.run_round()
    return [_row(arm, arms[0], prompts_per_step, rollout.samples_per_prompt) for arm in arms]


def _row(arm: Arm, sync: Arm, prompts_per_step: int, samples_per_prompt: int) -> dict[str, Any]:
    seconds = [r.seconds for r in arm.rounds]
    sync_seconds = [r.seconds for r in sync.rounds]
    by_kind = {
        kind: [r.seconds for r in arm.rounds if r.kind is kind]
        for kind in (RoundKind.SHORT, RoundKind.LONG)
    }
    trained = [length for r in arm.rounds for length in r.trained]
    sync_trained = [length for r in sync.rounds for length in r.trained]
    assert len(trained) == len(sync_trained), "the arms settled different numbers of prompts"
    low, high = _speedup_interval(sync_seconds, seconds, arm.period(prompts_per_step))
    row = {
        "size": f"{prompts_per_step}x{samples_per_prompt}",
        "arm": arm.name,
        "rounds": len(seconds),
        "mean_s": statistics.fmean(seconds),
        "speedup": statistics.fmean(sync_seconds) / statistics.fmean(seconds),
        "speedup_95": [low, high],
        "short_mean_s": statistics.fmean(by_kind[RoundKind.SHORT]) if arm is not sync else None,
        "long_mean_s": statistics.fmean(by_kind[RoundKind.LONG])
        if by_kind[RoundKind.LONG]
        else None,
        "generated_per_kept": sum(r.generated_tokens for r in arm.rounds) / sum(trained),
        "length_over_sync": statistics.fmean(trained) / statistics.fmean(sync_trained),
    }
    return row | (_tail(sync) if arm is sync else {})


def _tail(sync: Arm) -> dict[str, float]:
    """How long the tail is, over the whole workload and seen from single rounds."""
    lengths = [length for r in sync.rounds for length in r.trained]
    ratios = [max(r.trained) / statistics.median(r.trained) for r in sync.rounds]
    return {
        "mean_tokens": statistics.fmean(lengths),
        "median_tokens": statistics.median(lengths),
        "max_tokens": max(lengths),
        "max_over_median": max(lengths) / statistics.median(lengths),
        "max_over_median_per_round": statistics.fmean(ratios),
    }


def _speedup_interval(
    sync_s: Sequence[float], arm_s: Sequence[float], period: int
) -> tuple[float, float]:
    """95 % interval of mean sync_s / mean arm_s by a bootstrap over whole periods.

    Within a period both arms settle the same prompts, so periods are resampled in pairs.
    """
    sync_sums = np.add.reduceat(np.asarray(sync_s), np.arange(0, len(sync_s), period))
    arm_sums = np.add.reduceat(np.asarray(arm_s), np.arange(0, len(arm_s), period))
    picks = np.random.default_rng(0).integers(len(arm_sums), size=(RESAMPLES, len(arm_sums)))
    ratios = sync_sums[picks].sum(axis=1) / arm_sums[picks].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'P0xR0':7}{'factors':>11}{'mean s':>9}{'speed-up':>10}{'95 %':>14}{'short s':>9}"
        f"{'long s':>8}{'gen/kept':>10}{'length':>8}"
    )
    for row in rows:
        low, high = row["speedup_95"]
        short, long = (
            f"{row[key]:.3f}" if row[key] is not None else ""
            for key in ("short_mean_s", "long_mean_s")
        )
        print(
            f"{row['size']:7}{row['arm']:>11}{row['mean_s']:9.3f}{row['speedup']:10.2f}"
            f"{f'{low:.2f}-{high:.2f}':>14}{short:>9}{long:>8}"
            f"{row['generated_per_kept']:10.2f}{row['length_over_sync']:8.2f}"
        )
        if row["arm"] == "sync":
            print(
                f"{'':18}tokens: mean {row['mean_tokens']:.1f}, median {row['median_tokens']:g}, "
                f"longest {row['max_tokens']} = {row['max_over_median']:.1f} x median "
                f"(in a single round {row['max_over_median_per_round']:.1f} x on average)"
            )


def check(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each promise beside what was measured."""
    checks = []
    for row in rows:
        prompts_per_step = int(row["size"].split("x")[0])
        if row["arm"] == "sync":
            what, needed, measured = "longest over median", MIN_TAIL_RATIO, row["max_over_median"]
        elif row["arm"] == "1.25, 1.25" and prompts_per_step in TARGETS:
            what, needed, measured = "speed-up", TARGETS[prompts_per_step], row["speedup"]
        else:
            continue
        checks.append(
            {
                "what": f"{what} at {row['size']}",
                "needed": needed,
                "measured": measured,
                "met": measured >= needed,
            }
        )
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_arguments(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="prompts per step")
    parser.add_argument("--rounds", type=int, help="rounds per arm, a multiple of 15")
    parser.add_argument("--quick", action="store_true", help="a smoke test; no result is written")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds % 15:
        parser.error("--rounds must be a multiple of 15: the long queue is then empty at the end")
    plan = QUICK_ROUNDS if args.quick else ROUNDS
    sizes = args.sizes or list(plan)
    if any(size % 4 for size in sizes):
        parser.error("--sizes must be multiples of 4: the long queue is then empty at the end")
    config = load_workload(args)
    policy = load_policy(config, threads=args.threads)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        num_rounds = args.rounds or plan.get(size, 15)
        rows += (new := run_size(policy, config, size, num_rounds))
        print_rows(new)
    asyncio.run(policy.engine.close())
    checks = check(rows)
    for item in checks:
        verdict = "met" if item["met"] else "NOT MET"
        print(f"{item['what']}: {item['measured']:.2f}, needed {item['needed']:g}: {verdict}")
    if args.quick:
        return 0
    payload = {"workload": describe_workload(config, args), "checks": checks, "rows": rows}
    print(f"written: {write_result('tail_batching', payload).name}")
    return 0 if all(item["met"] for item in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
