"""The package as parsed files: its modules, what each of them imports, and its classes."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Import:
    """One imported name. `from a import b` counts as `a.b`."""

    line: int
    name: str
    at_module_level: bool
    """True if it runs when the module does: neither inside a function nor for type checking."""


@dataclass(frozen=True, eq=False)
class Module:
    """One file of a package."""

    name: str
    """Its dotted name; of an `__init__.py` the package's."""
    path: str
    """Its path from the root of the repository, with slashes."""
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def read_all(self) -> None:
        """Computes what is otherwise computed when it is first asked for."""
        _ = self.lines, self.imports, self._named

    @cached_property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree.body, True))

    @cached_property
    def definitions(self) -> list[tuple[str, Definition]]:
        """Each function and class with its qualified name, as `Class.method`."""
        return [(around, node) for around, node in self._named if not isinstance(node, ast.Call)]

    @cached_property
    def calls(self) -> list[tuple[str, ast.Call]]:
        """Each call with the qualified name of the innermost definition around it ("" if there
        is none)."""
        return [(around, node) for around, node in self._named if isinstance(node, ast.Call)]

    @cached_property
    def _named(self) -> list[tuple[str, Definition | ast.Call]]:
        found: list[tuple[str, Definition | ast.Call]] = []
        waiting: list[tuple[str, ast.AST]] = [("", self.tree)]
        while waiting:
            around, node = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                around = f"{around}.{node.name}".lstrip(".")
                found.append((around, node))
            elif isinstance(node, ast.Call):
                found.append((around, node))
            waiting += [(around, child) for child in ast.iter_child_nodes(node)]
        return found


def _imports(body: list[ast.stmt], at_module_level: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, at_module_level)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            for alias in node.names:
                yield Import(node.lineno, f"{node.module}.{alias.name}", at_module_level)
        else:
            for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith(
                "TYPE_CHECKING"
            )
            runs = at_module_level and not for_types
            runs = runs and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports([n for n in _below(node) if isinstance(n, ast.stmt)], runs)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """The statements right below, those of handlers and cases too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from ast.iter_child_nodes(child)
        else:
            yield child


@dataclass(frozen=True, eq=False)
class Package:
    """All modules of a package, by dotted name."""

    modules: Mapping[str, Module]

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Package:
        """A made-up package from `{path: source}`, such as `{"rollpacker/core/job/job.py":
        "..."}`."""
        return cls({name_of(path): Module(name_of(path), path, texts[path]) for path in texts})

    @cached_property
    def imported(self) -> dict[str, set[str]]:
        """For each module the modules of the package that it imports anywhere."""
        return {
            name: {m for one in module.imports if (m := self.module_of(one.name))} - {name}
            for name, module in self.modules.items()
        }

    def module_of(self, name: str) -> str | None:
        """The module that an imported dotted name is, or is taken from."""
        if name in self.modules:
            return name
        above = name.rpartition(".")[0]
        return above if above in self.modules else None

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """For each module the modules of the package that import it anywhere."""
        found: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, imported in self.imported.items():
            for one in imported:
                found[one].add(name)
        return found

    @cached_property
    def classes(self) -> dict[str, tuple[Module, ast.ClassDef]]:
        """The classes at module level, by `module.Class`."""
        return {
            f"{module.name}.{node.name}": (module, node)
            for module in self.modules.values()
            for node in module.tree.body
            if isinstance(node, ast.ClassDef)
        }

    def class_of(self, module: Module, expression: ast.expr) -> str | None:
        """The class of the package that an expression names in this module."""
        return self._named(module, ast.unparse(expression).partition("[")[0])

    def _named(self, module: Module, text: str) -> str | None:
        if f"{module.name}.{text}" in self.classes:
            return f"{module.name}.{text}"
        first, _, rest = text.partition(".")
        for one in module.imports:
            if one.name.rpartition(".")[2] == first:
                full = f"{one.name}.{rest}".rstrip(".")
                if full in self.classes:
                    return full
        return None

    def bases(self, name: str) -> list[str | None]:
        """The bases of a class; None for each base that the package does not define."""
        module, node = self.classes[name]
        return [self.class_of(module, base) for base in node.bases]


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read(*folders: str) -> Package:
    """All Python files of these folders of the repository."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return Package.of_texts({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths})


@cache
def rollpacker() -> Package:
    """The package as it stands, parsed. Its trees are millions of objects that live until the
    process ends: the collector of garbage is told to leave them alone, for each of its rounds would
    take a second."""
    package = read("rollpacker")
    gc.disable()
    for module in package.modules.values():
        module.read_all()
    gc.freeze()
    gc.enable()
    return package
