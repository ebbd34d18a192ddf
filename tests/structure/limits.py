"""Limits on how code is cut. Each rule yields its offenders, as lines that begin with a path."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

from tests.structure.layers import circles, row_of
from tests.structure.source import Function, Package

MAX_FUNCTION_LINES = 60
MIN_MODULE_LINES = 60
"""A shorter module that has one importer is better read in it."""

ROWS = ("rollpacker.algo", "rollpacker.trackers", "rollpacker.integrations.environments")
"""Rooms whose modules are rows of a table: one importer is right for them."""

RECORDS = {"Protocol", "NamedTuple", "TypedDict", "Enum", "StrEnum", "IntEnum", "Struct"}
"""Bases of classes whose fields belong together without a method that reads them all."""


BUDGETS = {
    "": 1_450,
    "algo": 1_850,
    "cli": 5_100,
    "cluster": 50,
    "cluster.commands": 1_100,
    "cluster.decide": 3_400,
    "cluster.on_ray": 750,
    "cluster.profile": 600,
    "cluster.seats": 1_150,
    "cluster.service": 2_000,
    "cluster.sim": 1_150,
    "config": 2_200,
    "core": 1_400,
    "core.checks": 750,
    "core.fleet": 1_550,
    "core.job": 1_400,
    "core.lengths": 1_900,
    "core.placement": 650,
    "core.rounds": 2_050,
    "data": 1_450,
    "dialogue": 1_600,
    "endpoints": 400,
    "engines": 2_050,
    "engines.embedded": 3_500,
    "engines.vllm": 2_200,
    "environments": 2_400,
    "integrations": 50,
    "integrations.environments": 1_750,
    "integrations.slime": 400,
    "integrations.trl": 1_000,
    "integrations.verl": 900,
    "pipeline": 150,
    "pipeline.links": 1_350,
    "pipeline.plan": 2_150,
    "pipeline.sim": 850,
    "pipeline.stages": 2_600,
    "report": 8_200,
    "rewards": 7_950,
    "run": 2_000,
    "run.folder": 1_050,
    "run.parts": 3_050,
    "run.ports": 5_650,
    "sandbox": 3_750,
    "scheduler": 1_200,
    "serving": 1_150,
    "sim": 8_250,
    "trackers": 650,
    "trainer": 10_900,
    "weights": 1_200,
    "weights.between_hosts": 750,
    "workers": 2_450,
    "workers.hosts": 1_350,
}
"""Lines of Python that the modules below each dotted prefix may have together; the longest prefix
of a module counts. A room that needs more argues for it in its `__init__.py`."""


def long_functions(package: Package) -> Iterator[str]:
    """Functions of more than 60 lines."""
    for module in package.modules.values():
        for name, node in module.definitions:
            if isinstance(node, ast.ClassDef):
                continue
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{module.path} {name}"


def starred_literals(package: Package) -> Iterator[str]:
    """Calls such as `f(*(a, b))`, which hide from the reader which argument is which."""
    for module in package.modules.values():
        if not re.search(r"\*[(\[]", module.source):
            continue
        for name, call in module.calls:
            for argument in call.args:
                if isinstance(argument, ast.Starred) and isinstance(
                    argument.value, ast.Tuple | ast.List
                ):
                    yield f"{module.path} {name or 'at module level'}"


def lone_bases(package: Package, others: Iterable[str] = ()) -> Iterator[str]:
    """Base classes that have one subclass, where neither the package nor the `others` (texts of
    tests, benchmarks, examples) make the base itself and no text of the `others` derives from it,
    as users do from `rollpacker.Callback`. Protocols are contracts and are left out."""
    others = [*others]
    subclasses: dict[str, set[str]] = {}
    for name in package.classes:
        for base in package.bases(name):
            if base is not None:
                subclasses.setdefault(base, set()).add(name)
    texts = [*others, *(module.source for module in package.modules.values())]
    for base, below in sorted(subclasses.items()):
        module, node = package.classes[base]
        is_contract = any(ast.unparse(one).startswith("Protocol") for one in node.bases)
        derived = re.compile(rf"class \w+\((?:[\w.]+\.)?{node.name}[,)]")
        is_extended = any(derived.search(text) for text in others)
        if len(below) == 1 and not (is_contract or is_extended or _is_made(node.name, texts)):
            yield f"{module.path} {node.name}"


def _is_made(name: str, texts: Iterable[str]) -> bool:
    """Whether `Name(...)` or `Name.of(...)` is called anywhere."""
    call = re.compile(rf"(?<!class )\b{name}(\.\w+)?\(")
    return any(call.search(text) for text in texts)


def lone_modules(package: Package, contracts: Iterable[str]) -> Iterator[str]:
    """Modules under 60 lines that one other module imports. Contracts, rows of tables and
    packages' `__init__.py` are left out."""
    left_out = {f"rollpacker.{contract}" for contract in contracts}
    for name, importers in package.importers.items():
        module = package.modules[name]
        if len(module.lines) >= MIN_MODULE_LINES or len(importers) != 1 or name in left_out:
            continue
        is_row = any(name.startswith(room + ".") for room in ROWS)
        if not is_row and not module.path.endswith("/__init__.py"):
            yield f"{module.path} imported by {min(importers)}"


