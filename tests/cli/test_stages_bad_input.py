"""Pipeline stages that cannot be, as the user of `rollpacker train` sees them: one message that
names the setting and what to do, exit code 2, no process and no folder left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollpacker.trainer.launch import Ranks
from rollpacker.trainer.model import new_model, write_character_tokenizer
from tests.cli.test_bad_input import ARCHITECTURE, Command, command
from tests.run.test_process_run import worker_pids

__all__ = ["command"]
TWO = ("train.processes=2", "train.pipeline.stages=2")
SMALL = "train.micro_batch_tokens=16"


def written(folder: Path, **architecture: object) -> Path:
    torch.set_num_threads(1)
    tokenizer = write_character_tokenizer("0123456789+=abc", folder)
    shape = {**ARCHITECTURE, "num_hidden_layers": 2, **architecture}
    new_model(shape, tokenizer, seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers."""
    return written(tmp_path_factory.mktemp("stages") / "model")


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one layer."""
    return written(tmp_path_factory.mktemp("stages") / "shallow", num_hidden_layers=1)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It scales what comes out of its embeddings, and would do so again in each stage."""
    folder = tmp_path_factory.mktemp("stages") / "granite"
    return written(folder, model_type="granite", embedding_multiplier=3.0)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the trainer that is started fails the test."""

    def start(*_arguments: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(Ranks, "_start", start)


REFUSED = {
    "more stages than layers": (
        ("train.processes=4", "train.pipeline.stages=4"),
        ("model.path", "the model has 2", "lower train.pipeline.stages"),
    ),
    "processes": (
        ("train.processes=3", "train.pipeline.stages=2"),
        ("train.pipeline.stages", "must divide train.processes (3)"),
    ),
    "no processes": (
        ("train.pipeline.stages=2",),
        ("train.pipeline.stages", "must divide train.processes (not set)"),
    ),
    "sum of layers": (
        (*TWO, "train.pipeline.layers=[1,2]"),
        ("train.pipeline.layers=[1, 2] adds up to 3", "has 2 layers", "set it to auto"),
    ),
    "empty stage": (
        (*TWO, "train.pipeline.layers=[2,0]"),
        ("train.pipeline.layers=[2, 0]: every stage needs a layer", "set it to auto"),
    ),
    "number of layers": (
        (*TWO, "train.pipeline.layers=[2]"),
        ("train.pipeline", "layers=[2] must have a number for each of the 2 stages"),
    ),
    "compile": (
        (*TWO, "train.compile=true"),
        ("compile=True does not go with pipeline.stages=2", "set it to False"),
    ),
    "gradient sync": (
        (*TWO, "train.gradient_sync=micro-batch"),
        ("gradient_sync=micro-batch does not go with pipeline.stages=2", "set it to step"),
    ),
    "replicas": (
        ("train.processes=4", "train.pipeline.stages=2", "train.replicas=2"),
        ("replicas=2 does not go with pipeline.stages=2", "set it to 1"),
    ),
    "cap below a micro-batch": (
        (*TWO, SMALL, "train.pipeline.live_tokens=15"),
        ("pipeline.live_tokens=15", "micro_batch_tokens=16", "raise it"),
    ),
    "links": ((*TWO, "train.pipeline.links=foo"), ("train.pipeline.links", '"foo"')),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("option", ["", "--dry-run"])
def test_what_stages_cannot_be_is_refused_before_anything_starts(
    command: Command, no_processes: None, case: str, option: str
):
    overrides, told = REFUSED[case]
    error = command.refused(*overrides, *filter(None, [option]))
    assert all(part in error for part in told), error
    assert error.count("\n") == 1


def test_the_doctor_says_so_too(command: Command):
    overrides, told = REFUSED["more stages than layers"]
    assert command("doctor", command.config(), *overrides) == 1
    assert told[-1] in command.out


def test_further_models_need_a_layer_for_each_stage(
    command: Command, no_processes: None, shallow: Path
):
    for setting, algorithm in (("model.teacher", "distillation"), ("train.critic.path", "ppo")):
        error = command.refused(*TWO, f"algorithm.name={algorithm}", f"{setting}={shallow}")
        assert error.startswith(f"rollpacker: {setting} {shallow}: 2 stages"), error


def test_a_cap_below_one_sample_is_refused_once_the_longest_prompt_is_known(command: Command):
    """Of 5 tokens, and a response of 8."""
    error = command.refused(*TWO, "train.micro_batch_tokens=8", "train.pipeline.live_tokens=12")
    assert "train.pipeline.live_tokens=12 is less than a sample may have: 5 tokens" in error
    assert "Raise it to 13" in error
    assert not worker_pids(os.getpid())


def test_a_model_whose_stages_do_not_reproduce_it_is_refused_by_the_module(
    command: Command, granite: Path
):
    error = command.refused(*TWO, model__path=str(granite))
    assert "model.layers.1 does not give in stage 1 what it gives in the whole model" in error
    assert "leave train.pipeline.stages at 1" in error
    assert not worker_pids(os.getpid())


def test_fewer_micro_batches_than_stages_are_told_with_their_bubble(command: Command):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rollpacker", "train", str(command.config()), *TWO),
            "train.steps=2",
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "micro-batch" in line]
    assert len(told) == 1 and "50 %" in told[0], done.stderr
    assert "lower train.micro_batch_tokens or train.pipeline.stages" in told[0]
