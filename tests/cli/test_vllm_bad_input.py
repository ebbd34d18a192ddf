"""What a user does wrong with vLLM, through the command line: one message, nothing left behind.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rollpacker.engines.vllm import setup as vllm_setup
from rollpacker.trainer.model import new_model, no_progress_bars, write_character_tokenizer
from tests.cli.test_bad_input import ARCHITECTURE, Command, command, model
from tests.engines.with_vllm import SHAPE, needs_vllm

__all__ = ["command", "model"]

pytestmark = needs_vllm

VLLM = ("rollout.engine.name=vllm", "rollout.engine.kv_cache_gib=0.02")


@pytest.fixture
def fitting(tmp_path: Path) -> Path:
    """A model that vLLM can run on a CPU, with a context of 64 tokens."""
    folder = tmp_path / "fitting"
    tokenizer = write_character_tokenizer("0123456789+=abc", folder)
    with no_progress_bars():
        new_model({**ARCHITECTURE, **SHAPE}, tokenizer, seed=0).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engines", [1, 2])
def test_heads_of_a_size_that_the_cpu_kernel_lacks(command: Command, engines: int) -> None:
    said = command.refused(*VLLM, f"rollout.engines={engines}")
    assert "no kernel for heads of size 8, which this model has; it has 32, 64," in said
    assert "configs/quickstart-vllm.yaml" in said and "rollout.engine.name=torch" in said


@pytest.mark.parametrize("engines", [1, 2])
def test_a_model_with_code_of_its_own(command: Command, fitting: Path, engines: int) -> None:
    config = json.loads((fitting / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Mine"}
    (fitting / "config.json").write_text(json.dumps(config))
    (fitting / "modeling.py").write_text("raise SystemExit('it was run')\n")
    said = command.refused(*VLLM, f"rollout.engines={engines}", model__path=str(fitting))
    assert f"{fitting} brings code of its own (auto_map in config.json)" in said


@pytest.mark.parametrize("name, installed", [("vllm", "0.33.0"), ("transformers", "5.23.0")])
def test_versions_that_nobody_tried(
    command: Command,
    fitting: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    installed: str,
) -> None:
    known = vllm_setup._version
    monkeypatch.setattr(
        vllm_setup, "_version", lambda one: installed if one == name else known(one)
    )
    said = command.refused(*VLLM, model__path=str(fitting))
    assert f"was tried with {name} from" in said and f"{installed} is installed: make vllm" in said


@pytest.mark.parametrize(
    "override, says",
    [
        ("rollout.max_response_tokens=64", "no room for a prompt"),
        ("rollout.max_response_tokens=100", "no room for a prompt"),
        ("rollout.max_response_tokens=62", "prompts have more than 2 tokens"),
    ],
)
def test_more_tokens_than_the_context_has(
    command: Command, fitting: Path, override: str, says: str
) -> None:
    """vLLM itself takes such a limit without a word."""
    assert says in command.refused(*VLLM, override, model__path=str(fitting))


def test_a_prompt_beyond_the_context(command: Command, fitting: Path) -> None:
    rows = command.rows({"prompt": "1"}, {"prompt": "1" * 80})
    said = command.refused(*VLLM, model__path=str(fitting), data__train__path=rows)
    assert "1 of 2 prompts have more than 56 tokens: " in said and "line 2 (80)" in said


def test_memory_for_no_sample_at_all(command: Command, fitting: Path) -> None:
    said = command.refused(*VLLM, "rollout.engine.kv_cache_gib=0.00001", model__path=str(fitting))
    assert "rollout.engine.kv_cache_gib" in said


def test_an_adapter_of_a_rank_that_vllm_lacks(command: Command, fitting: Path) -> None:
    said = command.refused(*VLLM, "model.lora.rank=513", model__path=str(fitting))
    assert "model.lora.rank=513: vLLM takes adapters of rank 512 at most; set a lower one" in said


@pytest.mark.parametrize("overrides", [(), ("model.lora.rank=2",)])
def test_with_none_of_it_the_run_trains(
    command: Command, fitting: Path, overrides: tuple[str, ...]
) -> None:
    assert command.train(*VLLM, *overrides, model__path=str(fitting), train__steps=1) == 0
    shutil.rmtree(command.run)
