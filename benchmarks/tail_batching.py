"""Tail batching against waiting for all, on a frozen policy.

The real engine and core work off the quickstart's workload; nothing is trained and every reward is
0 at once. Arms take turns round by round in one process; at the end each settles all that it has
begun. All draw the same prompts in order, with the same noise for the same (prompt, sample). Times
are seconds per prompt that would be trained on, the settling included. Of the arms that only
reorder, every response is compared with that of the arm that waits for all.

    python benchmarks/tail_batching.py [--sizes 8 16] [--rounds 30] [--quick]
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lab import bench
from workload import QUICKSTART, describe_workload, load_workload, sampling_of

from rollpacker.bus import Bus, Recorded, Routes, Unsaid
from rollpacker.config.schema import RunConfig
from rollpacker.core import commands, events
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.messages import COMMANDS
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.cursor import PromptCursor
from rollpacker.engines.engine import EngineOutput
from rollpacker.run.parts.policy import LoadedPolicy, load_policy
from rollpacker.run.ports.carried import CarriedTokens
from rollpacker.run.ports.clock import RealClock

SYNC = TailBatchingConfig(enabled=False)
PUBLISHED = TailBatchingConfig(selection="published", flush_each_epoch=False)
_POOLED = {"stragglers": "pool", "max_deferrals": 16}
ARMS: dict[str, tuple[TailBatchingConfig, bool]] = {
    "off": (SYNC, False),
    "published": (PUBLISHED, False),
    **{
        f"{name}{', drafts' if drafts else ''}": (
            TailBatchingConfig(flush_each_epoch=False, **keys),
            drafts,
        )
        for drafts in (False, True)
        for name, keys in {
            "queue 1.25": {"prompt_factor": 1.25},
            "queue 1.5": {"prompt_factor": 1.5},
            "pool 1.25": {"prompt_factor": 1.25, **_POOLED},
            "pool 1.5": {"prompt_factor": 1.5, **_POOLED},
            "pool 2": {"prompt_factor": 2.0, **_POOLED},
        }.items()
        if not drafts or name in ("queue 1.5", "pool 1.5")
    },
    "off, drafts": (SYNC, True),
}
"""Settings, and whether the engine drafts (`rollout.engine.draft_tokens`)."""
PROMISED = "queue 1.5, drafts"
"""Tail batching as runs have it by default."""
ROUNDS = {8: 90, 16: 75, 64: 30}
"""Rounds per arm, by prompts per step."""
QUICK_ROUNDS = {8: 10}
BLOCK = 5
"""Rounds that are resampled together."""
WARMUP_ROUNDS = 3
TARGETS = {8: 2.0, 16: 2.2, 64: 1.6}
"""Speed-ups of the promised arm, by prompts per step."""
MAX_GENERATED = 1.1
"""Tokens that it may generate for each that it trains on."""
MIN_TAIL_RATIO = 10.0
"""The workload must have a tail: its longest response over its median one."""
RESAMPLES = 10_000


@dataclass(slots=True)
class RoundResult:
    kind: commands.RoundKind
    began_s: float
    seconds: float = 0.0
    trained: dict[tuple[PromptId, int], tuple[int, ...]] = field(default_factory=dict)
    """Tokens of the samples that would be trained on, by prompt and index."""
    generated_tokens: int = 0
    """All that was decoded for the round, aborted samples included."""

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.trained.values()]


class Arm:
    """One setting: a job of its own, driven round by round on an engine that all arms share."""

    def __init__(
        self,
        policy: LoadedPolicy,
        config: RunConfig,
        name: str,
        tail: TailBatchingConfig,
        num_rounds: int,
    ) -> None:
        rollout = config.rollout
        self.name = name
        self.tail = tail
        self.finished = False
        self.num_carried = 0
        """Responses that were taken up where an earlier round had left them."""
        self.rounds: list[RoundResult] = []
        self._policy = policy
        self._sampling = sampling_of(config)
        self._cursor = PromptCursor(
            "train", len(policy.train_prompts.rows), config.seed, True, None
        )
        job = Job(
            JobConfig(
                prompts_per_step=rollout.prompts_per_step,
                samples_per_prompt=rollout.samples_per_prompt,
                max_steps=num_rounds,
                tail_batching=tail,
            )
        )
        self._carried = CarriedTokens(tail)
        ports = [self, self._carried, Recorded(commands.SyncWeights)]
        obeyed = {kind for port in ports for kind in port.routes()}
        unsaid = Unsaid(*(kind for kind in COMMANDS.values() if kind not in obeyed))
        self._bus = Bus(job, RealClock(0.0), [*ports, unsaid])
        self._round_over = threading.Event()
        self._error: BaseException | None = None
        self._launched: dict[SampleId, int] = {}
        """Tokens that each sample took up."""
        self._responses: dict[SampleId, tuple[int, ...]] = {}
        self._next_event: events.Event = events.RunStarted(time_s=0.0)

    def run_round(self) -> None:
        """One round, from launch to the groups that would be trained on; or the end."""
        self._round_over.clear()
        self._policy.engine.start(self._on_outputs, self._on_error)
        job = self._bus.job
        asyncio.run(self._policy.engine.update_weights(job.version))
        self._bus.take(self._next_event)
        self._round_over.wait()
        if self._error is not None:
            raise self._error
        if self.finished:
            return
        version = job.version + 1
        self._bus.take(events.Trained(time_s=0.0, step=job.step + 1, version=version))
        self._bus.take(events.WeightsSynced(time_s=0.0, version=version))

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Called in the engine's thread, between two decode steps."""
        with self._bus.lock:
            for output in outputs:
                event = output.event
                assert isinstance(event, events.SampleGenerated | events.SampleAborted), event
                had = self._launched.pop(event.sample)
                kept = had if event.num_kept is None else event.num_kept
                self.rounds[-1].generated_tokens += event.num_tokens - kept
                self._carried.ended(event, output.response)
                if isinstance(event, events.SampleGenerated) and output.response is not None:
                    self._responses[event.sample] = output.response.tokens
                self._bus.take(event)

    def _on_error(self, error: BaseException) -> None:
        self._error = error
        self._round_over.set()

    def routes(self) -> Routes:
        return {
            commands.FetchPrompts: self._fetch,
            commands.Launch: self._launch,
            commands.Abort: lambda command: self._policy.engine.abort(command.samples),
            commands.Score: self._score,
            commands.TrainOn: self._end_round,
            commands.Commit: self._commit,
            commands.Finish: self._finish,
        }

    def _fetch(self, command: commands.FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self._cursor.take(command.count)
        self._bus.take(
            events.PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            )
        )

    def _launch(self, command: commands.Launch) -> None:
        rows = self._policy.train_prompts.rows
        if not command.replaces:
            self.rounds.append(RoundResult(command.kind, time.perf_counter()))
        carried = command.carried or (0,) * len(command.samples)
        self.num_carried += sum(tokens > 0 for tokens in carried)
        self._launched.update(zip(command.samples, carried, strict=True))
        self._policy.engine.submit(self._carried.requests(command, rows, self._sampling))

    def _score(self, command: commands.Score) -> None:
        self._bus.take(events.SampleScored(time_s=0.0, sample=command.sample, value=0.0))

    def _end_round(self, command: commands.TrainOn) -> None:
        result = self.rounds[-1]
        result.seconds = time.perf_counter() - result.began_s
        result.trained = {
            (sample.prompt, sample.index): self._responses[sample]
            for group in command.groups
            for sample in group
        }
        self._responses.clear()
        self._round_over.set()

    def _commit(self, command: commands.Commit) -> None:
        self._carried.settle()
        self._next_event = events.Committed(time_s=0.0, step=command.step)

    def _finish(self, command: commands.Finish) -> None:
        self.finished = True
        self._round_over.set()

    @property
    def trained(self) -> dict[tuple[PromptId, int], tuple[int, ...]]:
        return {key: tokens for r in self.rounds for key, tokens in r.trained.items()}


