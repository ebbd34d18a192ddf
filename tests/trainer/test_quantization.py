"""Moments of 8 bits and a base of 4: near float32, resumed exactly, and saved as what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollpacker.algo import AlgorithmConfig
from rollpacker.engines.engine import Response
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.lora import merged_weights
from rollpacker.trainer.model import ModelError, load_model, new_model, write_character_tokenizer
from rollpacker.trainer.samples import build_train_samples
from rollpacker.trainer.setup import LearnerSetup, build_learner
from rollpacker.trainer.trainer import LoraConfig, ModelConfig, TrainConfig
from tests.cli.test_bad_input import Command, command
from tests.trainer.tiny import responses

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

__all__ = ["command"]

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
NUM_STEPS = 20
LORA = LoraConfig(rank=8, alpha=16.0)
WIDE = LoraConfig(rank=64, alpha=64.0)
"""Whose matrices are large enough for moments of 8 bits."""
WITHIN = {"adamw_8bit": 0.02, "4bit": 0.05, "both": 0.05}
"""Relative distance of the negative log-prob after 20 steps from that of float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("quantized") / "model"
    tokenizer = write_character_tokenizer("0123456789+=abcdefghij", folder)
    new_model(ARCHITECTURE, tokenizer, seed=0).save_pretrained(folder)
    return folder


def setup_of(folder: Path, *, optimizer: str = "adamw", **model: object) -> LearnerSetup:
    return LearnerSetup(
        model=ModelConfig(path=str(folder), device="cpu", **model),
        train=TrainConfig(steps=NUM_STEPS, learning_rate=3e-3, optimizer=optimizer),
        algorithm=AlgorithmConfig(name="reinforce_pp", whiten=False),
        temperature=1.0,
        total_steps=NUM_STEPS,
    )


def groups() -> list[list[tuple[Response, float]]]:
    """Every response is to be learned."""
    return [[(response, 1.0) for response, _ in group] for group in responses(1)]


def train(learner: Learner, steps: int) -> None:
    samples, _ = build_train_samples(groups(), AlgorithmConfig(name="reinforce_pp", whiten=False))
    for _ in range(steps):
        learner.accumulate(samples)
        learner.apply()


def negative_log_prob(learner: Learner) -> float:
    """Mean over the response tokens, in nats."""
    total, count = 0.0, 0
    for group in groups():
        for response, _ in group:
            ids = torch.tensor([[*response.prompt_tokens, *response.tokens]])
            with torch.no_grad():
                table = learner.model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            chosen = table.gather(-1, ids[0, 1:, None])[len(response.prompt_tokens) - 1 :]
            total, count = total - chosen.sum().item(), count + len(chosen)
    return total / count


@pytest.mark.parametrize(
    ("name", "plain", "less"),
    [
        ("adamw_8bit", {}, {"optimizer": "adamw_8bit"}),
        ("4bit", {"lora": LORA}, {"lora": LORA, "quantization": "4bit"}),
        (
            "both",
            {"lora": WIDE},
            {"lora": WIDE, "quantization": "4bit", "optimizer": "adamw_8bit"},
        ),
    ],
)
def test_twenty_steps_end_near_those_of_float32(model, name, plain, less):
    exact, coded = (build_learner(setup_of(model, **kind)) for kind in (plain, less))
    before = negative_log_prob(exact)
    for learner in (exact, coded):
        train(learner, NUM_STEPS)
    wanted, found = negative_log_prob(exact), negative_log_prob(coded)
    print(f"{name}: {before:.4f} -> {wanted:.4f} in float32, {found:.4f}")
    assert wanted < 0.97 * before, "something was learned"
    assert found == pytest.approx(wanted, rel=WITHIN[name])
    assert found != wanted, "fewer bits were used"


def moments(learner: Learner) -> dict[str, Tensor]:
    return learner.trained["actor"].optimizer.state()


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_resume_is_bit_for_bit(model, tmp_path, lora):
    kind = {"optimizer": "adamw_8bit", "lora": lora, "quantization": lora and "4bit"}
    whole = build_learner(setup_of(model, **kind))
    train(whole, 3)
    whole.save(tmp_path)
    train(whole, 2)
    again = build_learner(setup_of(model, **kind))
    train(again, 1)  # what is there is replaced
    again.load(tmp_path)
    assert again.version == 3
    train(again, 2)
    assert again.state_hashes() == whole.state_hashes()
    coded = {n: v for n, v in moments(whole).items() if v.dtype == torch.uint8}
    assert bool(coded) == (lora is None), "adapters this small have moments of 32 bits"
    assert not list(tmp_path.rglob("*.pt")) and not list(tmp_path.rglob("*.bin"))


