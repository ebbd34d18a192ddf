"""What replies of a judge, and answers to it, can do: fuzzed replies, attacks on gullible judges.

Replies: mutated verdicts and rubbish from a fixed seed, read by the strict reader and by an oracle
that shares no code with it. Any exception, any score where the oracle has none, any other score, is
counted. Attacks: answers without merit, shown to a stub judge that is gullible in stated ways,
through the whole reward and, for comparison, put into the prompt as they are.

    python benchmarks/judge_fuzz.py [--replies 100000] [--seed 20]
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import write_result

from rollpacker.rewards.judge.verdicts import Scale, Unreadable, read_verdict
from rollpacker.rewards.reward import Scored
from tests.rewards.judge_attacks import HONEST, attacks
from tests.rewards.judge_run import paid, sample, scored
from tests.rewards.judge_stub import GULLIBLE, gullible_judge
from tests.rewards.reply_fuzz import readable, replies

REPLY_ID, DELIMITER = "3f9a02c1", "0123456789abcdef"


def fuzz_replies(count: int, seed: int) -> dict[str, Any]:
    """Counts over all replies; the slowest reading in seconds."""
    counts: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    slowest_s = 0.0
    scale = Scale()
    for reply in replies(count, seed=seed, reply_id=REPLY_ID, delimiter=DELIMITER):
        expected = readable(reply, REPLY_ID, DELIMITER)
        started = time.perf_counter()
        try:
            found = read_verdict(reply, scale=scale, reply_id=REPLY_ID, delimiter=DELIMITER)
        except BaseException as error:
            counts["exceptions"] += 1
            reasons[type(error).__name__] += 1
            continue
        slowest_s = max(slowest_s, time.perf_counter() - started)
        if isinstance(found, Unreadable):
            counts["unreadable"] += 1
            counts["refused_though_sound"] += expected is not None
            reasons[re.sub(r"\d+", "N", found.why)] += 1
        else:
            counts["read"] += 1
            counts["positive_though_unreadable"] += expected is None and found.score > 0
            counts["zero_though_unreadable"] += expected is None and found.score <= 0
            counts["another_score"] += expected is not None and expected != found.score
    wrong = ("exceptions", "positive_though_unreadable", "zero_though_unreadable", "another_score")
    return {
        "replies": count,
        "seed": seed,
        **{name: counts[name] for name in (*wrong, "refused_though_sound", "read", "unreadable")},
        "slowest_ms": round(1000 * slowest_s, 3),
        "reasons": dict(reasons.most_common()),
    }


def attack_judges() -> dict[str, Any]:
    """How many attacks are paid by each kind of gullible judge, alone and all ways at once."""
    answers = attacks()
    kinds = {name: {name: way} for name, way in GULLIBLE.items()}
    kinds |= {"repeats_verdicts": {"echo": None}, "every_way": GULLIBLE}
    by_kind = {}
    for kind, ways in kinds.items():
        through, without_verdict = paid(answers, fenced=True, kinds=[ways])
        bare, _ = paid(answers, fenced=False, kinds=[ways])
        by_kind[kind] = {
            "paid": len(through),
            "without_verdict": without_verdict,
            "paid_if_put_into_the_prompt_as_they_are": len(bare),
        }
    honest, *_ = scored(lambda asked: gullible_judge(asked, {}), *map(sample, HONEST))
    accepted = sum(isinstance(verdict, Scored) and verdict.value == 1.0 for verdict in honest)
    paid_by_any, _ = paid(answers, fenced=True)
    return {
        "attacks": len(answers),
        "paid": len(paid_by_any),
        "false_positive_rate": len(paid_by_any) / len(answers),
        "by_kind": by_kind,
        "honest": len(HONEST),
        "honest_accepted": accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    result = {
        "fuzz": fuzz_replies(options.replies, options.seed),
        "attacks": attack_judges(),
    }
    for name, part in result.items():
        print(name, *(f"  {key}: {value}" for key, value in part.items()), sep="\n")
    if not options.no_write:
        print(write_result("judge_fuzz", result))


if __name__ == "__main__":
    main()