def split_classes(package: Package) -> Iterator[str]:
    """Classes whose methods fall into two or more groups that share no attribute and do not call
    each other (LCOM4 > 1): two things under one name.

    Left out: constructors, which touch everything; methods without state; records, whose fields
    belong together without a method that reads them all; and classes with a base from outside of
    the package, whose user ties the methods together.
    """
    for name, (module, node) in package.classes.items():
        if _is_record(node) or None in package.bases(name):
            continue
        if len(groups := groups_of(package, name)) > 1:
            sizes = "+".join(str(len(group)) for group in groups)
            yield f"{module.path} {node.name} {sizes}"


def _is_record(node: ast.ClassDef) -> bool:
    """Whether it is a dataclass, or has the base of one, and no method of it stores anything."""
    decorators = [ast.unparse(one).partition("(")[0] for one in node.decorator_list]
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    stores = any(
        isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
        for one in ast.walk(node)
    )
    return bool(bases & RECORDS) or ("dataclass" in decorators and not stores)


def groups_of(package: Package, name: str) -> list[set[str]]:
    """The methods of a class and its bases in groups that share attributes or call each other."""
    methods = _methods(package, name)
    touched = {method: set().union(*map(_touched, nodes)) for method, nodes in methods.items()}
    touched = {method: names for method, names in touched.items() if names}
    groups: list[tuple[set[str], set[str]]] = []
    for method, names in touched.items():
        if method in ("__init__", "__post_init__"):
            continue
        mine, attributes = {method}, {method, *names}
        apart = []
        for others, their in groups:
            if "self" in attributes or "self" in their or attributes & their:
                mine |= others
                attributes |= their
            else:
                apart.append((others, their))
        groups = [*apart, (mine, attributes)]
    return sorted((mine for mine, _ in groups), key=lambda group: (-len(group), min(group)))


def _methods(package: Package, name: str) -> dict[str, list[Function]]:
    """The methods by name, each with what it overrides in bases of the package."""
    found: dict[str, list[Function]] = {}
    for base in package.bases(name):
        if base is not None:
            for method, nodes in _methods(package, base).items():
                found.setdefault(method, []).extend(nodes)
    for node in package.classes[name][1].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(one) for one in node.decorator_list}
            if not decorators & {"staticmethod", "classmethod", "abstractmethod"}:
                found.setdefault(node.name, []).append(node)
    return found


def _touched(method: Function) -> set[str]:
    """Attributes of `self` that a method names; "self" itself if it hands the object on."""
    if not method.args.args:
        return set()
    me = method.args.args[0].arg
    attributes = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == me
    ]
    whole = {id(node.value) for node in attributes}
    handed_on = any(
        isinstance(node, ast.Name) and node.id == me and id(node) not in whole
        for node in ast.walk(method)
    )
    return {node.attr for node in attributes} | ({"self"} if handed_on else set())


def rings(package: Package) -> Iterator[str]:
    """Modules that import each other in a circle, lazily or for type checking too."""
    for ring in circles(package):
        paths = [package.modules[name].path for name in ring]
        yield " ".join(paths)


def over_budget(package: Package, budgets: Mapping[str, int]) -> Iterator[str]:
    """Rooms with more lines than their budget, and rooms without one."""
    lines: dict[str, int] = {}
    for module in package.modules.values():
        name = module.name.removeprefix("rollpacker").lstrip(".")
        loose = module.path.count("/") == 1
        room = row_of(name, budgets) or ("" if loose else name.partition(".")[0])
        lines[room] = lines.get(room, 0) + len(module.lines)
    for room, number in sorted(lines.items()):
        where = f"rollpacker/{room.replace('.', '/')}"
        if room not in budgets:
            yield f"{where} has {number} lines and no budget"
        elif number > budgets[room]:
            yield f"{where} has {number} lines, over its budget of {budgets[room]}"
