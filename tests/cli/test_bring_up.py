"""`rollpacker doctor --gpu`: an engine and a trainer on this machine, part by part. Most tests have
both in this process; the whole bring-up, with its processes, is the first test."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.cli import bring_up, bring_up_child, doctor, findings
from rollpacker.cli.bring_up import BringUp
from rollpacker.cli.findings import GIB, Finding
from rollpacker.cli.main import main
from rollpacker.core.placement.roles import Host
from rollpacker.engines import process_engine
from rollpacker.engines.engine import EngineError
from rollpacker.run.parts import engines, placement, trainer
from rollpacker.run.parts.hosts import open_hosts
from rollpacker.run.parts.trainer import _compared_text
from rollpacker.trainer.trainer import RanksLost
from rollpacker.workers.host import ThisHost

ON_CPU = ["doctor", "--gpu", "--device", "cpu"]
PARTS = [
    "versions",
    "processors",
    "memory",
    "varlen",
    "flex",
    "grouped",
    "plan",
    "engine",
    "decode",
]
PARTS += ["sleep", "trainer", "mismatch", "step", "wake", "weights", "mismatch"]
SAID = {"tokens": 9, "seconds": 0.1, "gradient_distance": 1e-7, "dtype": "float32"}
"""What a process says of a packed step that is right."""
NEEDS = {
    "plan": {"engine", "decode", "sleep", "trainer", "mismatch", "step", "weights"},
    "engine": {"decode", "sleep", "mismatch", "weights"},
    "decode": {"mismatch"},
    "trainer": {"mismatch", "step", "weights"},
}
"""Part that fails -> the parts that then cannot be tried."""


def tried(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[Finding]]:
    code = main([*ON_CPU, "--json", *words])
    found = [Finding(**line) for line in json.loads(capsys.readouterr().out)["findings"]]
    for finding in found:
        assert bool(finding.cure) is (finding.level != "ok"), finding
    return code, found


def test_the_whole_bring_up_on_a_cpu(capsys):
    code, found = tried(capsys)
    assert [(f.name, f.level) for f in found if f.level != "ok"] == []
    assert (code, [f.name for f in found]) == (0, PARTS + ["weights", "mismatch"] * 2)
    text = {f.name: f.text for f in found}
    assert "2 ranks over gloo" in text["trainer"] and "tokens/s" in text["decode"]
    carried = [f.text.split(":")[0] for f in found if f.name in ("weights", "mismatch")]
    ways = [(f"by {one}", f"after {one}") for one in ("host", "broadcast", "ipc")]
    assert carried[1:] == [word for way in ways for word in way]


# --- in this process ------------------------------------------------------------------------------


class Here:
    """An engine in this process where a bring-up starts one in a process of its own."""

    def __init__(self, setup: Any, **_options: Any) -> None:
        self._setup = setup

    async def ready(self) -> None:
        self._engine = engines.make_engine(config=self._setup.config, **self._setup.arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def trainer_here(config: Any, policy: Any, ranks: Any, folder: Path) -> Any:
    from rollpacker.trainer.setup import LearnerSetup, build_learner
    from rollpacker.trainer.torch_trainer import TorchTrainer

    setup = LearnerSetup(
        model=config.model,
        train=config.train,
        algorithm=config.algorithm,
        temperature=1.0,
        total_steps=2,
    )
    return TorchTrainer(build_learner(setup), in_place=False, shared=True)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    monkeypatch.setattr(bring_up, "CARRIERS", ("host",))  # the others join processes
    monkeypatch.setattr(bring_up, "SIZES", {"cpu": sizes})
    monkeypatch.setattr(bring_up, "SAMPLES", {"cpu": (8, 12)})
    for name in ("PATIENCE_S", "START_S"):
        monkeypatch.setattr(bring_up, name, 3600.0)  # a busy machine fails no test
    monkeypatch.setattr(process_engine, "ProcessEngine", Here)
    monkeypatch.setattr(trainer, "start_trainer_processes", lambda config, hosts: None)
    monkeypatch.setattr(trainer, "build_trainer", trainer_here)
    monkeypatch.setattr(BringUp, "_packed_step", lambda self, kind: SAID)
    yield
    torch.set_num_threads(threads)


def raising(error: Exception) -> Any:
    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise error

    return fail


def failing_coroutine(error: Exception) -> Any:
    async def fail(*_arguments: Any, **_options: Any) -> Any:
        raise error

    return fail


LOST = RanksLost("process 1 of the trainer ended by itself (signal 9, SIGKILL)")
DEAD = EngineError("the engine is dead")


class Broken(Here):
    """An engine whose method of this name fails."""

    name = ""

    def __getattr__(self, name: str) -> Any:
        if name != type(self).name:
            return super().__getattr__(name)
        return raising(DEAD) if name == "submit" else failing_coroutine(DEAD)


def break_engine(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    broken = type("Broken", (Broken,), {"name": method})
    if method == "ready":
        broken.ready = failing_coroutine(DEAD)
    monkeypatch.setattr(process_engine, "ProcessEngine", broken)


def break_trainer(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    from rollpacker.trainer.torch_trainer import TorchTrainer

    monkeypatch.setattr(TorchTrainer, method, failing_coroutine(LOST))


FAULTS = {
    "versions": lambda m: m.setattr(bring_up, "version", raising(OSError("no disk"))),
    "devices": lambda m: m.setattr(findings, "cpus", raising(KeyError("x"))),
    "grouped": lambda m: m.setattr(BringUp, "_packed_step", raising(RuntimeError("a kernel"))),
    "plan": lambda m: m.setattr(BringUp, "_own", raising(ValueError("no room on the disk"))),
    "engine": lambda m: break_engine(m, "ready"),
    "decode": lambda m: break_engine(m, "submit"),
    "sleep": lambda m: break_engine(m, "offload"),
    "trainer": lambda m: m.setattr(trainer, "build_trainer", raising(LOST)),
    "mismatch": lambda m: break_trainer(m, "score"),
    "step": lambda m: break_trainer(m, "accumulate"),
    "weights": lambda m: break_trainer(m, "hand_over"),
}


@pytest.mark.parametrize("part", FAULTS)
def test_a_part_that_fails_says_so_and_the_others_are_tried(part, here, capsys, monkeypatch):
    FAULTS[part](monkeypatch)
    code, found = tried(capsys)
    assert code == 1
    by_name = {f.name: f for f in reversed(found)}
    assert by_name[part].level == "fail" and by_name[part].cure
    untried = {f.name for f in found if f.text.startswith("not tried: it needs")}
    assert untried == NEEDS.get(part, set())
    fine = {"step": {"mismatch", "sleep"}, "weights": {"step"}, "mismatch": {"decode"}}
    for name in fine.get(part, {"grouped"} - {part}):
        assert by_name[name].level == "ok"
    if part in ("engine", "decode"):
        assert by_name["trainer"].level == by_name["step"].level == "ok", "made-up responses do"


HANGING = {"devices": "_devices", "decode": "_decode", "trainer": "_start_trainer"}


@pytest.mark.parametrize("part", HANGING)
def test_a_part_that_hangs_is_cut(part, here, capsys, monkeypatch):
    let_go, cut, parts, ended = threading.Event(), BringUp.cut, BringUp.parts, []

    def hurried(self: BringUp) -> Iterator[bring_up.Part]:
        for one in parts(self):
            yield one._replace(patience_s=0.2) if one.name == part else one

    monkeypatch.setattr(BringUp, "parts", hurried)
    monkeypatch.setattr(BringUp, "cut", lambda self: (ended.append(1), cut(self)))
    monkeypatch.setattr(BringUp, HANGING[part], lambda self: let_go.wait())
    code, found = tried(capsys)
    let_go.set()
    hung = next(f for f in found if f.name == part)
    assert code == 1 and hung.text == "no answer within 0.2 s: its processes were ended"
    assert len(ended) == 2 and hung.cure
    assert found[-1].name in ("weights", "mismatch"), "all others were tried"


def test_old_weights_in_an_engine_are_found(here, capsys, monkeypatch):
    from rollpacker.run.ports import hand_over

    monkeypatch.setattr(hand_over, "bring_up_to_date", lambda engine, weights: None)
    code, found = tried(capsys)
    assert code == 1
    last = found[-1]
    assert (last.name, last.level) == ("mismatch", "fail") and "after host" in last.text


def test_weights_that_arrive_wrong_are_found(here, capsys, monkeypatch):
    from rollpacker.engines.embedded.engine import TorchEngine

    monkeypatch.setattr(TorchEngine, "weight_probe", lambda self: "f" * 64)
    code, found = tried(capsys)
    assert code == 1 and "the engine's weights are not the trainer's" in found[-1].text


@pytest.mark.parametrize("away", [0.01, math.nan])
def test_an_attention_with_another_gradient_is_found(away, monkeypatch):
    said = SAID | {"gradient_distance": away}
    monkeypatch.setattr(BringUp, "_packed_step", lambda self, kind: said)
    assert BringUp("cpu", None, ())._attention("grouped").level == "fail"


def test_packed_rows_have_the_gradient_of_padded_ones():
    said = bring_up_child.packed_step("grouped", "cpu")
    assert said["gradient_distance"] < 1e-5 and said["tokens"] == 510
    assert "CUDA" in bring_up_child.packed_step("varlen", "cpu")["why_not"]


def test_a_config_brings_its_model_and_engine(here, tmp_path, capsys):
    from rollpacker.trainer.model import new_model, write_character_tokenizer

    folder = tmp_path / "a-model"
    tokenizer = write_character_tokenizer("abcdefghijklmnopqrstuvwxyz ", folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    new_model({"model_type": "qwen2", **shape, **heads}, tokenizer, 0).save_pretrained(folder)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"name: mine\nmodel: {{path: {folder}}}\n"
        "data: {train: {kind: jsonl, path: not-there.jsonl}}\n"
        "rollout: {prompts_per_step: 2, samples_per_prompt: 2, max_response_tokens: 8}\n"
        "rewards: [{function: math}]\ntrain: {steps: 1}\n"
    )
    code, found = tried(capsys, str(config), "train.processes=1")
    assert code == 0, found
    plan = next(f for f in found if f.name == "plan")
    assert "a-model" in plan.text and "1 rank" in plan.text


def test_engine_and_ranks_have_the_devices_of_a_run(monkeypatch):
    """Two of eight made-up GPUs, each for an engine and a rank by turns."""
    node = Host(name="this host", cores=64, memory_bytes=1 << 40, gpu_bytes=(80 * GIB,) * 8)
    monkeypatch.setattr(placement, "this_host", lambda kind: node)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    tree = {"model": {"path": "none", "device": "cuda"}, "rollout": {}, "train": {}}
    config, hosts = open_hosts(bring_up._on_same_devices(bring_up._run_config(tree, ()), "cuda"))
    assert (config.rollout.engines, config.train.processes, config.train.colocate) == (2, 2, True)
    assert hosts.of_engine(0, 1)[1] == {"CUDA_VISIBLE_DEVICES": "0"}
    ranks = [place.environment for place in hosts.of_ranks()]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in ranks] == ["0", "1"]
    assert ranks[0]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_a_trainer_that_compares_has_a_text(here):
    """vLLM's model is not the trainer's code, so that both say log-probs of prompts."""
    one = BringUp("cpu", None, ["rollout.engine.name=torch"])
    one._make_plan()
    assert one.policy is not None and one.config is not None
    engine = replace(one.config.rollout.engine, name="vllm")
    config = replace(one.config, rollout=replace(one.config.rollout, engine=engine))
    assert len(_compared_text(config, one.policy)) == 256
    one.close()


# --- what is printed ------------------------------------------------------------------------------


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.home()
    good = Finding(
        "ok", "plan", f"the model {home}/models/Qwen3-8B, as {os.uname().nodename} has it"
    )
    bad = Finding("fail", "engine", "EngineError: no file ~/a b/x, at 3/4 of /dev/shm", "Mend it.")
    parts = [bring_up.Part(one.name, lambda one=one: one, "") for one in (good, bad)]
    monkeypatch.setattr(BringUp, "parts", lambda self: iter(parts))


def test_the_block_is_for_an_issue(two_parts, capsys):
    assert main(ON_CPU) == 1
    said = capsys.readouterr().out
    block = said.partition("```text\n")[2]
    assert block.endswith("```\n")
    lines = block.splitlines()
    assert lines[0].startswith("rollpacker doctor --gpu --device cpu: ")
    assert lines[1] == "ok    plan        the model Qwen3-8B, as host has it"
    assert "3/4 of /dev/shm" in lines[2] and str(Path.home()) not in block


def test_without_a_gpu_one_sentence_names_the_way(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "sees no GPU" in said and "--device cpu" in said


# --- processes ------------------------------------------------------------------------------------


def test_a_kernel_that_hangs_ends_with_its_process(monkeypatch):
    start, stopped = ThisHost.start, []

    def start_stopped(self: ThisHost, *arguments: Any, **options: Any) -> Any:
        child, line = start(self, *arguments, **options)
        os.kill(child.pid, signal.SIGSTOP)
        stopped.append(child)
        return child, line

    monkeypatch.setattr(ThisHost, "start", start_stopped)
    one = BringUp("cpu", None, ())
    part = next(p for p in one.parts() if p.name == "grouped")
    check = doctor._Check(part.name, part.look, True, 1.0, part.cure, one.cut)
    (found,) = doctor._outcome(check)
    assert found.level == "fail" and "no answer within 1 s" in found.text
    assert stopped[0].how_ended(10.0) is not None


def test_a_kernel_that_crashes_is_one_finding(monkeypatch):
    monkeypatch.setattr(bring_up, "CHILD", "rollpacker.no_such_module")
    one = BringUp("cpu", None, ())
    with pytest.raises(RuntimeError, match="its process ended"):
        one._packed_step("grouped")
    one.close()
