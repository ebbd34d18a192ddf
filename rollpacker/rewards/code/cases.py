"""Reads the tests of a programming task from a dataset, in the formats that are in use.

`docs/rewards-code.md` lists the formats. Tests are trusted as data; their code is not run here.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.rewards.code.harness import Tree
from rollpacker.rewards.code.values import plain, same

EVALUATES = frozenset({"eval", "exec", "__import__", "builtins", "pickle", "marshal", "runpy"})
"""Names that test code must not use, since they could run text that a program returned."""

IMPORTS = {
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    **dict.fromkeys(("inf", "isclose", "isnan", "pi", "sqrt"), "math"),
    "Decimal": "decimal",
    "Fraction": "fractions",
}
"""Names that test code often expects the program to have imported, and the module of each. The
test's own code is made to import them."""


_IO = ("stdin", "input", "stdout", "output")
_KEYS = {
    **dict.fromkeys(("io", "stdin", "stdin_stdout"), (*_IO, "fn_name", "function")),
    "call": ("function", "args", "args_literal", "kwargs", "expected", "expected_literal"),
    "functional": ("input", "output", "fn_name", "function"),
    "assert": ("code", "setup", "functions"),
}
"""The keys that a test may have, by the test's type."""
_SHAPES = {
    "inputs": ("inputs", "outputs", "fn_name"),
    "test_list": ("test_list", "test_setup_code", "test_imports"),
    "test": ("test", "entry_point"),
    "input": ("input", "output"),
}
"""Keys that a test without a type may have, by the key from which its format is recognised."""
_WHOLE_ROWS = ("test_list", "test")
"""Keys from which the tests of MBPP and HumanEval are recognised. Such a test may be a whole row of
the data set, with many other keys."""
# fmt: off
_ABOUT = frozenset({
    "call_type", "category", "challenge_test_list", "comment", "comments", "contract",
    "description", "difficulty", "explanation", "func_name", "hidden", "id", "index", "input_type",
    "is_hidden", "is_public", "is_sample", "is_test", "lang", "language", "memory_limit",
    "metadata", "name", "note", "notes", "num", "number", "output_type", "outputs", "points",
    "prompt", "public", "question_id", "sample", "score", "source", "starter_code",
    "starter_code_lang", "tag", "tags", "task_id", "test_id", "text", "time_limit", "timeout",
    "title", "version", "visible", "weight",
})
# fmt: on
"""Keys with which data sets describe a test. They are ignored."""


class BadTests(ValueError):
    """The tests cannot be used. The message says which ones and why."""


@dataclass(frozen=True, slots=True)
class IoTest:
    """A test of a whole program: with `stdin` as its input it must print `stdout`."""

    stdin: bytes
    stdout: bytes


@dataclass(frozen=True, slots=True)
class CallTest:
    """A test that calls one function of the program, or one method of its class `Solution`."""

    function: str
    args: tuple[Tree, ...]
    kwargs: Mapping[str, Tree]
    expected: tuple[Tree, ...]
    """The right results, in plain form (`harness.Tree`). A result equal to any of them passes."""


@dataclass(frozen=True, slots=True)
class AssertTest:
    """A test that is code, which calls the program and asserts something of the results."""

    code: str
    names: tuple[str, ...]
    """Names that the test's code needs from the program that is tested."""
    classes: tuple[str, ...]
    """The names in `names` that stand for classes, since they begin with a capital letter."""
    first_calls: list[Tree] = field(default_factory=list, compare=False)
    """Calls of the program's functions whose results the code needs first, noted because they are
    the same for every program. Empty until the test is first run."""

    @property
    def ordered(self) -> bool:
        """Whether the calls to the program are made one by one, in their order. They are if the
        test uses classes of the program, since objects have a state."""
        return bool(self.classes)


Test = IoTest | CallTest | AssertTest


def read_tests(tests: Any) -> list[Test]:
    """Read the tests of one row: a list or a mapping in a known format, or JSON text of one. Raises
    `BadTests` if they cannot be used."""
    return list(_read_text(tests)) if isinstance(tests, str) else _read(tests)


@functools.lru_cache(1024)
def _read_text(text: str) -> tuple[Test, ...]:
    """Read the tests in a JSON text. The result is cached for other responses to the prompt."""
    try:
        return tuple(_read(json.loads(text)))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, BadTests) else BadTests(f"no JSON: {error}") from None


