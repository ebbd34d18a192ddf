"""Trajectories of random turns, tools and templates: trained on is what was drawn and given.

Eight templates in the formats of seven families (tests/dialogue/families.py), with tools and
without: a made-up sampler draws messages as their canonical tokens, as others of the same text, or
anything at all, ends its turns or is cut off; a made-up environment says anything, words that spell
the template's markers too. Counted, by template: dialogues, turns, tokens, and dialogues with
faults (tests/dialogue/played.py): tokens, mask and log-probs are held against the sampler's own
record; the text, and where every turn was canonical the tokens, against the template's rendering of
the whole; no words may become a marker; each message is read as it was meant. Exit code 1 if there
is any fault.

With --anew each turn stands behind the template's rendering of all messages before it, as where
earlier turns are rewritten (environment.rewrites=prefixes): the rows that the trainer takes are
held against the record of prompts and draws, token by token. Written to dialogue_rows.json.

    python benchmarks/dialogue_exact.py [--anew] [--count 100000] [--seed 0] [--workers 2]
        [--minutes M]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter, defaultdict
from functools import cache

from machine import ROOT, write_result

sys.path.insert(0, str(ROOT))

from tests.dialogue.families import FAMILIES
from tests.dialogue.played import Scene, play

Work = tuple[str, bool, int, int, int, bool]
SLICE = 200
scene_of = cache(Scene.of)


def played(work: Work) -> tuple[str, Counter[str], list[str], float]:
    """A slice of one template's dialogues, with tools or without."""
    name, tools, first, count, seed, anew = work
    began = time.process_time()
    scene = scene_of(name, tools=tools)
    counted: Counter[str] = Counter()
    shown: list[str] = []
    for number in range(first, first + count):
        one = play(random.Random(f"{seed} {name} {tools} {number}"), scene, anew=anew)
        trajectory = one.trajectory
        counted["trajectories"] += 1
        counted["turns"] += len(one.turns)
        counted["rows"] += len(trajectory.rows)
        counted["tokens_drawn"] += trajectory.num_sampled
        counted["tokens_given"] += len(trajectory.tokens) - trajectory.num_sampled
        counted["whole_text_compared"] += one.is_whole and not anew
        counted["whole_tokens_compared"] += one.is_canonical and not one.is_hostile and not anew
        counted["prompts_compared"] += len(one.turns) * (anew and not one.is_hostile)
        counted["spelling_markers"] += one.is_hostile
        counted["with_faults"] += bool(one.faults)
        shown += [f"{name}, dialogue {number}: {fault}" for fault in one.faults]
    key = f"{name}, tools" if tools else name
    return key, counted, shown[:5], time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--anew", action="store_true", help="each turn's prompt is rendered anew")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="stop then, with what was played")
    args = parser.parse_args()
    kinds = [
        (name, tools)
        for name, family in FAMILIES.items()
        for tools in ((False, True) if family.tools else (False,))
    ]
    shares = [args.count // len(kinds) + (n < args.count % len(kinds)) for n in range(len(kinds))]
    works = [
        (*kind, first, min(SLICE, share - first), args.seed, args.anew)
        for first in range(0, max(shares), SLICE)
        for kind, share in zip(kinds, shares, strict=True)
        if first < share
    ]
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    faults: list[str] = []
    cpu_s = 0.0
    began = time.monotonic()
    with multiprocessing.Pool(args.workers) as pool:
        for done, (key, counted, shown, seconds) in enumerate(pool.imap(played, works), 1):
            by_kind[key].update(counted)
            faults += shown
            cpu_s += seconds
            for fault in shown:
                print(fault, flush=True)
            if done % len(kinds) == 0:
                print(f"{done} of {len(works)} slices, {cpu_s:.0f} s", flush=True)
            if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
                break
    total: Counter[str] = sum(by_kind.values(), Counter())
    result = {
        "seed": args.seed,
        **total,
        "with_faults": total["with_faults"],
        "processor_s": round(cpu_s, 1),
        "faults": faults,
        "by_template": {key: dict(counted) for key, counted in by_kind.items()},
    }
    print(dict(total), f"{cpu_s:.0f} s of processor time")
    write_result("dialogue_rows" if args.anew else "dialogue_exact", result)
    return 1 if total["with_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
