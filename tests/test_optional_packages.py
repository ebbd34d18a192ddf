"""Optional packages: declared, and where one is missing one sentence that names its extra."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rollpacker.trackers.by_name import TRACKERS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NOT_IN_ALL = {"quantized", "ray", "trl", "vllm", "wandb", "mlflow", "trackio", "swanlab"} | {
    *("gem", "openenv", "verifiers", "verl"),
}
"""What is large and most do without; another framework; trackers, of which one wants one's own;
environments that do not go with the rest."""
IMPORTED_AS = {"gem_llm": "gem", "transferqueue": "transfer_queue"}
"""What is not installed where the tests run, and has another name there than its module."""
FROM_A_REPOSITORY = {"slime"}
"""What is installed from its repository, and whose integration users have beside it."""
TREES = [ast.parse(path.read_text()) for path in (ROOT / "rollpacker").rglob("*.py")]


def distribution(requirement: str) -> str:
    """`math-verify[antlr]>=0.9` -> `math_verify`."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    name = found[0].lower().replace("-", "_")
    return IMPORTED_AS.get(name, name)


def test_whatever_is_imported_is_declared() -> None:
    needed = [*PROJECT["dependencies"], *(one for name in EXTRAS for one in EXTRAS[name])]
    declared = {distribution(one) for one in needed}
    providers = packages_distributions()
    missing = set()
    for tree in TREES:
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names}:
                known = {distribution(one) for one in providers.get(top, [top])}
                if top not in {*sys.stdlib_module_names, "rollpacker"} and not known & declared:
                    missing.add(top)
    assert missing == FROM_A_REPOSITORY


def test_every_extra_that_a_message_names_has_the_package() -> None:
    """And `all` has every extra but those of `NOT_IN_ALL`."""
    used = set()
    for tree in TREES:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
                "require",
                "missing",
            ):
                continue
            extra = next((k.value for k in node.keywords if k.arg == "extra"), None)
            if isinstance(extra, ast.Constant) and isinstance(node.args[0], ast.Constant):
                used.add((extra.value, node.args[0].value))
    # A tracker's name is its package and its extra (`Tracker.missing`), so no literal stands there.
    used |= {(name, name) for name in TRACKERS}
    assert {extra for extra, _ in used} == {*EXTRAS} - {"all", "dev", "test"}
    providers = packages_distributions()
    for extra, package in used:
        names = {package, *(distribution(one) for one in providers.get(package, ()))}
        assert names & {distribution(one) for one in EXTRAS[extra]}
    in_all = {*EXTRAS, "rollpacker"} - {"all", "dev", "test", *NOT_IN_ALL}
    assert set(re.findall(r"\w+", EXTRAS["all"][0])) == in_all