def _drafting(config: RunConfig, draft_tokens: int) -> RunConfig:
    engine = dataclasses.replace(config.rollout.engine, draft_tokens=draft_tokens)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine=engine))


def run_size(
    policies: Sequence[LoadedPolicy], config: RunConfig, prompts_per_step: int, num_rounds: int
) -> list[dict[str, Any]]:
    """All arms at one round size; a row of results for each, the arm that waits for all first.
    `policies`: with an engine that does not draft, and with one that does."""
    rollout = dataclasses.replace(config.rollout, prompts_per_step=prompts_per_step)
    config = dataclasses.replace(config, rollout=rollout)
    for name, (tail, drafts) in ARMS.items():
        warm = Arm(policies[drafts], config, name, tail, WARMUP_ROUNDS + 1)
        for _ in range(WARMUP_ROUNDS):
            warm.run_round()
    arms = [
        Arm(policies[drafts], config, name, tail, num_rounds)
        for name, (tail, drafts) in ARMS.items()
    ]
    for number in range(num_rounds):
        first = number % len(arms)  # nobody always runs behind the same neighbour
        for arm in arms[first:] + arms[:first]:
            arm.run_round()
    for arm in arms:
        while not arm.finished:
            arm.run_round()
    return [_row(arm, arms[0], prompts_per_step, rollout.samples_per_prompt) for arm in arms]


