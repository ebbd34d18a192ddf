"""Decode steps with drafts against decode steps without, on a frozen policy.

Rounds of the quickstart's workload run on two engines that differ in `draft_tokens` alone, turn by
turn, the order changing from round to round. Both draw the same responses: tokens are compared, all
of them, and log-probabilities. *Long* rounds hold what tail batching defers: of the prompts of five
plain rounds the fifth with the longest responses. The *last tenth* of a round is the time after
nine tenths of its samples have ended.

    python benchmarks/drafts.py [--sizes 8 16 64] [--rounds N] [--quick]
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab import bench
from workload import QUICKSTART, describe_workload, load_workload, sampling_of

from rollpacker.config.schema import RunConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded.drafts import KINDS, Drafter
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from rollpacker.run.parts.policy import LoadedPolicy, load_policy

SAMPLES = 8
ROUNDS = {8: 40, 16: 30, 64: 10}
"""Per kind of round, by prompts."""
ROUNDS_PER_LONG_ONE = 5
WARMUP_ROUNDS = 2
MATCHES = ("0-1", "2", "3-4", "5-8", "9-16", "17+")
"""Equal tokens before the draft: the drafter's classes."""
RESAMPLES = 10_000


@dataclass(slots=True)
class Round:
    """One arm's share of a round."""

    responses: dict[SampleId, tuple[tuple[int, ...], tuple[float, ...]]] = field(
        default_factory=dict
    )
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(2))
    """Seconds of the wall clock and of the processor."""
    last_tenth: np.ndarray = field(default_factory=lambda: np.zeros(2))
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def clocks() -> np.ndarray:
    """Of the wall, and of the processor: one thread works, whoever shares the machine."""
    return np.array([time.perf_counter(), time.process_time()])