def _read(tests: Any) -> list[Test]:
    if hasattr(tests, "tolist"):  # a column of a parquet file
        tests = tests.tolist()
    if isinstance(tests, Mapping):
        found = list(_of_mapping(tests))
    elif isinstance(tests, list | tuple):
        found = [test for number, one in enumerate(tests) for test in _numbered(one, number)]
    else:
        raise BadTests(f"a {type(tests).__name__}, not a list of tests")
    if not found:
        raise BadTests("there is no test")
    return found


def _numbered(one: Any, number: int) -> list[Test]:
    try:
        return list(_of_mapping({"type": "assert", "code": one} if isinstance(one, str) else one))
    except BadTests as error:
        raise BadTests(f"test {number}: {error}") from None


def _of_mapping(test: Any) -> Iterator[Test]:
    if not isinstance(test, Mapping):
        raise BadTests(f"a {type(test).__name__}, not a mapping")
    test = {key: value for key, value in test.items() if value is not None or key == "expected"}
    kind = test.get("type", test.get("testtype"))
    _check_keys(test, kind)
    if kind in ("io", "stdin", "stdin_stdout"):
        yield _io(test.get("stdin", test.get("input", "")), _need(test, "stdout", "output"))
    elif kind == "call":
        yield _call(test)
    elif kind == "functional":
        args = _json_lines(_need(test, "input"))
        yield _called(_need(test, "fn_name", "function"), args, [_json(_need(test, "output"))])
    elif kind == "assert":
        yield _assert(_need(test, "code"), test.get("setup", ""), test.get("functions", ()))
    elif kind is not None:
        raise BadTests(f"the type {kind} is unknown; there are io, call and assert")
    elif "inputs" in test:
        yield from _pairs(test)
    elif "test_list" in test:
        setup = "\n".join([test.get("test_setup_code", ""), *test.get("test_imports", ())])
        for code in test["test_list"]:
            yield _assert(code, setup, ())
    elif "test" in test:
        yield _assert(f"{test['test']}\ncheck({_need(test, 'entry_point')})", "", ())
    elif "input" in test:
        yield _io(test["input"], _need(test, "output"))
    else:
        raise BadTests(
            f"no type, and no known shape: it has {', '.join(map(str, test)) or 'nothing'}"
        )


def _check_keys(test: Mapping[str, Any], kind: Any) -> None:
    """Raise `BadTests` for a key that tests of type `kind` (None: none is given) do not have. A
    misspelt key would be ignored, and the test would then test something else."""
    if kind is None:
        shape = next((key for key in _SHAPES if key in test), None)
        if shape is None:
            return
        known, what = _SHAPES[shape], f"a test with {shape}"
    elif isinstance(kind, str) and kind in _KEYS:
        shape, known, what = None, _KEYS[kind], f"a test of type {kind}"
    else:
        return
    types = ("type", "testtype")
    missing = [name for name in (*known, *types) if name not in test]
    for key in test:
        if key in known or key in types or key in _ABOUT or str(key).startswith("_"):
            continue
        if shape in _WHOLE_ROWS and not difflib.get_close_matches(str(key), missing, 1, 0.75):
            continue
        hint = did_you_mean(str(key), missing)
        raise BadTests(
            f"{key} is no key of {what}.{hint} There are: {', '.join(known)};"
            " notes belong into metadata"
        )


