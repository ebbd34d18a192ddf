"""Runs one test of a program in the sandbox, and judges the bytes that come out."""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.rewards.code.cases import AssertTest, CallTest, IoTest, Test
from rollpacker.rewards.code.harness import Tree
from rollpacker.rewards.code.values import BadValue, check_tree, has_nan, read_list, same, same_text
from rollpacker.sandbox.sandbox import Limits, RunResult, Sandbox, Status

MAX_CALLS = 1000
"""Most calls to the program that one test may make."""
MAX_PASSES = 200
"""Most times that the code of one test is run to find out which calls it makes."""
INLINE_BYTES = 1 << 15
"""Most bytes of output that are parsed in the event loop. Longer output is parsed in a thread, so
that the loop is not held up."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one test of a program: the verdict, or the reason why there is none."""

    passed: bool
    seconds: float
    """Duration of the program's slowest run, in seconds."""
    timed_out: bool = False
    sandbox_error: str | None = None
    """The reason why the sandbox itself failed, so that there is no verdict. None: it worked."""
    unfit: str | None = None
    """The reason why the test cannot be used with any program, so that there is no verdict. None:
    it can be used."""


class _Ended(Exception):
    """Raised if the way in which a run ended (such as a limit) decides the outcome of its test."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


async def run_test(source: str, test: Test, box: Sandbox, limits: Limits) -> Outcome:
    """Judge a program by one test. Every run is in a new sandbox process."""
    try:
        match test:
            case IoTest():
                return await _run_io(source, test, box, limits)
            case CallTest():
                return await _run_call(source, test, box, limits)
            case AssertTest():
                return await _run_assert(source, test, box, limits)
    except _Ended as ended:
        return ended.outcome


async def _run_io(source: str, test: IoTest, box: Sandbox, limits: Limits) -> Outcome:
    result = _ended(await box.run(source, stdin=test.stdin, limits=limits))
    passed = await _aside(len(result.stdout), same_text, test.stdout, result.stdout)
    return Outcome(passed, result.wall_s)


async def _run_call(source: str, test: CallTest, box: Sandbox, limits: Limits) -> Outcome:
    call = ["call", None, test.function, list(test.args), dict(test.kwargs)]
    (result,), run = await _answers(source, [call], box, limits)
    said, *rest = result
    passed = said == "value" and await _aside(len(run.stdout), _any_same, test.expected, rest[0])
    return Outcome(passed, run.wall_s)


def _any_same(expected: Sequence[Tree], got: Tree) -> bool:
    return any(same(value, got) for value in expected)


async def _run_assert(source: str, test: AssertTest, box: Sandbox, limits: Limits) -> Outcome:
    """Run the test's code and the program by turns, in separate sandboxes: the code asks for calls,
    the program makes them, until the code comes to its end."""
    calls: list[Tree] = []
    results: list[Tree] = []
    slowest = 0.0
    for _ in range(MAX_PASSES):
        nonce = secrets.token_hex(16)
        known = list(zip(calls, results, strict=True))
        if not known and test.first_calls:
            said, rest = "ask", test.first_calls
        else:
            said, *rest = await _judged(test, known, nonce, box, limits)
        if said == "unfit":
            return Outcome(False, slowest, unfit=str(rest[0]))
        if said != "ask":
            passed = said == "passed" and rest == [nonce]
            idle = "it passes without calling the program" if passed and not calls else None
            return Outcome(passed and not idle, slowest, unfit=idle)
        if not known:
            test.first_calls[:] = rest
        calls += rest
        if len(calls) > MAX_CALLS:
            return Outcome(False, slowest, unfit=f"it makes more than {MAX_CALLS} calls")
        results, run = await _answers(source, calls, box, limits)
        slowest = max(slowest, run.wall_s)
        if "nan" not in test.code and has_nan(["l", *results]):
            return Outcome(False, slowest)
    return Outcome(False, slowest, unfit=f"its calls are not known after {MAX_PASSES} passes")


async def _judged(
    test: AssertTest, known: list[Any], nonce: str, box: Sandbox, limits: Limits
) -> list[Any]:
    """Run the test's code, without the program, on the (call, result) pairs in `known`. Returns a
    list of "passed" and the `nonce` (a secret that the code cannot print), "failed", "ask" and the
    calls whose results it needs, or "unfit" and a reason."""
    payload = {
        "code": test.code,
        "names": test.names,
        "classes": test.classes,
        "ordered": test.ordered,
        "known": known,
        "nonce": nonce,
    }
    result = _ended(await box.run(_program("judge", payload), limits=limits))
    for name in ("passed", "failed", "ask", "unfit"):
        try:
            return [name, *read_list(result.stdout, name)]
        except BadValue:
            continue
    return ["unfit", "its code ended the interpreter"]


async def _answers(
    source: str, calls: list[Tree], box: Sandbox, limits: Limits
) -> tuple[list[Tree], RunResult]:
    """Run the program in the sandbox and make these calls to it. Returns their results in plain
    form, and the sandbox's record of the run."""
    payload = {"source": source, "calls": calls}
    result = _ended(await box.run(_program("answer", payload), limits=limits))
    try:
        results = await _aside(len(result.stdout), _read_results, result.stdout, len(calls))
    except BadValue:
        raise _Ended(Outcome(False, result.wall_s)) from None
    return results, result


def _read_results(data: bytes, count: int) -> list[Tree]:
    results = read_list(data, "results")
    if len(results) != count:
        raise BadValue("not one result for each call")
    for number, result in enumerate(results):
        if type(result) is not list or not result:
            raise BadValue("a result that is no list")
        match result:
            case ["value", None, *changed]:
                for tree in changed:
                    check_tree(tree)
            case ["value", tree]:
                check_tree(tree)
            case ["raised", str()] | ["refused"]:
                pass
            case ["object", int() as index] if index == number:
                pass
            case _:
                raise BadValue("an unknown result")
    return results


def _ended(result: RunResult) -> RunResult:
    """Return this result of a run if the run's output counts. Raises `_Ended` if a limit was
    exceeded or the sandbox failed. The program chooses exit status and signals: they are no
    evidence."""
    if result.status is Status.SANDBOX_ERROR:
        raise _Ended(Outcome(False, result.wall_s, sandbox_error=result.detail or "no detail"))
    if result.status in (Status.TIMEOUT, Status.MEMORY, Status.OUTPUT) or result.truncated:
        raise _Ended(Outcome(False, result.wall_s, timed_out=result.status is Status.TIMEOUT))
    return result


async def _aside(size: int, function: Any, *args: Any) -> Any:
    if size <= INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)


def _program(role: str, payload: Any) -> str:
    return f"{_source_of(role)}\n{role}({json.dumps(payload)!a})\n"


@functools.cache
def _source_of(role: str) -> str:
    """The part of the source of `harness` that a role (answer or judge) needs, without docstrings
    and annotations, which would cost time to compile in every run."""
    text = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")
    shared, _, rest = text.partition("# -- with the program")
    answer, _, judge = rest.partition("# -- without the program")
    return ast.unparse(
        _Bare().visit(ast.parse(shared + "\n#" + {"answer": answer, "judge": judge}[role]))
    )


class _Bare(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module in ("typing", "__future__") else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if ast.unparse(node.value) == "Any" else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else node
