"""What is saved and loaded equals what was there, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollpacker.trainer.base import TrainerError
from tests.trainer.tiny import samples, step, tiny_model, trainer

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SETTINGS = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


@DTYPES
def test_reload_and_go_on_equals_an_uninterrupted_run(tmp_path, dtype):
    whole = trainer(tiny_model(dtype=dtype), **SETTINGS)
    metrics = [step(whole, samples(seed)) for seed in range(5)]

    first = trainer(tiny_model(dtype=dtype), **SETTINGS)
    for seed in range(2):
        step(first, samples(seed))
    first.save(tmp_path)
    resumed = trainer(tiny_model(seed=99, dtype=dtype), **SETTINGS)
    resumed.load(tmp_path)
    assert resumed.state_hashes() == first.state_hashes() and resumed.version == 2
    assert [step(resumed, samples(seed)) for seed in range(2, 5)] == metrics[2:]
    assert resumed.state_hashes() == whole.state_hashes()


@DTYPES
def test_the_model_folder_is_a_hugging_face_model(tmp_path, dtype):
    t = trainer(tiny_model(dtype=dtype))
    step(t, samples(0))
    t.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert again.dtype == dtype
    for (name, a), (other, b) in zip(
        t.model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(a, b)
    assert (tmp_path / "model" / "generation_config.json").is_file()
    suffixes = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_saving_before_the_first_step_and_loading_after_one(tmp_path):
    fresh = trainer(tiny_model(dtype=torch.float32))
    fresh.save(tmp_path)
    used = trainer(tiny_model(seed=3, dtype=torch.float32))
    step(used, samples(0))
    used.load(tmp_path)
    assert used.version == 0 and used.state_hashes() == fresh.state_hashes()
    assert step(used, samples(1)) == step(fresh, samples(1))
    assert used.state_hashes() == fresh.state_hashes()


def test_loading_keeps_the_storage(tmp_path):
    t = trainer(tiny_model(dtype=torch.float32))
    t.save(tmp_path)
    addresses = [p.data_ptr() for p in t.model.parameters()]
    t.load(tmp_path)
    assert [p.data_ptr() for p in t.model.parameters()] == addresses


def test_another_model_or_format_is_refused(tmp_path):
    t = trainer(tiny_model(dtype=torch.float32))
    step(t, samples(0))
    t.save(tmp_path)
    wider = tiny_model(dtype=torch.float32)
    wider.resize_token_embeddings(40)
    with pytest.raises(TrainerError, match="another model"):
        trainer(wider).load(tmp_path)
    with pytest.raises(TrainerError, match="master weights"):
        trainer(tiny_model(dtype=torch.bfloat16)).load(tmp_path)
    state = tmp_path / "trainer" / "trainer.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 7}))
    with pytest.raises(TrainerError, match="format 7"):
        t.load(tmp_path)


def test_unreadable_files_are_named(tmp_path):
    t = trainer(tiny_model(dtype=torch.float32))
    t.save(tmp_path)
    (tmp_path / "trainer" / "optimizer.safetensors").write_bytes(b"broken")
    with pytest.raises(TrainerError, match="trainer"):
        t.load(tmp_path)
    with pytest.raises(TrainerError, match="nowhere"):
        t.load(tmp_path / "nowhere")
