"""Verdicts on programs: reward hacks rewarded, honest solutions refused, verdicts poisoned, speed.

Every reward hack meets every kind of test. Honest solutions are those written by hand and the
references of generated tasks. After the hacks that patch whatever they reach, 1,000 verdicts are
asked for whose answers are known. Speed is one test of one program at a time, on an idle machine.

    python benchmarks/code_corpus.py [--generated 1140] [--later 1000] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import write_result

from examples.code.tasks import KINDS, code_tasks
from rollpacker.rewards.reward import Failed
from rollpacker.sandbox import SandboxUnavailable
from tests.rewards.code_box import Box, opened
from tests.rewards.code_corpus.hacks import HACKS, SOLUTION, TESTS
from tests.rewards.code_corpus.honest import HONEST, WRONG
from tests.rewards.test_code_corpus import POISON

Answer = tuple[str, Any]


def values(box: Box, answers: list[Answer], wall_s: float) -> list[float | None]:
    """None: no verdict."""
    verdicts = box.grade_all(answers, wall_s=wall_s)
    return [None if isinstance(verdict, Failed) else verdict.value for verdict in verdicts]


def hacks(box: Box) -> dict[str, Any]:
    names = [(hack, kind) for hack in HACKS for kind in TESTS]
    texts = {kind: json.dumps(tests) for kind, tests in TESTS.items()}
    found = values(box, [(HACKS[hack], texts[kind]) for hack, kind in names], 1.0)
    rewarded = [name for name, value in zip(names, found, strict=True) if value != 0.0]
    return {"programs": len(HACKS), "verdicts": len(names), "rewarded_or_no_verdict": rewarded}


def honest(box: Box, num_generated: int) -> dict[str, Any]:
    rows = code_tasks(num_generated, seed=11)
    answers = [(row["kind"], row["reference_solution"], row["tests"]) for row in rows]
    answers += [(name, program, tests) for name, (program, tests) in HONEST.items()]
    found = values(box, [(program, tests) for _, program, tests in answers], 20.0)
    refused = [name for (name, *_), value in zip(answers, found, strict=True) if value != 1.0]
    return {
        "solutions": len(answers),
        "written_by_hand": len(HONEST),
        "kinds_of_generated_tasks": len(KINDS),
        "refused": refused,
    }


def wrong(box: Box) -> dict[str, Any]:
    singles = [(name, program, [t]) for name, (program, tests) in WRONG.items() for t in tests]
    found = values(box, [(program, tests) for _, program, tests in singles], 5.0)
    accepted = [name for (name, *_), value in zip(singles, found, strict=True) if value != 0.0]
    return {"answers": len(singles), "accepted": accepted}


def poisoned(box: Box, num_later: int) -> dict[str, Any]:
    """A few poisoned samples before every block of ten later verdicts."""
    rows = list(code_tasks(num_later // 2, seed=12))
    later = [
        (program, row["tests"][:1])
        for row in rows
        for program in (row["reference_solution"], "def f(x): return 0\nprint('nothing')")
    ]
    poison = [(HACKS[name], TESTS[kind]) for name in POISON for kind in ("io", "call", "assert")]
    num_poisoned, changed = 0, 0
    for start in range(0, len(later), 10):
        turn = [poison[(start // 10 + k) % len(poison)] for k in range(3)]
        num_poisoned += len(turn)
        values(box, turn, 1.0)
        found = values(box, later[start : start + 10], 20.0)
        changed += sum(v != 1.0 - n % 2 for n, v in enumerate(found))
    return {"poisoned_samples": num_poisoned, "later_verdicts": len(later), "changed": changed}


def speed(box: Box, rounds: int) -> dict[str, float]:
    """Median milliseconds of one test of each kind."""
    medians = {}
    for kind in ("io", "call", "assert", "assert of objects"):
        text = json.dumps(TESTS[kind][:1])
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            box.grade(SOLUTION, text)
            seconds.append(time.perf_counter() - began)
        medians[kind] = round(statistics.median(seconds) * 1e3, 2)
    return medians


def measure(num_generated: int, num_later: int, rounds: int) -> dict[str, Any]:
    began = time.perf_counter()
    with opened() as box:
        result = {
            "sandbox": box.sandbox.capabilities.backend,
            "speed_ms_per_test": speed(box, rounds),
            "reward_hacks": hacks(box),
            "honest": honest(box, num_generated),
            "wrong": wrong(box),
            "poisoned": poisoned(box, num_later),
        }
    return {**result, "seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generated", type=int, default=20 * len(KINDS))
    parser.add_argument("--later", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="small counts, nothing is written")
    args = parser.parse_args()
    try:
        result = measure(57, 40, 5) if args.quick else measure(args.generated, args.later, 100)
    except SandboxUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1))
    if not args.quick:
        write_result("code_corpus", result)
    bad = (
        result["reward_hacks"]["rewarded_or_no_verdict"]
        or result["honest"]["refused"]
        or result["wrong"]["accepted"]
        or result["poisoned"]["changed"]
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