_WITHOUT_THEM = """
import asyncio, contextlib, io, json, sys, tempfile
from importlib.machinery import PathFinder
from pathlib import Path

sys.path.insert(0, sys.argv[1])
HIDDEN = set(sys.argv[2].split())

class WithoutHidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in HIDDEN
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutHidden
import resume
from rollpacker.cli.main import main

def run(*arguments):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()) as out:
        code = main([str(argument) for argument in arguments])
    return [code, said.getvalue(), out.getvalue()]

def math_check():
    from rollpacker.rewards.reward import RewardConfig
    from rollpacker.rewards.math.math_reward import MathConfig, MathReward
    from rollpacker.rewards.shared import Shared
    from rollpacker.sandbox import bwrap
    from rollpacker.sandbox.sandbox import SandboxConfig

    class Box:
        async def lacks(self, profile):
            return bwrap.lacks(profile)

    class FakeShared(Shared):
        def check_sandbox(self):
            pass

        async def sandbox(self):
            return Box()

    shared, entry = FakeShared(SandboxConfig()), RewardConfig(function="math")
    reward = MathReward(MathConfig(), entry=entry, name="math", shared=shared)
    try:
        reward.check([{"answer": "3"}])
    except ValueError as error:
        from rollpacker.run.error_messages import classify
        return [classify(error)[0], str(error), ""]

def program_check():
    from rollpacker.integrations import environments
    try:
        environments.load("program:true", {})
    except ValueError as error:
        from rollpacker.run.error_messages import classify
        return [classify(error)[0], str(error), ""]

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    resume.write_model(folder / "model")
    config = resume.write_config(folder, 2)
    gym = "data.train={kind: reasoning_gym, size: 4, tasks: [{task: chain_sum}]}"
    hub = "data.train={kind: huggingface, path: some/name}"
    scorer = "rewards=[{function: reasoning_gym}]"
    rows = folder / "gym.jsonl"
    row = {"prompt": "1+2=", "answer": "3", "task": "chain_sum", "question": "?", "metadata": {}}
    rows.write_text(json.dumps({**row, "task_options": {}}) + "\\n")
    made = run("train", config)
    files = sorted(path.name for path in (folder / "runs" / "reference").iterdir())
    found = {
        "train": made,
        "report": run("report", folder / "runs" / "reference"),
        "picture": run("report", folder / "runs" / "reference", "--steps", "1"),
        "lora": run("train", config, "name=lora", "model.lora={rank: 2}"),
        "data": run("train", config, "name=gym", gym),
        "hub": run("train", config, "name=hub", hub),
        "scorer": run("train", config, "name=scorer", f"data.train.path={rows}", scorer),
        "math": math_check(),
        "dash": run("dash", folder / "runs"),
        "serve": run("serve", folder / "model"),
        "program": program_check(),
    }
    assert not HIDDEN & set(sys.modules), HIDDEN & set(sys.modules)
    print(json.dumps({"files": files, "found": found}))
"""

EXPECTED = {
    "picture": "drawing a picture needs matplotlib",
    "lora": "model.lora needs peft",
    "data": "data of kind reasoning_gym needs reasoning_gym",
    "hub": "data of kind huggingface needs datasets",
    "scorer": "the reward reasoning_gym needs reasoning_gym",
    "math": "the reward math needs math_verify",
    "dash": "serving over HTTP needs starlette",
    "serve": "serving over HTTP needs starlette",
    "program": "serving over HTTP needs starlette",
}
NAMED = {"picture": "report", "lora": "lora", "data": "gym", "hub": "datasets"} | {
    "scorer": "gym",
    "math": "math",
    "dash": "serve",
    "serve": "serve",
    "program": "serve",
}


@pytest.fixture(scope="module")
def without() -> dict[str, object]:
    """What is said and written where none of the optional packages is installed."""
    hidden = "matplotlib tensorboard peft math_verify reasoning_gym datasets"
    hidden += " starlette uvicorn"
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_THEM, str(ROOT / "benchmarks"), hidden],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_run_needs_none_of_them(without) -> None:
    code, said, _ = without["found"]["train"]
    assert code == 0, said
    assert {"summary.json", "metrics.jsonl", "samples", "trace.json"} <= set(without["files"])
    assert not {"timeline.png", "tensorboard"} & set(without["files"])
    for package in ("matplotlib", "tensorboard"):
        assert said.count(f"needs {package}, which is not installed") == 1
    code, _, out = without["found"]["report"]
    assert code == 0 and "Wrote report.html, summary.json, trace.json" in out


@pytest.mark.parametrize("case", EXPECTED)
def test_what_needs_one_says_which_extra(without, case: str) -> None:
    code, said, _ = without["found"][case]
    extra = NAMED[case]
    sentence = f"{EXPECTED[case]}, which is not installed: pip install 'rollpacker[{extra}]'"
    assert (code, said.strip().removeprefix("rollpacker: ")) == (2, sentence)


def test_a_simulation_draws_nothing_without_matplotlib(tmp_path, monkeypatch, capsys) -> None:
    from rollpacker import imports
    from rollpacker.cli.main import main

    monkeypatch.setattr(imports, "missing", lambda package, **_: f"this needs {package}")
    monkeypatch.chdir(tmp_path)
    scenario = str(ROOT / "configs" / "scenarios" / "14b-16k.yaml")
    assert main(["simulate", scenario, "steps=1", "--picture", "x.png"]) == 2
    assert capsys.readouterr().err == "rollpacker: this needs matplotlib\n"
    assert main(["simulate", scenario, "steps=1"]) == 0
    assert "this needs matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