def test_what_the_state_takes_is_a_quarter(model):
    sizes = {}
    for optimizer in ("adamw", "adamw_8bit"):
        learner = build_learner(setup_of(model, optimizer=optimizer))
        train(learner, 1)
        names = ("mlp.up_proj.weight",)
        sizes[optimizer] = sum(v.nbytes for n, v in moments(learner).items() if n.endswith(names))
    assert sizes["adamw_8bit"] < 0.26 * sizes["adamw"]


def test_a_state_of_another_optimizer_is_refused(model, tmp_path):
    coded = build_learner(setup_of(model, optimizer="adamw_8bit"))
    train(coded, 1)
    coded.save(tmp_path)
    with pytest.raises(Exception, match=r"state1|another"):
        build_learner(setup_of(model)).load(tmp_path)


def test_the_saved_model_is_what_was_trained_and_loads_anywhere(model, tmp_path):
    learner = build_learner(setup_of(model, lora=LORA, quantization="4bit"))
    train(learner, 3)
    learner.save(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == load_file(model / "model.safetensors").keys()
    loaded = load_model(ModelConfig(path=str(tmp_path / "model"), device="cpu")).model
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        wanted, found = learner.model(input_ids=ids).logits, loaded(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(model)


def test_engine_and_trainer_have_the_same_matrices(model):
    config = ModelConfig(path=str(model), device="cpu", lora=LORA, quantization="4bit")
    one, other = (load_model(config).model for _ in range(2))
    plain = dict(load_model(ModelConfig(path=str(model), device="cpu")).model.named_parameters())
    for (name, first), (_, second) in zip(merged_weights(one), merged_weights(other), strict=True):
        assert torch.equal(first, second), name
        assert torch.equal(first, plain[name]) == (".layers." not in name or first.ndim == 1), name
    assert (
        FlopModel.of(one).body
        > 0.6 * FlopModel.of(load_model(ModelConfig(path=str(model), device="cpu")).model).body
    )  # 4 instead of 6 for what is frozen


def test_no_matrices_to_quantize_is_one_message(model, monkeypatch):
    monkeypatch.setattr("rollpacker.trainer.model.quantize_layers", lambda *_: 0)
    with pytest.raises(ModelError, match="has no plain matrices in its layers"):
        load_model(ModelConfig(path=str(model), device="cpu", lora=LORA, quantization="4bit"))


def test_a_run_of_4_bits_trains_and_resumes_exactly(command: Command, model):
    command.settings["model"] = {
        "path": str(model),
        "device": "cpu",
        "quantization": "4bit",
        "lora": {"rank": 4, "alpha": 8},
    }
    train_settings = {"steps": 4, "learning_rate": 1e-2, "threads": 1, "optimizer": "adamw_8bit"}
    command.settings["train"] = train_settings
    assert command.train() == 0, command.err
    newest = sorted((command.run / "checkpoints").glob("step_*"))[-1]
    expected = load_file(newest / "adapter" / "adapter_model.safetensors")
    assert any(bool(v.any()) for n, v in expected.items() if "lora_B" in n)
    assert command.train("--overwrite", train__steps=2) == 0
    assert command.train("--resume") == 0, command.err
    found = load_file(newest / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert command.train("--resume", model__quantization=None, train__steps=5) == 2
    assert "model.quantization: '4bit' -> None" in command.err
    rows = [json.loads(r) for r in (command.run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__quantization": "4bit"}, "needs model.lora"),
        (
            {"model__quantization": "4bit", "model__lora": {"rank": 2}, "train__processes": 2},
            "does not go with several processes",
        ),
        (
            {
                "model__quantization": "4bit",
                "model__lora": {"rank": 2},
                "algorithm__name": "ppo",
            },
            "does not go with a critic",
        ),
        ({"train__optimizer": "adamw_8bit", "train__processes": 2}, "does not go with several"),
        ({"model__quantization": "8bit"}, 'Allowed: "4bit"'),
    ],
)
def test_what_does_not_go_together_is_one_message(command: Command, changes, message):
    assert message in command.refused(**changes)
