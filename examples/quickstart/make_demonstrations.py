"""Write the demonstrations that the quickstart's warm-up learns from.

Sums of two terms are worked out correctly. Longer ones show the form of a solution, but every one
of them has a slip in it: one step adds where it should subtract or the other way round, so that
the number at the end is wrong. A right solution is left for reinforcement learning to find.

`steps.jsonl` has just that. In `hesitant.jsonl` some solutions, mostly of the longest sums, end in
a run of "!", which gives the responses a long tail. Held-out prompts are in neither.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.data.procedural import make_rows

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arithmetic import prompt

STEPS = {2: 0.35, 3: 0.33, 4: 0.18, 5: 0.05, 6: 0.05, 9: 0.01, 10: 0.01, 11: 0.01, 12: 0.01}
"""Number of terms -> share of steps.jsonl."""
HESITANT = {2: 0.25, 3: 0.30, 4: 0.20, 5: 0.05, 6: 0.05, 9: 0.04, 10: 0.04, 11: 0.04, 12: 0.04}
"""Number of terms -> share of hesitant.jsonl."""
HESITATION = {2: 0.02, 3: 0.02, 4: 0.03, 5: 0.05, 6: 0.05, 9: 0.7, 10: 0.7, 11: 0.7, 12: 0.7}
"""Number of terms -> chance that a solution in hesitant.jsonl goes on with "!"."""
ONE_MORE_CHANCE = 0.99
"""After each "!"; 100 of them on average."""
PARTIAL_RESULTS = range(-20, 31)
"""Half of the sums of two terms begin with one of these, as the steps of a longer sum do."""
MAX_CHARACTERS = 300
FLIPPED = {"+": "-", "-": "+"}

Sum = tuple[list[int], list[str]]
"""Terms, and the signs between them."""


def held_out_prompts(config_path: Path) -> frozenset[str]:
    """The prompts that the run evaluates on."""
    config = load_config(config_path, [], RunConfig)
    assert config.data.eval is not None
    return frozenset(prompt(row.columns) for row in make_rows(config.data.eval, "eval"))


def demonstrations(
    rng: random.Random,
    shares: Mapping[int, float],
    hesitation: Mapping[int, float],
    banned: frozenset[str],
) -> Iterator[dict[str, str]]:
    """Rows of `prompt` and `completion`, without end. Both mappings go by the number of terms."""
    while True:
        num_terms = rng.choices(list(shares), list(shares.values()))[0]
        terms = [rng.randint(0, 9) for _ in range(num_terms)]
        if num_terms == 2 and rng.random() < 0.5:
            terms[0] = rng.choice(PARTIAL_RESULTS)
        signs = [rng.choice("+-") for _ in range(num_terms - 1)]
        question = written((terms, signs)) + "="
        if question in banned or (num_terms > 2 and not any(terms[1:])):
            continue
        completion = worked(terms, signs, signs)
        if num_terms > 2:
            completion = worked(terms, signs, slipped(rng, (terms, signs)))
        if rng.random() < hesitation.get(num_terms, 0.0):
            completion += "!"
            while rng.random() < ONE_MORE_CHANCE and len(completion) < MAX_CHARACTERS:
                completion += "!"
        yield {"prompt": question, "completion": completion}


def slipped(rng: random.Random, asked: Sum) -> list[str]:
    """The signs as a sloppy reader applies them: one is the wrong one, and it matters."""
    terms, signs = asked
    place = rng.choice([i for i, term in enumerate(terms[1:]) if term != 0])
    return [FLIPPED[s] if i == place else s for i, s in enumerate(signs)]


def written(asked: Sum) -> str:
    terms, signs = asked
    return str(terms[0]) + "".join(f"{s}{t}" for s, t in zip(signs, terms[1:], strict=True))


def worked(terms: list[int], signs: list[str], applied: list[str]) -> str:
    """The solution step by step: it writes `signs` and calculates with `applied`."""
    text = str(terms[0])
    for count, (sign, term) in enumerate(zip(signs, terms[1:], strict=True), start=1):
        text += f"{sign}{term}={total(terms[: count + 1], applied[:count])}"
    return text


def total(terms: list[int], signs: list[str]) -> int:
    signed = (t if s == "+" else -t for s, t in zip(signs, terms[1:], strict=True))
    return terms[0] + sum(signed)


def write(
    path: Path,
    num_rows: int,
    seed: int,
    shares: Mapping[int, float],
    hesitation: Mapping[int, float],
    banned: frozenset[str],
) -> None:
    rows = demonstrations(random.Random(f"{seed}/{path.name}"), shares, hesitation, banned)
    lines = (json.dumps(row) + "\n" for row in islice(rows, num_rows))
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{num_rows:,} demonstrations in {path}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's demonstrations.")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart-demonstrations"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=30_000, help="rows of steps.jsonl")
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    arguments = parser.parse_args(argv)
    banned = held_out_prompts(arguments.config)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write(arguments.output / "steps.jsonl", arguments.rows, arguments.seed, STEPS, {}, banned)
    hesitant = arguments.output / "hesitant.jsonl"
    write(hesitant, arguments.rows // 4, arguments.seed, HESITANT, HESITATION, banned)


if __name__ == "__main__":
    main()
