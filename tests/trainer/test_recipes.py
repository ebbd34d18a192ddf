"""The recipes: what the dry run says that they take, on made-up GPUs of their size and with the
models' published shapes (`shapes/`), since neither GPUs nor models are at hand where tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rollpacker.cli.main import main
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.placement.roles import Host
from rollpacker.run.parts import placement
from rollpacker.run.parts.this_host import THIS_HOST
from rollpacker.trainer.estimate import estimate
from rollpacker.trainer.lora import add_adapter
from rollpacker.trainer.model import load_model, new_model, write_character_tokenizer
from rollpacker.trainer.model_shape import num_parameters
from rollpacker.trainer.trainer import LoraConfig, ModelConfig
from tests.trainer.test_estimate import ARCHITECTURE, part, run_config

ROOT = Path(__file__).parents[2]
SHAPES = Path(__file__).parent / "shapes"
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
GIB, GB = 1 << 30, 10**9
SHARE = 0.88
"""Of a GPU's memory that a recipe may take; torch and its allocator have the rest."""


def size_of(recipe: Path) -> tuple[int, int]:
    """The number of GPUs that a recipe is for, and the GB of each."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)gb-.*", recipe.stem)
    assert found is not None
    return int(found[1] or 1), int(found[2])


def model_of(recipe: Path) -> str:
    found = re.search(r"path: Qwen/(\S+)", recipe.read_text())
    assert found is not None
    return found[1]


def dry_run(recipe: Path, count: int, gb: int) -> int:
    """Make the dry run of a recipe on so many GPUs of so many GB."""
    node = Host(name=THIS_HOST, cores=64, memory_bytes=1000 * GIB, gpu_bytes=(gb * GB,) * count)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(placement, "this_host", lambda kind: node)
        patched.setenv("HF_HUB_OFFLINE", "1")
        folder = SHAPES / model_of(recipe)
        return main(["train", str(recipe), f"model.path={folder}", "--dry-run"])


def test_there_is_one_for_each_size_and_way() -> None:
    assert {size_of(recipe) for recipe in RECIPES} == {(1, 16), (1, 24), (1, 80), (8, 80)}
    assert {recipe.stem for recipe in RECIPES if size_of(recipe)[0] == 8} == {
        f"8x80gb-{model}-{way}" for model in ("8b", "30b-a3b") for way in ("split", "colocated")
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_dry_run_says_what_the_head_does(recipe: Path, capsys) -> None:
    count, gb = size_of(recipe)
    assert dry_run(recipe, count, gb) == 0
    told = capsys.readouterr().out
    rows = re.findall(r"^ +\d\S* +this host +\S.*?([\d.]+) GiB of ([\d.]+) GiB$", told, re.M)
    shares = [float(used) / float(has) for used, has in rows]
    assert 0.25 < max(shares) < SHARE and float(rows[0][1]) == pytest.approx(gb * GB / GIB, abs=0.1)
    head, _, _ = recipe.read_text().partition("\nname:")
    assert re.search(r"Not run on a GPU yet", head) and recipe.name in head
    numbers = re.findall(r"([\d.]+) GiB", head)
    assert numbers and all(f" {number} GiB of" in told for number in numbers), (numbers, told)
    assert "cannot be known" not in told and "not known" not in told
    config = load_config(recipe, [], RunConfig)
    assert config.name == recipe.stem and config.tail_batching.carry == "auto"
    assert (config.rollout.engine.name == "vllm") is (config.model.quantization is None)


REFUSED = {
    "80gb-8b-lora": (1, 40, "takes 59.0 GiB of its GPU, which has 37.3 GiB; the largest parts are"),
    "8x80gb-8b-split": (
        8,
        24,
        "4 devices (4-7), 1 replica, and device 4 on this host has 22.4 GiB",
    ),
    "8x80gb-30b-a3b-colocated": (8, 40, "the largest parts are weights of rollout 28.4 GiB,"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, capsys) -> None:
    *size, message = REFUSED[name]
    assert dry_run(ROOT / f"configs/recipes/{name}.yaml", *size) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["16gb-3b-4bit-lora", "80gb-8b-lora"])
def test_without_the_models_config_no_total_is_told(name: str) -> None:
    """A name tells how many parameters there are, and nothing of what they are trained with."""
    recipe = ROOT / f"configs/recipes/{name}.yaml"
    name = f"not-here/{model_of(recipe)}"
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


@pytest.mark.parametrize("folder", sorted(SHAPES.iterdir()), ids=lambda folder: folder.name)
def test_the_shapes_have_as_many_parameters_as_is_published(folder: Path) -> None:
    published = {"1.5B": 1.54e9, "3B": 3.09e9, "7B": 7.61e9, "8B": 8.19e9, "30B": 30.53e9}
    found = num_parameters(folder, folder.name, [])
    assert found == pytest.approx(published[folder.name.split("-")[1]], rel=0.005)


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
