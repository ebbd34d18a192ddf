"""Fuzzed answers through the math reward, sandbox included: nothing hangs, dies, runs or wins.

Six kinds of answers (grammar, mutations of a corpus, raw bytes, token soup, spliced answers, nasty
sizes) against right answers of the same corpus. Every check has a limit of `--limit` seconds.
Counted: verdicts, checks that went beyond limit + 0.5 s, failures of the sandbox, positive verdicts
that an oracle of its own (tests/rewards/math_strings.py) does not confirm and nobody has reviewed,
and whether a file appeared that some of the answers try to create. Exit code 1 if any is not 0.

    python benchmarks/math_fuzz.py [--count 100000] [--seed 0] [--limit 2] [--show]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from itertools import islice
from typing import Any

from machine import ROOT, write_result

sys.path.insert(0, str(ROOT))

from rollpacker.rewards.math.math_reward import MathConfig, MathReward
from rollpacker.rewards.reward import (
    Cause,
    Failed,
    RewardConfig,
    RewardInput,
)
from rollpacker.rewards.shared import Shared
from rollpacker.sandbox.sandbox import SandboxConfig
from tests.rewards.math_strings import fuzzed, may_be_right

ENDED = "the checker ended without a verdict"
"""What a payload that was run (`os._exit`) leaves behind."""
CHUNK = 500
GRACE_S = 0.5


def sample(gold: str, completion: str) -> RewardInput:
    return RewardInput(
        prompt="?",
        completion=completion,
        completion_tokens=(),
        finish_reason="stop",
        columns={"answer": gold},
    )


class Tally:
    """What came of the answers so far."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.verdicts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.late = 0
        self.unconfirmed: list[tuple[str, str]] = []

    def add(self, gold: str, text: str, verdict: Any) -> None:
        if isinstance(verdict, Failed):
            self.verdicts[f"no verdict: {verdict.cause}"] += 1
            self.reasons[verdict.reason] += 1
        else:
            self.verdicts["right" if verdict.value else "wrong"] += 1
            if verdict.value and not may_be_right(gold, text):
                self.unconfirmed.append((gold, text))
        if verdict.seconds:
            self.seconds.append(verdict.seconds)
            self.late += verdict.seconds > self.limit_s + GRACE_S

    def failures(self) -> dict[str, int]:
        return {
            "late": self.late,
            "sandbox_failures": self.verdicts[f"no verdict: {Cause.INFRASTRUCTURE}"],
            "unconfirmed_right": len(self.unconfirmed),
            "checker_ended": sum(n for why, n in self.reasons.items() if ENDED in why),
        }


async def run(reward: MathReward, count: int, seed: int, tally: Tally) -> None:
    pairs = fuzzed(count, seed)
    done = 0
    while chunk := list(islice(pairs, CHUNK)):
        samples = [sample(gold, text) for gold, text in chunk]
        verdicts = await reward.score(samples, timeout_s=tally.limit_s)
        for (gold, text), verdict in zip(chunk, verdicts, strict=True):
            tally.add(gold, text, verdict)
        done += len(chunk)
        if done % 10_000 == 0:
            print(f"{done:,}: {dict(tally.verdicts)}, {tally.failures()}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=2.0, help="seconds for each check")
    parser.add_argument("--show", action="store_true", help="print what is not confirmed")
    args = parser.parse_args()
    shared = Shared(SandboxConfig())
    entry = RewardConfig(function="math")
    reward = MathReward(MathConfig(), entry=entry, name="math", shared=shared)
    tally = Tally(args.limit)
    began = time.perf_counter()
    shared.run(lambda: run(reward, args.count, args.seed, tally))
    wall_s = time.perf_counter() - began
    if args.show:
        for gold, text in tally.unconfirmed:
            print("not confirmed:", repr(gold), repr(text))
        print(tally.reasons.most_common(20))
    cuts = statistics.quantiles(tally.seconds, n=100)
    result = {
        "count": args.count,
        "seed": args.seed,
        "limit_s": args.limit,
        "verdicts": dict(sorted(tally.verdicts.items())),
        "failures": tally.failures(),
        "sent_to_the_sandbox": len(tally.seconds),
        "ms_median": round(1000 * cuts[49], 2),
        "ms_p99": round(1000 * cuts[98], 2),
        "s_longest": round(max(tally.seconds), 3),
        "wall_s": round(wall_s, 1),
    }
    print(result)
    write_result("math_fuzz", result)
    return int(any(tally.failures().values()))


if __name__ == "__main__":
    sys.exit(main())
