"""Settings of the trainer and checkpoints that cannot be used, as the user of `rollpacker train`
sees them: one message that names the mistake, the right exit code, no traceback."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollpacker.run.error_messages import classify
from rollpacker.run.folder.checkpoint import newest_checkpoint
from rollpacker.trainer.calls import error_bytes, error_of
from rollpacker.trainer.compiling import compile_layers
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.model import new_model, write_character_tokenizer
from rollpacker.trainer.trainer import LoraConfig, TrainerProcessError
from tests.cli.test_bad_input import ARCHITECTURE, Command, command, model

__all__ = ["command", "model"]


@pytest.mark.parametrize(
    "overrides, name",
    [
        (["algorithm.name=distillation", "model.teacher=/no/teacher"], "model.teacher /no/teacher"),
        (
            ["algorithm.name=ppo", "train.critic.path=/no/critic"],
            "train.critic.path /no/critic",
        ),
    ],
)
def test_a_further_model_that_is_not_there_is_named_by_its_own_key(
    command: Command, overrides: list[str], name: str
):
    assert command("train", command.config(), *overrides) == 2
    assert command.err.startswith(f"rollpacker: {name}: there is no such folder")


@pytest.mark.parametrize(
    "overrides, name",
    [
        (["train.schedule=foo"], "train.schedule=foo"),
        (["algorithm.name=distillation", "model.teacher=/no/teacher"], "model.teacher /no/teacher"),
    ],
)
def test_the_doctor_finds_what_would_stop_the_trainer(
    command: Command, overrides: list[str], name: str
):
    assert command("doctor", command.config(), *overrides) == 1
    assert name in command.out


def test_a_mapping_without_a_space_after_the_colon_is_told_so(command: Command):
    assert command("train", command.config(), "train.schedule_options={power:2}") == 2
    assert "train.schedule_options" in command.err
    assert "a space comes after the colon" in command.err


def test_a_critic_of_another_vocabulary_is_refused(command: Command, tmp_path: Path):
    other = tmp_path / "other"
    tokenizer = write_character_tokenizer("xyz", other)
    new_model(ARCHITECTURE, tokenizer, seed=0).save_pretrained(other)
    settings = ["algorithm.name=ppo", f"train.critic.path={other}"]
    assert command("train", command.config(), *settings) == 2
    assert f"train.critic.path {other} has another vocabulary" in command.err


def resign(checkpoint: Path) -> None:
    """Make the manifest true again: as if another version or a careless hand had written it."""
    manifest = checkpoint / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"] = {
        str(path.relative_to(checkpoint)): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path != manifest
    }
    manifest.write_text(json.dumps(content))


def test_a_checkpoint_that_the_trainer_cannot_take_is_one_message(command: Command):
    config = command.config()
    assert command("train", config) == 0
    checkpoint = newest_checkpoint(command.run / "checkpoints").folder
    state = checkpoint / "trainer" / "trainer.json"
    written = json.loads(state.read_text())
    tensors = next((checkpoint / "trainer").glob("*.safetensors"))

    state.write_text(json.dumps({**written, "format": 1}))
    resign(checkpoint)
    assert command("train", config, "--resume", "train.steps=9") == 2
    assert "format 1" in command.err and str(state) in command.err

    state.write_text(json.dumps(written))
    tensors.unlink()
    resign(checkpoint)
    assert command("train", config, "--resume", "train.steps=9") == 2
    assert f"{tensors} is missing" in command.err


def test_a_process_that_lost_another_leaves_the_message_to_that_ones_end(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    lost = RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    error = error_of(error_bytes(lost))
    assert isinstance(error, TrainerProcessError) and classify(error)[0] == 6
    assert capfd.readouterr().err == ""


def test_peft_does_not_warn_beside_our_own_message_of_a_tied_weight(model: Path):
    policy = AutoModelForCausalLM.from_pretrained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="is tied to another module's"):
            add_adapter(policy, LoraConfig(target_modules=("embed_tokens",)))


def test_generation_on_a_compiled_model_stays_uncompiled(model: Path):
    compiled: list[object] = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    policy = AutoModelForCausalLM.from_pretrained(model)
    assert compile_layers(policy, backend=backend)
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        policy(ids, use_cache=False)
    assert not compiled
    policy(ids, use_cache=False)
    assert compiled