def _row(arm: Arm, sync: Arm, prompts_per_step: int, samples_per_prompt: int) -> dict[str, Any]:
    trained, wanted = arm.trained, sync.trained
    prompts = {prompt for prompt, _ in wanted}
    of_wanted = [len(tokens) for (prompt, _), tokens in trained.items() if prompt in prompts]
    assert len(of_wanted) == len(wanted), "an arm left out a prompt"
    low, high = _speedup_interval(sync, arm)
    waits = (commands.RoundKind.LONG, commands.RoundKind.FLUSH)
    row = {
        "size": f"{prompts_per_step}x{samples_per_prompt}",
        "arm": arm.name,
        "rounds": len(arm.rounds),
        "mean_s": statistics.fmean(r.seconds for r in arm.rounds),
        "speedup": _seconds_per_sample(sync.rounds) / _seconds_per_sample(arm.rounds),
        "speedup_95": [low, high],
        "awaited_share": sum(r.seconds for r in arm.rounds if r.kind in waits)
        / sum(r.seconds for r in arm.rounds),
        "generated_per_kept": sum(r.generated_tokens for r in arm.rounds)
        / sum(map(len, trained.values())),
        "length_over_sync": statistics.fmean(of_wanted)
        / statistics.fmean(map(len, wanted.values())),
        "num_responses": len(wanted),
        "num_equal": sum(trained.get(key) == tokens for key, tokens in wanted.items()),
    }
    return row | (_tail(sync) if arm is sync else {})


def _seconds_per_sample(rounds: Sequence[RoundResult]) -> float:
    return sum(r.seconds for r in rounds) / sum(len(r.trained) for r in rounds)


def _tail(sync: Arm) -> dict[str, float]:
    """How long the tail is, over the whole workload and seen from single rounds."""
    lengths = [length for r in sync.rounds for length in r.lengths]
    ratios = [max(r.lengths) / statistics.median(r.lengths) for r in sync.rounds]
    return {
        "mean_tokens": statistics.fmean(lengths),
        "median_tokens": statistics.median(lengths),
        "max_tokens": max(lengths),
        "max_over_median": max(lengths) / statistics.median(lengths),
        "max_over_median_per_round": statistics.fmean(ratios),
    }


def _speedup_interval(sync: Arm, arm: Arm) -> tuple[float, float]:
    """95 % interval of the speed-up by a bootstrap over blocks of rounds, of both arms together."""
    sums = []
    for rounds in (sync.rounds, arm.rounds):
        starts = np.arange(0, len(rounds), BLOCK)
        seconds = np.add.reduceat([r.seconds for r in rounds], starts)
        samples = np.add.reduceat([len(r.trained) for r in rounds], starts)
        sums.append((seconds, samples))
    size = min(len(seconds) for seconds, _ in sums)
    picks = np.random.default_rng(0).integers(size, size=(RESAMPLES, size))
    per_sample = [
        seconds[picks].sum(axis=1) / samples[picks].sum(axis=1) for seconds, samples in sums
    ]
    low, high = np.quantile(per_sample[0] / per_sample[1], [0.025, 0.975])
    return float(low), float(high)


def check(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each promise beside what was measured."""
    checks = []
    for row in rows:
        size, arm = row["size"], row["arm"]
        target = TARGETS.get(int(size.split("x")[0]))
        if arm == "off":
            tail = row["max_over_median"]
            checks.append(_at_least(f"longest over median at {size}", MIN_TAIL_RATIO, tail))
        elif arm == "published":
            continue
        else:
            equal = row["num_equal"] / row["num_responses"]
            checks.append(_at_least(f"equal responses, {arm} at {size}", 1.0, equal))
        if arm == PROMISED and target is not None:
            checks.append(_at_least(f"speed-up, {arm} at {size}", target, row["speedup"]))
            generated = row["generated_per_kept"]
            checks.append(
                {
                    "what": f"generated per kept, {arm} at {size}",
                    "needed": MAX_GENERATED,
                    "measured": generated,
                    "met": generated <= MAX_GENERATED,
                }
            )
    return checks


def _at_least(what: str, needed: float, measured: float) -> dict[str, Any]:
    return {"what": what, "needed": needed, "measured": measured, "met": measured >= needed}


def main(
    config: Path = QUICKSTART,
    model: Path | None = None,
    threads: int = 1,
    sizes: Sequence[int] = (),
    rounds: int | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """`sizes`: prompts per step. `rounds`: per arm."""
    plan = QUICK_ROUNDS if quick else ROUNDS
    own = load_workload(config, model, threads)
    policies = [load_policy(_drafting(own, tokens), threads=threads) for tokens in (0, 15)]
    rows: list[dict[str, Any]] = []
    for size in sizes or plan:
        rows += run_size(policies, own, size, rounds or plan.get(size, 30))
    for policy in policies:
        asyncio.run(policy.engine.close())
    told = {"workload": describe_workload(own, config), "checks": check(rows)}
    return {**told, "rows": rows}


if __name__ == "__main__":
    bench(main, holds=lambda found: all(item["met"] for item in found["checks"]))
