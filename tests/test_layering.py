"""Who may import whom, as `docs/architecture.md` says; no circles; and light commands stay light.

The tables and rules are in `tests/structure/layers.py`."""

import resource
import subprocess
import sys

import pytest

from tests.structure.layers import (
    CONTRACTS,
    HEAVY,
    MAY_IMPORT,
    below,
    circles,
    row_of,
    violations,
)
from tests.structure.source import Package, rollpacker


def test_layers() -> None:
    assert "\n".join(violations(rollpacker())) == ""


def test_every_row_has_modules() -> None:
    names = [name.removeprefix("rollpacker").lstrip(".") for name in rollpacker().modules]
    used = {row_of(name, MAY_IMPORT) for name in names}
    assert sorted(set(MAY_IMPORT) - used) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/file.py", "import time\n"),
        ("core/file.py", "import torch\n"),
        ("core/file.py", "from rollpacker.config.load import load_config\n"),
        ("core/file.py", "from rollpacker.imports import load_function\n"),
        ("config/file.py", "def f():\n    import rollpacker.rewards.functions.function_reward\n"),
        ("data/file.py", "from rollpacker.core.job.job import Job\n"),
        (
            "data/file.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from rollpacker.core.job.job import Job\n",
        ),
        ("trainer/file.py", "from rollpacker.config.load import load_config\n"),
        ("trainer/file.py", "import ray\n"),
        ("cli/file.py", "import torch\n"),
        ("cli/file.py", "try:\n    import torch\nexcept ImportError:\n    pass\n"),
        ("cli/file.py", "from rollpacker.engines import torch_engine\n"),
        ("no_such_part/file.py", ""),
    ],
)
def test_the_check_of_layers_finds_what_it_should(path: str, source: str) -> None:
    others = {f"{name.replace('.', '/')}.py": "" for name in rollpacker().modules}
    assert list(violations(Package.of_texts({**others, f"rollpacker/{path}": source}))), source


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cli/file.py", "def f():\n    import torch\n    from rollpacker.engines import engine\n"),
        ("trainer/estimate.py", "from rollpacker.config.load import load_config\n"),
    ],
)
def test_the_check_of_layers_lets_pass_what_is_right(path: str, source: str) -> None:
    others = {f"{name.replace('.', '/')}.py": "" for name in rollpacker().modules}
    assert list(violations(Package.of_texts({**others, f"rollpacker/{path}": source}))) == []


def test_the_check_of_circles_finds_what_it_should() -> None:
    lazily = "def f():\n    from rollpacker.c import x\n"
    for_types = "if TYPE_CHECKING:\n    import rollpacker.a\n"
    texts = {
        "rollpacker/a.py": "from rollpacker import b\n",
        "rollpacker/b.py": lazily,
        "rollpacker/c.py": for_types,
        "rollpacker/d.py": "import rollpacker.a\n",
    }
    assert circles(Package.of_texts(texts)) == [["rollpacker.a", "rollpacker.b", "rollpacker.c"]]
    assert circles(Package.of_texts({**texts, "rollpacker/c.py": ""})) == []


def test_light_modules_load_nothing_heavy() -> None:
    light = ("core", "config", "sim", "report", "cli", *CONTRACTS)
    names = [
        name
        for name in rollpacker().modules
        if below(name.removeprefix("rollpacker."), light) and not name.endswith("__main__")
    ]
    assert len(names) > 100
    code = "import importlib, sys\n"
    code += f"for name in {['rollpacker', *names]!r}: importlib.import_module(name)\n"
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