def _need(test: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if name in test:
            return test[name]
    raise BadTests(f"it has no {names[0]}")


def _pairs(test: Mapping[str, Any]) -> Iterator[Test]:
    """The tests in parallel lists of inputs and outputs, as APPS and TACO have them."""
    inputs, outputs = test["inputs"], _need(test, "outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadTests("inputs and outputs must be lists")
    if len(inputs) != len(outputs):
        raise BadTests(f"{len(inputs)} inputs, but {len(outputs)} outputs")
    for given, out in zip(inputs, outputs, strict=True):
        if test.get("fn_name"):
            if isinstance(given, str):
                given, either = _json_lines(given), [_json(out)]
            else:
                either = [out, out[0]] if isinstance(out, list) and len(out) == 1 else [out]
            yield _called(test["fn_name"], given, either)
        else:
            yield _io(given, out)


def _io(stdin: Any, stdout: Any) -> IoTest:
    return IoTest(_bytes(stdin, "stdin"), _bytes(stdout, "stdout"))


def _bytes(text: Any, name: str) -> bytes:
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        text = "\n".join(text)
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise BadTests(f"{name} must be text, not a {type(text).__name__}")
    return text.encode("utf-8", "surrogatepass")


def _call(test: Mapping[str, Any]) -> CallTest:
    args = test.get("args", [])
    if "args_literal" in test:
        args = _literal(test["args_literal"])
    if "expected_literal" in test:
        expected = _literal(test["expected_literal"])
    else:
        expected = _need(test, "expected")
    return _called(_need(test, "function"), args, [expected], test.get("kwargs", {}))


def _called(function: Any, args: Any, expected: list[Any], kwargs: Any = None) -> CallTest:
    if not isinstance(function, str) or not function.isidentifier():
        raise BadTests(f"function must be a name, not {function!r:.40}")
    if not isinstance(args, list | tuple) or not isinstance(kwargs or {}, Mapping):
        raise BadTests("args must be a list, kwargs a mapping")
    try:
        positional = tuple(plain(arg) for arg in args)
        named = {name: plain(value) for name, value in (kwargs or {}).items()}
        right = tuple(plain(value) for value in expected)
    except ValueError as error:
        raise BadTests(f"a value that cannot be passed: {error}") from None
    if not all(same(value, value) for value in right):
        raise BadTests("nan is expected, which nothing equals")
    return CallTest(function, positional, named, right)


def _literal(text: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadTests(f"no Python literal: {text!r:.60}") from None


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise BadTests(f"no JSON: {text!r:.60}") from None


def _json_lines(text: Any) -> list[Any]:
    """The arguments in a text with one JSON value per line, as in LiveCodeBench."""
    if not isinstance(text, str):
        raise BadTests("input must be text with one JSON value a line")
    return [_json(line) for line in text.split("\n") if line.strip()]


# -- asserts ---------------------------------------------------------------------------


def _assert(code: Any, setup: Any, functions: Any) -> AssertTest:
    if not isinstance(code, str) or not isinstance(setup, str):
        raise BadTests("code and setup must be text")
    try:
        tree = ast.parse(f"{setup}\n{code}")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise BadTests(f"its code is no Python: {error}") from None
    if used := _all_names(tree) & EVALUATES:
        raise BadTests(f"its code uses {min(used)}, which could run what a program returned")
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise BadTests("its code asserts nothing")
    free = _free_names(tree)
    imported = [name for name in free if name in IMPORTS or _is_module(name, tree)]
    tree.body[:0] = [_import_of(name) for name in sorted(imported)]
    names = sorted(free.difference(imported) | set(functions))
    if not names:
        raise BadTests("its code uses nothing of the program")
    classes = tuple(name for name in names if name.lstrip("_")[:1].isupper())
    tree = ast.fix_missing_locations(_Rewritten(postponed=not classes).visit(tree))
    return AssertTest(ast.unparse(tree), tuple(names), classes)


def _is_module(name: str, tree: ast.AST) -> bool:
    """Whether the name is a module of the standard library of which the code uses attributes."""
    return name in sys.stdlib_module_names and any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for node in ast.walk(tree)
    )


def _import_of(name: str) -> ast.stmt:
    if name in IMPORTS:
        return ast.ImportFrom(IMPORTS[name], [ast.alias(name)], 0)
    return ast.Import([ast.alias(name)])


def _all_names(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def _free_names(tree: ast.AST) -> set[str]:
    """Names that the code reads and never binds: the program must have them."""
    read: set[str] = set()
    bound = {*dir(builtins), "__name__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


class _Rewritten(ast.NodeTransformer):
    """Rewrites test code for `harness.judge`, which runs it without the program. An attribute that
    is read, not called, becomes a call of `_value_of`. `postponed`: an assert that needs a result
    not known yet is skipped, so that one pass finds the calls of all asserts."""

    def __init__(self, *, postponed: bool) -> None:
        self.postponed = postponed

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        else:
            node.func = self.visit(node.func)
        node.args = [self.visit(arg) for arg in node.args]
        node.keywords = [self.visit(keyword) for keyword in node.keywords]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        return ast.Call(ast.Name("_value_of", ast.Load()), [node], [])

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if not self.postponed:
            return node
        handler = ast.ExceptHandler(ast.Name("_Pending", ast.Load()), None, [ast.Pass()])
        return ast.Try([node], [handler], [], [])
