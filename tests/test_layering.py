"""Who may import whom, as `docs/architecture.md` says; and light commands stay light."""

import ast
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rollpacker"
PARTS = (
    *("algo", "cli", "cluster", "config", "controller", "core", "data", "dialogue"),
    *("endpoints", "environments", "workers", "remote", "report", "rewards", "rollout"),
    *("sandbox", "serving", "sim", "trackers", "trainer", "trl"),
)
CONTRACTS = (
    *("algo.config", "data.dataset", "rewards.reward", "rollout.engine", "sandbox.sandbox"),
    *("trackers.tracker", "trainer.trainer", "callbacks", "cluster.seat"),
    *("dialogue.trajectory", "environments.environment"),
)
"""A part's protocol, the records that cross it and its config class, in one light file."""
NOUNS = tuple(f"core.{noun}" for noun in ("ids", "events", "commands", "lifecycle"))

FOR_ALL = ("chat_template", "codec", "did_you_mean", "imports", "spans", "warn_once")
"""Free to all parts but the core."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "codec": (),
    "core": ("codec",),
    "config": ("core", *CONTRACTS),
    "bus": ("core",),
    "sim": ("bus", "core", "config", "report"),
    "report": ("callbacks", "core", "config"),
    "algo": ("imports",),
    "rollout": (*NOUNS, "host_store", "workers", "weight_buffer", "weight_probe"),
    "rewards": (
        *(*NOUNS, "core.deadlines", "core.reward_hosts", "endpoints", "environments.environment"),
        *("workers", "sandbox"),
    ),
    "sandbox": ("endpoints", "workers"),
    "endpoints": (),
    "environments": (
        *(*NOUNS, "data", "workers", "rewards", "sandbox", "serving.chat", "serving.http"),
    ),
    "serving": (*NOUNS, "dialogue", "rollout"),
    "workers": (),
    "data": NOUNS,
    "dialogue": ("data",),
    "trainer": (
        *(*NOUNS, "core.packs", "core.pipeline", "core.pipeline_layout", "core.pipeline_links"),
        *("core.pipeline_order", "core.pipeline_plan", "core.pipeline_split"),
        *("core.pipeline_watch", "core.pipeline_work"),
        *("algo", "host_store", "workers", "weight_buffer", "weight_probe"),
    ),
    "remote": ("cluster", "workers", "weight_buffer"),
    "cluster": ("core", "host_store", "workers"),
    "controller": ("bus", "core", "config", *CONTRACTS),
    "callbacks": (),
    "chat_template": (),
    "trackers": ("callbacks",),
    "trl": (
        *("bus", "core", "data.dataset", "report.history", "report.time_book", "rollout"),
        *("config.load", "controller.carried", "controller.clock", "controller.errors"),
    ),
    "did_you_mean": (),
    "host_store": (),
    "imports": (),
    "spans": (),
    "warn_once": (),
    "weight_buffer": (),
    "weight_probe": (),
}
"""What of rollpacker each part may import besides itself, inside functions too. Imports for type
checking alone are free, except in the core."""

MAY_ANYTHING_INSIDE_FUNCTIONS = ("cli", "__init__", "__main__")
"""At module level these have the light parts only."""
LIGHT = ("cli", "config", "core", "report", "sim", *FOR_ALL, *CONTRACTS)

IMPURE = {"asyncio", "logging", "os", "socket", "subprocess", "threading", "time", "random"}
OF_CORE = {"msgspec", "numpy", "rollpacker"}
HEAVY = {"torch", "transformers", "ray", "vllm", "datasets", "reasoning_gym", "pyarrow"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports_of(tree: ast.AST) -> list[tuple[int, str]]:
    """`(line, dotted name)` of everything imported; `from a import b` counts as `a.b`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def in_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def imports_outside(tree: ast.Module, *blocks: Callable[[ast.AST], bool]) -> list[tuple[int, str]]:
    """All imports but those in these kinds of blocks."""
    inside = {
        line
        for node in ast.walk(tree)
        if any(is_block(node) for is_block in blocks)
        for line, _ in imports_of(node)
    }
    return [(line, name) for line, name in imports_of(tree) if line not in inside]


