"""What `docs/one-gpu.md` says: the memory of each recipe, and how near fewer bits stay to float32.

Memory is the dry run's, from the models' published shapes. The distance is measured on a CPU:
random Qwen2 models are trained for 20 steps to say given responses, in float32 and with fewer bits,
and their negative log-probs compared. The tables are written into the page.

    python benchmarks/one_gpu.py
"""

from __future__ import annotations

import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from lab import ROOT, bench, markdown

from rollpacker.algo import AlgorithmConfig
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import Response
from rollpacker.trainer.estimate import Estimate, estimate
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.model import new_model, write_character_tokenizer
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.setup import LearnerSetup, build_learner
from rollpacker.trainer.trainer import LoraConfig, ModelConfig, TrainConfig

PAGE = ROOT / "docs" / "one-gpu.md"
SHAPES = ROOT / "tests" / "trainer" / "shapes"
ARCHITECTURE = {
    **{"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 384},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "tie_word_embeddings": True},
}
ALGORITHM = AlgorithmConfig(name="reinforce_pp", whiten=False)
NUM_STEPS, SEEDS = 20, range(5)
LORA = LoraConfig(rank=32, alpha=64.0)
CODED = {"lora": LORA, "quantization": "4bit"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "`optimizer: adamw_8bit`, all weights": ({}, {"optimizer": "adamw_8bit"}),
    "`quantization: 4bit` under an adapter": ({"lora": LORA}, CODED),
    "both": ({"lora": LORA}, {**CODED, "optimizer": "adamw_8bit"}),
}
PARTS = {
    "weights": ("weights", "adapters", "decoded"),
    "engine's copy": ("engine",),
    "gradients, masters": ("gradients", "master"),
    "optimizer": ("optimizer",),
    "activations": ("activations", "backward"),
    "keys and values": ("kv cache",),
}


def recipe_estimate(recipe: Path) -> Estimate:
    found = re.search(r"path: Qwen/(\S+)", recipe.read_text())
    assert found is not None, recipe
    config = load_config(recipe, [f"model.path={SHAPES / found[1]}"], RunConfig)
    return estimate(config, has_cuda=True)


def memory_table() -> tuple[str, dict[str, Any]]:
    lines = []
    numbers: dict[str, Any] = {}
    for recipe in sorted((ROOT / "configs" / "recipes").glob("*.yaml")):
        result = recipe_estimate(recipe)
        sizes = {p.name: p.size_bytes for p in result.memory.parts}
        counted = {key: sum(sizes.get(n, 0) for n in names) for key, names in PARTS.items()}
        assert sum(counted.values()) == result.total_bytes, "a part is in no column"
        gib = [f"{value / 2**30:.1f}" for value in (*counted.values(), result.total_bytes)]
        lines.append([f"[`{recipe.stem}`](../configs/recipes/{recipe.name})", *gib])
        numbers[recipe.stem] = {**counted, "together": result.total_bytes}
    return markdown(["recipe", *PARTS, "together"], lines), numbers


def responses(seed: int) -> list[list[tuple[Response, float]]]:
    draw = torch.Generator().manual_seed(seed)
    groups = []
    for row in range(8):
        lengths = torch.randint(4, 24, (2,), generator=draw).tolist()
        prompt, tokens = (
            tuple(torch.randint(3, 25, (n,), generator=draw).tolist()) for n in lengths
        )
        response = Response(
            sample=SampleId(PromptId("train", 0, row), 0, 0),
            prompt_tokens=prompt,
            tokens=tokens,
            log_probs=(-3.0,) * len(tokens),
            finish_reason="stop",
            version=0,
        )
        groups.append([(response, 1.0)])
    return groups


def negative_log_prob(learner: Learner, groups: list[list[tuple[Response, float]]]) -> float:
    """Mean over the response tokens, in nats."""
    total, count = 0.0, 0
    for ((response, _),) in groups:
        ids = torch.tensor([[*response.prompt_tokens, *response.tokens]])
        with torch.no_grad():
            table = learner.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        chosen = table.gather(-1, ids[0, 1:, None])[len(response.prompt_tokens) - 1 :]
        total, count = total - chosen.sum().item(), count + len(chosen)
    return total / count


def trained(folder: Path, seed: int, *, optimizer: str = "adamw", **model: Any) -> list[float]:
    """The negative log-prob before the first step and after the last."""
    setup = LearnerSetup(
        model=ModelConfig(path=str(folder), device="cpu", **model),
        train=TrainConfig(steps=NUM_STEPS, learning_rate=2e-3, optimizer=optimizer),
        algorithm=ALGORITHM,
        temperature=1.0,
        total_steps=NUM_STEPS,
    )
    learner, groups = build_learner(setup), responses(seed)
    samples, _ = build_train_samples(groups, ALGORITHM)
    before = negative_log_prob(learner, groups)
    for _ in range(NUM_STEPS):
        learner.accumulate(samples)
        learner.apply()
    return [before, negative_log_prob(learner, groups)]


def distance_table() -> tuple[str, dict[str, Any]]:
    lines = []
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for seed in SEEDS:
            folder = Path(name) / str(seed)
            tokenizer = write_character_tokenizer("0123456789+=abcdefghij", folder)
            new_model(ARCHITECTURE, tokenizer, seed=seed).save_pretrained(folder)
        for kind, (plain, fewer) in KINDS.items():
            exact = [trained(Path(name) / str(seed), seed, **plain) for seed in SEEDS]
            coded = [trained(Path(name) / str(seed), seed, **fewer) for seed in SEEDS]
            away = [abs(c[1] - e[1]) / (e[0] - e[1]) for c, e in zip(coded, exact, strict=True)]
            means = [statistics.mean(x) for x in (*zip(*exact, strict=True), [c[1] for c in coded])]
            apart = (f"{100 * share:.2f} %" for share in (statistics.mean(away), max(away)))
            lines.append([kind, *(f"{mean:.3f}" for mean in means), *apart])
            numbers[kind] = {"exact": exact, "fewer_bits": coded, "distance_by_learned": away}
    head = ("fewer bits", "before", "float32, 20 steps", "with it", "distance, mean", "largest")
    return markdown(head, lines), numbers


def write_table(name: str, rows: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = f"<!-- table: {name} -->\n{rows}\n<!-- end -->"
    new, count = re.subn(
        rf"<!-- table: {name} -->.*?<!-- end -->", lambda _: table, page, flags=re.DOTALL
    )
    assert count == 1, name
    PAGE.write_text(new, encoding="utf-8")


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    memory, memory_numbers = memory_table()
    distance, distance_numbers = distance_table()
    write_table("memory", memory)
    write_table("distance", distance)
    return {"memory_bytes": memory_numbers, "negative_log_prob": distance_numbers}


if __name__ == "__main__":
    bench(main)
