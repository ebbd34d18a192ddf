"""The recipes for one GPU: what the dry run says that they take, from the models' published shapes
(`shapes/`), since no model is at hand where tests run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.trainer.estimate import estimate
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.model import load_model, new_model, write_character_tokenizer
from rollpacker.trainer.trainer import LoraConfig, ModelConfig
from tests.trainer.test_estimate import ARCHITECTURE, part, run_config

ROOT = Path(__file__).parents[2]
SHAPES = Path(__file__).parent / "shapes"
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
GB = 10**9
SHARE = 0.85
"""Of a GPU's memory that a recipe may take; torch and its allocator have the rest."""


def of_shape(recipe: Path) -> RunConfig:
    model = re.search(r"path: Qwen/(\S+)", recipe.read_text())
    assert model is not None
    return load_config(recipe, [f"model.path={SHAPES / model[1]}"], RunConfig)


def test_there_is_one_for_each_size() -> None:
    assert {int(recipe.name.split("gb-")[0]) for recipe in RECIPES} == {16, 24, 80}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_dry_runs_peak_is_under_the_size(recipe: Path) -> None:
    result = estimate(of_shape(recipe), has_cuda=True)
    size = int(recipe.name.split("gb-")[0]) * GB
    assert result.total_bytes is not None
    names = {p.name for p in result.memory.parts}
    assert {"weights", "gradients", "optimizer", "activations", "backward", "kv cache"} <= names
    assert 0.5 * size < result.total_bytes < SHARE * size, result.total_bytes / GB
    assert not [note for note in result.notes if "cannot be known" in note]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_without_the_models_config_no_total_is_told(recipe: Path) -> None:
    """A name tells how many parameters there are, and nothing of what they are trained with."""
    name = f"not-here/{of_shape(recipe).model.path.rsplit('/', 1)[-1]}"
    config = load_config(recipe, [f"model.path={name}"], RunConfig)
    result = estimate(config, has_cuda=True)
    assert result.total_bytes is None
    lines = result.lines()
    assert not [line for line in lines if "together" in line]
    [memory] = [line for line in lines if line.startswith("memory")]
    assert memory.split()[:3] == ["memory", "not", "known"]
    assert any(f"hf download {name} config.json" in line for line in lines)
    if config.model.quantization is not None:
        told = [line for line in lines if line.startswith(("weights", "engine"))]
        assert len(told) == 2 and all("not quantized, so at most" in line for line in told)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_it_says_that_it_has_not_run_on_a_gpu(recipe: Path) -> None:
    head = recipe.read_text().split("\nname:")[0]
    assert "Not run on a GPU yet" in head and recipe.name in head
    assert load_config(recipe, [], RunConfig).name == recipe.stem


@pytest.mark.parametrize("folder", sorted(SHAPES.iterdir()), ids=lambda folder: folder.name)
def test_the_shapes_have_as_many_parameters_as_their_names_say(folder: Path) -> None:
    """Published are 1.54, 3.09 and 7.61 billion."""
    published = {"1.5B": 1.54e9, "3B": 3.09e9, "7B": 7.61e9}
    config = run_config(folder, device="cuda", dtype="bfloat16")
    found = estimate(config, has_cuda=True).num_parameters
    assert found == pytest.approx(published[folder.name.split("-")[1]], rel=0.005)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


def test_codes_take_what_the_estimate_says(tmp_path: Path) -> None:
    """Of a model that is large enough for codes and scales to be more than their tables."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    torch.set_num_threads(1)
    tokenizer = write_character_tokenizer("abcdefgh", tmp_path)
    architecture = ARCHITECTURE | {"hidden_size": 256, "intermediate_size": 1024}
    new_model(architecture, tokenizer, 0).save_pretrained(tmp_path)
    lora = LoraConfig(rank=32)
    settings = {"path": str(tmp_path), "device": "cpu", "quantization": "4bit", "lora": lora}
    model = load_model(ModelConfig(**settings)).model
    held = sum(p.nbytes for p in model.parameters())
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            held += state.absmax.nbytes + state.state2.absmax.nbytes
    config = run_config(tmp_path, quantization="4bit", lora=lora, train={"optimizer": "adamw_8bit"})
    result = estimate(config, has_cuda=False)
    assert part(result, "weights") == pytest.approx(held, rel=0.01)
    add_adapter(model, lora)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert part(result, "optimizer") == pytest.approx(2 * count * (1 + 4 / 256), rel=1e-6)
