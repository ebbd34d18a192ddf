"""`rollpacker doctor`: one line a finding, a cure for each that is not ok, and the exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rollpacker.cli import doctor, findings, trials
from rollpacker.cli.findings import GIB, Finding
from rollpacker.cli.main import main
from rollpacker.imports import require
from rollpacker.run.parts import this_host
from rollpacker.sandbox.bwrap import why_unavailable
from rollpacker.sandbox.sandbox import I_ACCEPT, Capabilities, SandboxConfig, SandboxUnavailable
from rollpacker.trainer.model import new_model, write_character_tokenizer

SEEN = Capabilities(
    backend="bwrap",
    passed=("runs", "network", "memory"),
    failed=(),
    profiles=("python", "cold"),
    memory="no fork",
    can_fork=False,
    seconds=0.9,
)
CONFIG = """\
name: mine
model: {path: MODEL}
data: {train: {kind: jsonl, path: FOLDER/rows.jsonl, answer_column: answer}}
rollout: {prompts_per_step: 2, samples_per_prompt: 2, max_response_tokens: 8}
rewards: [{function: "FOLDER/reward.py:f"}]
train: {steps: 1}
runs_dir: FOLDER/runs
"""
REWARD = """\
def f(completions, answer, **columns):
    return [float(c == str(a)) for c, a in zip(completions, answer)]

def wants_more(completions, gold):
    return [1.0 for c in completions]

def misspelt(completions):
    return [scoer(c) for c in completions]

def strict(completions):
    return [float(c.split("=")[1]) for c in completions]
"""


@pytest.fixture(autouse=True)
def good_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test has tests of its own."""

    async def opened(config, backend):
        return SEEN

    monkeypatch.setattr(trials, "_self_test", opened)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = write_character_tokenizer("0123456789+= ", folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    new_model({"model_type": "qwen2", **shape, **heads}, tokenizer, 0).save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    tests = [{"type": "call", "function": "f", "args": [1], "expected": 2}]
    rows = [{"prompt": f"{n}+1=", "answer": n + 1, "tests": tests} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.replace("MODEL", str(model_folder)).replace("FOLDER", str(tmp_path)))
    return path


def look(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Finding]]:
    code = main(["doctor", "--json", *map(str, words)])
    document = json.loads(capsys.readouterr().out)
    assert document["can_start"] is (code == 0)
    found = {line["name"]: Finding(**line) for line in document["findings"]}
    assert len(found) == len(document["findings"])
    for finding in found.values():
        assert bool(finding.cure) is (finding.level != "ok"), finding
    return code, found


# --- the verb -------------------------------------------------------------------------------------


def test_this_machine(capsys):
    code, found = look(capsys)
    assert code == 0
    assert {"python", "torch", "memory", "disk", "limits", "engine", "sandbox"} <= set(found)
    assert "decoded 64 tokens" in found["engine"].text
    for word in (*SEEN.passed, "3 of 3", SEEN.memory, *SEEN.profiles):
        assert word in found["sandbox"].text


def test_plain_text_has_a_line_for_each_and_no_colours(capsys, monkeypatch):
    bad = Finding("warn", "memory", "1.0 of 2.0 GiB free", "Buy some.")
    monkeypatch.setattr(findings, "memory", lambda: bad)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "warn  memory      1.0 of 2.0 GiB free" in lines
    assert " " * 18 + "-> Buy some." in lines
    assert lines[-1].startswith("Training can start: 1 to look at.")
    assert not any("\x1b" in line for line in lines)


def test_a_failure_makes_it_exit_1(capsys, monkeypatch):
    monkeypatch.setattr(findings, "disk", lambda _: Finding("fail", "disk", "full", "Free some."))
    assert main(["doctor"]) == 1
    assert "Training cannot start: 1 failed." in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(capsys, monkeypatch):
    def broken():
        raise KeyError("x")

    monkeypatch.setattr(findings, "gpus", broken)
    code, found = look(capsys)
    assert code == 1
    assert found["gpu"].text == "KeyError: 'x'" and "engine" in found


def test_a_check_that_hangs_is_given_up(capsys, monkeypatch):
    import threading

    monkeypatch.setattr(doctor, "PATIENCE_S", 0.2)
    monkeypatch.setattr(findings, "gpus", threading.Event().wait)
    monkeypatch.setattr(trials, "engine", lambda: Finding("ok", "engine", ""))
    code, found = look(capsys)
    assert code == 0, "a busy machine keeps nothing from starting"
    assert found["gpu"].level == "warn"
    assert found["gpu"].text == "slow: not measured (no answer within 0.2 s)"
    assert "report" not in found["gpu"].cure