class CountingDrafter(Drafter):
    """Remembers over all rounds how many drafted tokens were right."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.counts = np.zeros((len(KINDS), len(MATCHES), 2), np.int64)
        """Drafts that were right and that were tried, by source and class of match length."""

    def judge(self, num_new: np.ndarray) -> None:
        for (kind, size, drafted), new in zip(self._proposed, num_new.tolist(), strict=True):
            self.counts[kind, size] += (new - 1, min(new, drafted))
        super().judge(num_new)

    def describe(self) -> dict[str, dict[str, dict[str, float]]]:
        return {
            kind: {
                match: {"tried": int(tried), "right": round(int(right) / int(tried), 3)}
                for match, (right, tried) in zip(MATCHES, counts, strict=True)
                if tried
            }
            for kind, counts in zip(KINDS, self.counts, strict=True)
        }


class Arm:
    """An engine of its own."""

    def __init__(self, config: RunConfig, draft_tokens: int | None) -> None:
        engine = config.rollout.engine
        if draft_tokens is not None:
            engine = dataclasses.replace(engine, draft_tokens=draft_tokens)
        rollout = dataclasses.replace(config.rollout, engine=engine)
        self.policy: LoadedPolicy = load_policy(dataclasses.replace(config, rollout=rollout))
        self.draft_tokens = engine.draft_tokens
        self.drafter = CountingDrafter(engine.draft_tokens)
        if engine.draft_tokens:
            self.policy.engine._drafter = self.drafter
        self.rounds: list[Round] = []

    def run(self, requests: Sequence[GenerationRequest]) -> Round:
        engine, done, result = self.policy.engine, threading.Event(), Round()
        ended_s: list[np.ndarray] = []

        def listen(outputs: Sequence[EngineOutput]) -> None:
            for output in outputs:
                assert output.response is not None, output.event
                ended_s.append(clocks())
                response = output.response
                result.responses[response.sample] = (response.tokens, response.log_probs)
            if len(ended_s) == len(requests):
                done.set()

        engine.start(listen, lambda error: done.set())
        before = engine.status()
        start = clocks()
        engine.submit(requests)
        done.wait()
        after = engine.status()
        assert len(ended_s) == len(requests), "the engine died"
        result.seconds = ended_s[-1] - start
        result.last_tenth = ended_s[-1] - ended_s[-(-9 * len(requests) // 10) - 1]
        result.steps = after.decode_steps - before.decode_steps
        result.drafted = after.drafted_tokens - before.drafted_tokens
        result.accepted = after.accepted_tokens - before.accepted_tokens
        return result


def round_of(
    policy: LoadedPolicy, config: RunConfig, rows: Sequence[int]
) -> list[GenerationRequest]:
    sampling = sampling_of(config)
    prompts = policy.train_prompts.rows
    return [
        GenerationRequest(
            sample=SampleId(PromptId("train", 0, row), index, 0),
            prompt_tokens=tuple(prompts[row].tokens),
            sampling=sampling,
        )
        for row in rows
        for index in range(SAMPLES)
    ]


def longest_fifth(result: Round, rows: Sequence[int]) -> list[int]:
    """Rows of the prompts whose longest response is among the longest."""
    longest = dict.fromkeys(rows, 0)
    for sample, (tokens, _) in result.responses.items():
        longest[sample.prompt.row] = max(longest[sample.prompt.row], len(tokens))
    count = -(-len(rows) // ROUNDS_PER_LONG_ONE)
    return sorted(rows, key=lambda row: -longest[row])[:count]


def plain_and_long(arm: Arm, config: RunConfig, size: int, count: int) -> Iterator[tuple[str, Any]]:
    """(kind, rows) of so many plain rounds; long ones as soon as there is enough for one."""
    num_rows = len(arm.policy.train_prompts.rows)
    deferred: list[int] = []
    for number in range(WARMUP_ROUNDS + count):
        rows = [(number * size + place) % num_rows for place in range(size)]
        yield ("warm-up" if number < WARMUP_ROUNDS else "plain"), rows
        deferred += longest_fifth(arm.rounds[-1], rows)
        while len(deferred) >= size:
            yield "long", deferred[:size]
            del deferred[:size]


def measure(config: RunConfig, size: int, count: int, draft_tokens: int | None) -> dict[str, Any]:
    arms = {"off": Arm(config, 0), "on": Arm(config, draft_tokens)}
    kinds: list[str] = []
    for kind, rows in plain_and_long(arms["off"], config, size, count):
        requests = round_of(arms["off"].policy, config, rows)
        kinds.append(kind)
        for name in sorted(arms, reverse=bool(len(kinds) % 2)):
            arms[name].rounds.append(arms[name].run(requests))
    for arm in arms.values():
        asyncio.run(arm.policy.engine.close())
    return {
        "prompts": size,
        "samples_per_prompt": SAMPLES,
        "draft_tokens": arms["on"].draft_tokens,
        **compare_tokens(arms["off"].rounds, arms["on"].rounds),
        **{
            kind: compare_speed(
                [one for one, of in zip(arms["off"].rounds, kinds, strict=True) if of == kind],
                [one for one, of in zip(arms["on"].rounds, kinds, strict=True) if of == kind],
            )
            for kind in ("plain", "long")
            if kind in kinds
        },
        "accepted_by_source_and_match": arms["on"].drafter.describe(),
    }


def compare_tokens(off: Sequence[Round], on: Sequence[Round]) -> dict[str, Any]:
    num_tokens = num_different = num_responses = 0
    largest = 0.0
    for without, drafted in zip(off, on, strict=True):
        for sample, (tokens, log_probs) in without.responses.items():
            num_tokens += len(tokens)
            num_responses += 1
            others, other_log_probs = drafted.responses[sample]
            if tokens != others:
                num_different += 1
            else:
                gaps = np.abs(np.subtract(log_probs, other_log_probs))
                largest = max(largest, float(gaps.max()))
    return {
        "responses": num_responses,
        "tokens": num_tokens,
        "different_responses": num_different,
        "largest_log_prob_difference": largest,
    }


def compare_speed(off: Sequence[Round], on: Sequence[Round]) -> dict[str, Any]:
    steps_off, steps_on = (sum(one.steps for one in arm) for arm in (off, on))
    drafted, accepted = sum(one.drafted for one in on), sum(one.accepted for one in on)
    return {
        "rounds": len(off),
        "longest_response_median": statistics.median(
            max(len(tokens) for tokens, _ in one.responses.values()) for one in off
        ),
        "steps_off": steps_off,
        "steps_on": steps_on,
        "steps_fewer": round(1 - steps_on / steps_off, 3),
        "seconds_off": round(float(sum(one.seconds[0] for one in off)), 3),
        "seconds_on": round(float(sum(one.seconds[0] for one in on)), 3),
        **{
            f"{name}{part}_speed": _ratio(
                [getattr(one, field)[clock] for one in off],
                [getattr(one, field)[clock] for one in on],
            )
            for clock, name in enumerate(("", "processor_"))
            for field, part in (("seconds", "round"), ("last_tenth", "last_tenth"))
        },
        "drafted": drafted,
        "accepted": accepted,
        "accepted_share": round(accepted / max(1, drafted), 3),
    }


def _ratio(off: Sequence[float], on: Sequence[float]) -> dict[str, Any]:
    """The ratio of sums, its 95 % bootstrap interval over rounds, and the median of the ratios."""
    ours, theirs = np.array(on), np.array(off)
    draws = np.random.default_rng(0).integers(0, len(ours), (RESAMPLES, len(ours)))
    ratios = theirs[draws].sum(axis=1) / ours[draws].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return {
        "ratio": round(float(theirs.sum() / ours.sum()), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
        "median_of_rounds": round(float(np.median(theirs / ours)), 3),
    }


def main(
    config: Path = QUICKSTART,
    model: Path | None = None,
    threads: int = 1,
    sizes: Sequence[int] = tuple(ROUNDS),
    rounds: int | None = None,
    draft_tokens: int | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """`rounds`: plain ones per size. `draft_tokens`: instead of the default."""
    workload = load_workload(config, model, threads)
    torch.set_num_threads(threads)
    results = []
    for size in sizes:
        count = rounds or (10 if quick else ROUNDS.get(size, 30))
        results.append(measure(workload, size, count, draft_tokens))
        print(results[-1], flush=True)
    return {"workload": describe_workload(workload, config), "results": results}


if __name__ == "__main__":
    bench(main)
