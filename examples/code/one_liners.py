"""Programming problems that a character-level model learns in a minute, and demonstrations of them.

A prompt such as `f(x): times 3, plus 2` and its newline; a solution is one line,
`def f(x): return 3*x+2`. Both have at most 40 characters of `ALPHABET`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from examples.rows import write_rows

ALPHABET = "\n ()*+,-/0123456789:<>=%abcdefghijklmnopqrstuvwxyz"
INPUTS = (0, 7, -3, 50, 100)
"""What the tests of every problem call `f` with."""

FORMS = (
    ("times {a}, plus {b}", "{a}*x+{b}"),
    ("times {a}, minus {b}", "{a}*x-{b}"),
    ("plus {b}, times {a}", "{a}*(x+{b})"),
    ("square, plus {b}", "x*x+{b}"),
    ("square, times {a}", "{a}*x*x"),
    ("half, plus {b}", "x//2+{b}"),
    ("part {a}, minus {b}", "x//{a}-{b}"),
    ("rest by {b}", "x%{b}"),
    ("at least {b}", "max(x,{b})"),
    ("at most {b}", "min(x,{b})"),
    ("above {b}", "x>{b}"),
    ("below {b}", "x<{b}"),
    ("far from {b}", "abs(x-{b})"),
    ("minus {b}, negated", "{b}-x"),
)
"""Prompt and expression; a is 2 to 9, b is 2 to 99."""

ENDLESS = (
    "while 1: pass",
    "def f(x): return x\nwhile 1: pass",
    "while 1: x=0",
    "while 2>1: pass",
    "a=1\nwhile a: a+=1",
)
"""Programs that never end, and do not fill the memory."""


def one_liners(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` rows: prompt, tests, reference_solution, task. Prompts differ as long as they can
    (about 4,200 ways), then they repeat."""
    rng = random.Random(f"one-liners/{seed}")
    left: list[tuple[str, str]] = []
    for _ in range(count):
        left = left or rng.sample(every := _problems(), len(every))
        prompt, expression = left.pop()
        value = eval(f"lambda x: {expression}")  # one of FORMS
        tests = [
            {"type": "call", "function": "f", "args": [x], "expected": value(x)} for x in INPUTS
        ]
        solution = f"def f(x): return {expression}"
        yield {"prompt": prompt, "tests": tests, "reference_solution": solution, "task": "code"}


def _problems() -> list[tuple[str, str]]:
    found = {
        f"f(x): {form.format(a=a, b=b)}\n": expression.format(a=a, b=b)
        for form, expression in FORMS
        for a in range(2, 10)
        for b in range(2, 100)
    }
    return list(found.items())


def demonstrations(
    count: int,
    seed: int,
    *,
    endless: float = 0.05,
    wrong: float = 0.3,
    banned: Set[str] = frozenset(),
) -> Iterator[dict[str, str]]:
    """`count` rows of prompt and completion for a supervised warm-up.

    Of them a share `endless` never ends and a share `wrong` has a number or a sign mistaken; so
    much is left to learn from rewards. `banned` prompts (held-out ones) are left out.
    """
    rng = random.Random(f"demonstrations/{seed}")
    problems = [problem for problem in _problems() if problem[0] not in banned]
    for _ in range(count):
        prompt, expression = rng.choice(problems)
        drawn = rng.random()
        if drawn < endless:
            completion = rng.choice(ENDLESS)
        else:
            if drawn < endless + wrong:
                expression = _slipped(expression, rng)
            completion = f"def f(x): return {expression}"
        yield {"prompt": prompt, "completion": completion}


def _slipped(expression: str, rng: random.Random) -> str:
    """With another digit in place of one, or plus and minus exchanged."""
    signs = str.maketrans("+-<>", "-+><")
    if expression.translate(signs) != expression and rng.random() < 0.5:
        return expression.translate(signs)
    place = rng.choice([i for i, c in enumerate(expression) if c.isdigit()])
    digit = rng.choice([d for d in "23456789" if d != expression[place]])
    return expression[:place] + digit + expression[place + 1 :]


def write_one_liners(path: str | Path, count: int, seed: int) -> None:
    write_rows(path, one_liners(count, seed))


def write_demonstrations(path: str | Path, count: int, seed: int, **shares: Any) -> None:
    """`shares`: what `demonstrations` takes."""
    write_rows(path, demonstrations(count, seed, **shares))