def test_a_model_that_cannot_be_loaded_has_no_memory_to_fit(capsys, config):
    code, found = look(capsys, config, "model.path=/nowhere/at/all")
    assert code == 1 and found["model"].level == "fail"
    assert "memory fit" not in found


def test_help_states_the_exit_codes(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "something keeps it from starting" in capsys.readouterr().out


# --- with a config --------------------------------------------------------------------------------


def test_a_good_config(capsys, config):
    code, found = look(capsys, config)
    assert code == 0
    assert found["data.train"].text.startswith("3 prompts, texts as they are")
    assert "first prompt, 4 tokens: 0+1=" in found["data.train"].text
    assert found["rewards"].text.startswith("f: ")
    assert "tokens, context" in found["model"].text
    assert found["memory fit"].level == "ok"


@pytest.mark.parametrize(
    ("override", "name", "words"),
    [
        ("model.path=/nowhere", "model", "/nowhere"),
        ("data.train.path=/nowhere.jsonl", "data", "/nowhere.jsonl"),
        ("data.train.prompt_column=promt", "data", "promt"),
        ("train.stepz=1", "config", "stepz"),
        ("rewards.0.function=FOLDER/reward.py:g", "rewards", "has no g"),
        ("rewards.0.function=FOLDER/reward.py:wants_more", "rewards", "needs the column gold"),
        ("rewards.0.function=FOLDER/reward.py:misspelt", "rewards", "NameError"),
        ("data.train.chat=true", "data", "no chat template"),
        ('environment={tools: ["nofile.py:f"]}', "environment", "nofile.py"),
        ("runs_dir=/proc/nowhere", "disk", "not writable"),
        ("model.lora={rank: 2, target_modules: [q_porj]}", "training", "q_porj"),
    ],
)
def test_what_is_wrong_with_a_config(override, name, words, config, capsys):
    if name == "disk" and os.geteuid() == 0:
        pytest.skip("root may write anywhere, as far as access() says")
    override = override.replace("FOLDER", str(config.parent))
    code, found = look(capsys, config, override)
    assert code == 1
    assert found[name].level == "fail" and words in found[name].text
    if name != "disk":  # which root may write to
        assert main(["train", str(config), override]) == 2, "it would not have started"
        capsys.readouterr()


def test_a_reward_that_some_responses_may_not_get_a_verdict_of(config, capsys):
    code, found = look(capsys, config, f"rewards.0.function={config.parent}/reward.py:strict")
    assert code == 0 and found["rewards"].level == "warn"
    assert "IndexError on a test completion" in found["rewards"].text


def test_a_row_that_cannot_be_used_wherever_it_stands(config, capsys):
    with (config.parent / "rows.jsonl").open("a") as file:
        file.write(40 * '{"prompt": "1+1=", "answer": 2, "tests": []}\n' + '{"answer": 2}\n')
    code, found = look(capsys, config)
    assert code == 1 and "line 44" in found["data"].text


def test_adapters_that_fit_are_nothing_to_tell(config, capsys):
    code, found = look(capsys, config, "model.lora={rank: 2, target_modules: [q_proj]}")
    assert code == 0 and "training" not in found


def test_an_optional_part_that_is_not_there(config, capsys, monkeypatch):
    def missing(_: object) -> None:
        require("no_such_package", extra="lora", what="model.lora")

    monkeypatch.setattr(trials, "training", missing)
    code, found = look(capsys, config)
    assert code == 1 and found["training"].cure == "pip install 'rollpacker[lora]'"


def test_a_config_that_is_not_there(capsys):
    code, found = look(capsys, "/nowhere.yaml")
    assert code == 1 and "/nowhere.yaml" in found["config"].text


def test_a_model_without_weights(capsys, config, model_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    code, found = look(capsys, config, f"model.path={bare}")
    assert code == 1 and "no weights (*.safetensors)" in found["model"].text


def test_a_model_whose_weights_are_cut_off(capsys, config, model_folder, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(model_folder, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, found = look(capsys, config, f"model.path={cut}")
    assert code == 1 and "cannot be read" in found["model"].text


def test_a_run_that_is_there_already(capsys, config, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    code, found = look(capsys, config)
    assert code == 0 and "run" not in found
    (tmp_path / "runs" / "mine" / "events.jsonl").touch()
    code, found = look(capsys, config)
    assert code == 0 and found["run"].level == "warn" and "--resume" in found["run"].text


def test_a_sandbox_is_a_must_only_for_those_who_need_it(capsys, config, monkeypatch):
    async def closed(config, backend):
        raise SandboxUnavailable(why_unavailable("the program bwrap is not installed"))

    monkeypatch.setattr(trials, "_self_test", closed)
    code, found = look(capsys, config)
    assert code == 0 and found["sandbox"].level == "warn"
    assert "bwrap is not installed" in found["sandbox"].text
    assert "docs/sandbox.md" in found["sandbox"].cure
    code, found = look(capsys, config, "rewards=[{function: code}]")
    assert code == 1 and found["sandbox"].level == "fail"
    accepted = f"sandbox.allow_unsandboxed_code={I_ACCEPT}"
    code, found = look(capsys, config, "rewards=[{function: code}]", accepted)
    assert code == 0 and found["sandbox"].level == "warn"


# --- single checks --------------------------------------------------------------------------------


@pytest.mark.parametrize("message", ["down. Start it.", "down\nStart\n  it."])
def test_a_sandbox_that_cannot_be_opened(message, monkeypatch):
    async def closed(config, backend):
        assert backend == "http"
        raise SandboxUnavailable(message)

    monkeypatch.setattr(trials, "_self_test", closed)
    found = trials.sandbox(SandboxConfig(url="http://127.0.0.1:1"), needed=True)
    assert found == Finding("fail", "sandbox", "down", "Start it.")


def test_attacks_that_a_sandbox_does_not_contain(monkeypatch):
    import dataclasses

    async def opened(config, backend):
        return dataclasses.replace(SEEN, failed=("disk",))

    monkeypatch.setattr(trials, "_self_test", opened)
    finding = trials.sandbox(SandboxConfig(), needed=False)
    assert (finding.level, finding.text) == ("warn", "not contained: disk")


def test_no_version_with_a_known_hole_is_allowed():
    """torch.load could be made to corrupt memory, loading a model run code from its files, vLLM run
    code from a model's config, and ray's dashboard let any web page stop jobs."""
    safe_from = {"torch": "2.10", "transformers": "4.48", "vllm": "0.14", "ray": "2.54"}
    lowest = {}
    for line in importlib.metadata.requires("rollpacker") or ():
        one = Requirement(line)
        if one.name in safe_from:
            lowest[one.name] = [s.version for s in one.specifier if s.operator == ">="]
    for name, floor in safe_from.items():
        assert any(Version(version) >= Version(floor) for version in lowest[name]), name


def test_packages_that_are_missing_or_old(monkeypatch):
    needs = ["numpy>=99", "no-such-package>=1", "pytest; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needs)
    finding = findings.packages()
    assert finding.level == "fail"
    assert "numpy is" in finding.text and "no-such-package is missing" in finding.text
    assert "pytest" not in finding.text


@pytest.mark.parametrize(
    ("own", "files", "cpus", "memory"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/memory.max": "max"}, 1.5, None),
        ("0::/a\n", {"a/cpu.max": "max 100000", "memory.max": str(8 * GIB)}, None, 8 * GIB),
        (
            "4:memory:/x\n3:cpu,cpuacct:/y\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": str(2 * GIB),
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "cpu,cpuacct/y/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/y/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            0.5,
            2 * GIB,
        ),
        ("", {}, None, None),
    ],
)
def test_cgroup_limits(own, files, cpus, memory, tmp_path, monkeypatch):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    read = this_host.read_text
    monkeypatch.setattr(this_host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        this_host, "read_text", lambda path: own if path.name == "cgroup" else read(path)
    )
    assert this_host.cgroup_cpus() == cpus
    assert this_host.cgroup_memory_bytes() == memory


def test_a_small_quota_a_small_memory_and_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(this_host, "cgroup_cpus", lambda: 0.5)
    assert findings.cpus().level == "warn" and "train.threads=1" in findings.cpus().cure
    monkeypatch.setattr(this_host, "cgroup_memory_bytes", lambda: GIB)
    assert findings.memory().level == "warn" and "1.0 GiB" in findings.memory().text
    usage = namedtuple("usage", "total free")
    for free, level in ((50 * GIB, "ok"), (5 * GIB, "warn"), (GIB // 2, "fail")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(64 << 20, free))
        assert findings.disk(tmp_path / "not" / "there").level == level
    if Path("/dev/shm").is_dir():
        (finding,) = findings.shared_memory()
        assert (finding.level, finding.text) == ("warn", "64 MiB")


def test_low_limits(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert findings.open_limits().cure == "Run first: ulimit -n 65536; ulimit -u 4096"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    assert findings.open_limits().text == "unlimited open files, unlimited processes"


def test_on_a_terminal_it_fits_the_width():
    code = (
        "from rich.console import Console; from rollpacker.cli import doctor;"
        "from rollpacker.cli.findings import Finding;"
        "doctor._print(Console(force_terminal=True, width=60, highlight=False),"
        " Finding('warn', 'sandbox', 'word ' * 40, 'cure ' * 20))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "\x1b[33mwarn" in done.stdout
    first, *more = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()
    assert first.startswith("warn  sandbox     word word")
    assert len(more) > 4
    assert all(line.startswith(" " * 18) and len(line) <= 60 for line in more)
