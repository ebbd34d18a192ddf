"""Small programming problems, made from a seed: prompt, tests and a reference solution a row.

Nothing to download. The tests' expected values come from running the reference solutions, which are
templates of this package (`code_task_kinds`).
"""

from __future__ import annotations

import copy
import json
import random
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import Any

from examples.code.kinds import NUMBERS_AND_TEXTS, Choices, Kind
from examples.code.lists import LISTS

KINDS = (*NUMBERS_AND_TEXTS, *LISTS)
NUM_TESTS = 6
_TRIES = 1000
WORDS = (
    *("river", "stone", "a", "tree", "window", "it", "Salt", "noon", "level", "to", "orange"),
    *("sea", "moss", "letter", "In", "quiet", "radar", "nest", "gift", "on", "planet", "Otter"),
)
READ = {
    "int": "int(input())",
    "ints": "[int(x) for x in input().split()]",
    "floats": "[float(x) for x in input().split()]",
    "str": "input()",
    "strs": "input().split()",
}
"""How a task on stdin gets an argument of each type, one a line."""
PRINT = {
    "int": "print({})",
    "float": "print({})",
    "bool": "print({})",
    "str": "print({})",
    "ints": 'print(" ".join(map(str, {})))',
    "floats": 'print(" ".join(map(str, {})))',
    "strs": 'print(" ".join({}))',
}
LINES = {
    "int": "a whole number",
    "ints": "whole numbers, separated by blanks",
    "floats": "numbers, separated by blanks",
    "str": "a text",
    "strs": "words, separated by blanks",
}
ARTICLES = {"float": "a number", "bool": "True or False", **LINES}