def module_level(tree: ast.Module) -> list[tuple[int, str]]:
    """The imports that run when the module does."""
    return imports_outside(tree, for_types_only, in_function)


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in allowed)


def violations(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    part = part_of(path)
    contract = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    if part in MAY_ANYTHING_INSIDE_FUNCTIONS:
        checked, allowed = module_level(tree), LIGHT
    else:
        checked = imports_of(tree) if part == "core" else imports_outside(tree, for_types_only)
        allowed = (part, *MAY_IMPORT[part], *(FOR_ALL if part != "core" else ()))
    found = []
    for line, name in checked:
        top, _, rest = name.partition(".")
        where = f"{path.relative_to(ROOT)}, line {line}: {name}"
        if top == "rollpacker" and rest.split(".")[0] in (
            *(*PARTS, *FOR_ALL),
            *("bus", "host_store", "weight_buffer", "weight_probe"),
        ):
            if not within(rest, allowed):
                found.append(f"{where} (of rollpacker, {part} may import {', '.join(allowed)})")
        elif top == "ray" and part != "remote":
            found.append(f"{where} (only remote imports ray)")
        elif part == "core" and top in IMPURE:
            found.append(f"{where} (core is pure)")
        elif part == "core" and top not in sys.stdlib_module_names | OF_CORE:
            found.append(f"{where} (core has the standard library, numpy and msgspec)")
    if part in ("core", "config", "sim", "report", "cli", "__init__") or contract in CONTRACTS:
        found += [
            f"{path.relative_to(ROOT)}, line {line}: {name} (this module must stay light)"
            for line, name in module_level(tree)
            if name.split(".")[0] in HEAVY
        ]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_layers(path: Path) -> None:
    assert violations(path) == []


def test_every_part_has_a_row() -> None:
    assert {part_of(path) for path in FILES} <= {*MAY_IMPORT, *MAY_ANYTHING_INSIDE_FUNCTIONS}


def test_the_check_finds_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for part, source in [
        ("core", "import time\n"),
        ("core", "import torch\n"),
        ("core", "from rollpacker.config.load import load_config\n"),
        ("config", "def f():\n    import rollpacker.rewards.functions.function_reward\n"),
        ("data", "from rollpacker.core.job import Job\n"),
        ("trainer", "import ray\n"),
        ("cli", "import torch\n"),
        ("cli", "from rollpacker.rollout import torch_engine\n"),
    ]:
        path = tmp_path / part / "file.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        assert violations(path), source
    path.write_text("def f():\n    import torch\n    from rollpacker.rollout import torch_engine\n")
    assert violations(path) == []


def modules_named(*parts: str) -> list[str]:
    """Modules of these parts that exist, `__main__` ones aside."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if part_of(path) in parts and path.name != "__main__.py"
    ]


def test_light_modules_load_nothing_heavy() -> None:
    names = ["rollpacker", *modules_named("core", "config", "sim", "report", "cli")]
    names += [f"rollpacker.{base}" for base in CONTRACTS]
    code = "import importlib, sys\n"
    code += f"for name in {names!r}: importlib.import_module(name)\n"
    code += f"print(*sorted(set(sys.modules) & {HEAVY!r}))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_cli_module_loads_no_config_libraries() -> None:
    pytest.importorskip("rollpacker.cli.main")
    code = "import sys, rollpacker.cli.main\n"
    code += (
        "print(*sorted(set(sys.modules) & {'omegaconf', 'pydantic', 'yaml', 'numpy', 'rich'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {"omegaconf", "pydantic"}


def test_help_answers_at_once() -> None:
    pytest.importorskip("rollpacker.cli.main")
    command = [sys.executable, "-m", "rollpacker.cli.main", "--help"]
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The processor's time, the least of five: neighbours in its caches lengthen it, too.
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert "train" in done.stdout
    assert min(seconds) < 0.2, seconds