def code_tasks(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` rows with different prompts: prompt, tests, reference_solution, task ("code"), kind.

    Kinds take turns, so that any number of rows has them all about equally often. About a third of
    the problems that can be are asked as programs that read stdin; the others are functions.
    """
    rng = random.Random(f"code tasks/{seed}")
    seen: set[str] = set()
    order: list[Kind] = []
    while len(seen) < count:
        if not order:
            order = rng.sample(KINDS, len(KINDS))
        row = make_task(order.pop(), rng)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row


def make_task(kind: Kind, rng: random.Random) -> dict[str, Any]:
    """One problem of a kind, with parameters of its own."""
    types = dict(part.split(": ") for part in kind.takes.split(", "))
    for _ in range(_TRIES):
        params = {name: _drawn(choices, rng) for name, choices in kind.params.items()}
        body = Template(textwrap.dedent(kind.body).strip()).substitute(params)
        function = _function(kind.name, types, body)
        calls = _calls(kind, types, rng)
        results = _results(function, kind.name, calls)
        if _discriminate(results[1:]):
            break
    else:
        raise AssertionError(f"{kind.name}: no tests that tell answers apart")
    statement = Template(kind.statement).substitute(params)
    on_stdin = kind.gives in PRINT and set(types.values()) <= READ.keys() and rng.random() < 1 / 3
    make = _stdin_task if on_stdin else _function_task
    prompt, tests, solution = make(kind, types, function, list(zip(calls, results, strict=True)))
    return {
        "prompt": f"{statement} {prompt}",
        "tests": tests,
        "reference_solution": solution,
        "task": "code",
        "kind": kind.name,
    }


def _discriminate(results: Sequence[Any]) -> bool:
    """No constant passes more than half of the tests."""
    return max(results.count(result) for result in results) <= len(results) // 2


def _drawn(choices: Choices, rng: random.Random) -> Any:
    return rng.randint(*choices) if isinstance(choices, tuple) else rng.choice(choices)


def _function(name: str, types: Mapping[str, str], body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    return f"def {name}({', '.join(types)}):\n{lines}"


def _calls(kind: Kind, types: Mapping[str, str], rng: random.Random) -> list[tuple[Any, ...]]:
    """Different arguments for an example and the tests."""
    calls: list[tuple[Any, ...]] = []
    while len(calls) <= NUM_TESTS:
        size = rng.choice((1, 3, 5, 8, 12))
        args = tuple(_argument(t, size, kind.ranges.get(n), rng) for n, t in types.items())
        if args not in calls:
            calls.append(args)
    return calls


def _argument(kind: str, size: int, limits: tuple[int, int] | None, rng: random.Random) -> Any:
    low, high = limits or (-10, 30)
    match kind:
        case "int":
            return rng.randint(low, high)
        case "ints":
            pool = rng.sample(range(low, high + 1), rng.choice((3, 6, 24)))
            return rng.choices(pool, k=rng.randint(size // 2 + 1, size))
        case "floats":
            return [rng.randint(-1000, 1000) / 8 for _ in range(size)]
        case "strs":
            return rng.sample(WORDS, size)
        case "str":
            if rng.random() < 0.2:  # the same backwards, but for the first letters
                half = "".join(rng.choices("abe r", k=size))
                return "stone"[: rng.randint(0, 5)] + half + half[::-1]
            return " ".join(rng.choices(WORDS, k=size // 2 + 1))
        case _:
            width = rng.randint(1, 4)
            return [[rng.randint(low, high) for _ in range(width)] for _ in range(size // 2 + 1)]


def _results(source: str, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
    """What the reference solution, one of our own templates, gives for each call."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return [scope[name](*copy.deepcopy(args)) for args in calls]


Solved = list[tuple[tuple[Any, ...], Any]]


def _function_task(
    kind: Kind, types: Mapping[str, str], function: str, solved: Solved
) -> tuple[str, list[dict[str, Any]], str]:
    (example, result), *rest = solved
    prompt = (
        f"Write a Python function {kind.name}({', '.join(types)}) that does this.\n"
        f"Example: {_written(kind.name, example)} is {result!r}"
    )
    tests: list[dict[str, Any]] = []
    for number, (args, expected) in enumerate(rest):
        if number % 3 == 2:
            tests.append({"type": "assert", "code": _assert(kind.name, args, expected)})
        else:
            tests.append(_call(kind.name, args, expected))
    return prompt, tests, function


def _written(name: str, args: Sequence[Any]) -> str:
    return f"{name}({', '.join(map(repr, args))})"


def _assert(name: str, args: Sequence[Any], expected: Any) -> str:
    if isinstance(expected, float):
        margin = 1e-6 * max(1.0, abs(expected))
        return f"assert abs({_written(name, args)} - {expected!r}) <= {margin!r}"
    if isinstance(expected, list) and expected and isinstance(expected[0], float):
        near = "len(got) == len(want) and all(abs(a - b) <= 1e-6 for a, b in zip(got, want))"
        return f"got, want = {_written(name, args)}, {expected!r}\nassert {near}"
    return f"assert {_written(name, args)} == {expected!r}"


def _call(name: str, args: Sequence[Any], expected: Any) -> dict[str, Any]:
    test: dict[str, Any] = {"type": "call", "function": name, "args": list(args)}
    plain = json.loads(json.dumps(expected, default=repr)) if expected is not None else None
    if plain == expected and type(plain) is type(expected):
        return {**test, "expected": expected}
    return {**test, "expected_literal": repr(expected)}


def _stdin_task(
    kind: Kind, types: Mapping[str, str], function: str, solved: Solved
) -> tuple[str, list[dict[str, Any]], str]:
    given = "; ".join(f"{name}: {LINES[t]}" for name, t in types.items())
    (example, result), *rest = solved
    prompt = (
        f"Write a Python program that reads one argument a line from standard input"
        f" ({given}) and prints the result ({ARTICLES[kind.gives]}).\n"
        f"Example input:\n{_lines(types, example)}Example output:\n{_printed(kind, result)}"
    )
    tests = [
        {"type": "io", "stdin": _lines(types, args), "stdout": _printed(kind, expected)}
        for args, expected in rest
    ]
    arguments = ", ".join(READ[t] for t in types.values())
    call = PRINT[kind.gives].format(f"{kind.name}({arguments})")
    return prompt, tests, f"{function}\n\n{call}\n"


def _lines(types: Mapping[str, str], args: Sequence[Any]) -> str:
    return "".join(f"{_joined(a, t)}\n" for a, t in zip(args, types.values(), strict=True))


def _printed(kind: Kind, result: Any) -> str:
    return f"{_joined(result, kind.gives)}\n"


def _joined(value: Any, kind: str) -> str:
    return " ".join(map(str, value)) if kind in ("ints", "floats", "strs") else str(value)
