"""Loading models, naming them, and the character tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from rollpacker.trainer.model import (
    ModelError,
    character_tokenizer,
    fingerprint,
    load_model,
    load_tokenizer,
    new_model,
    write_character_tokenizer,
)
from rollpacker.trainer.trainer import ModelConfig

ALPHABET = "0123456789+-=; \n\té€<>"
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path):
    tokenizer = write_character_tokenizer(ALPHABET, tmp_path)
    new_model(ARCHITECTURE, tokenizer, seed=0).save_pretrained(tmp_path)
    return tmp_path


def load(path, **settings):
    return load_model(ModelConfig(path=str(path), device="cpu", **settings))


def test_character_tokenizer_gives_back_every_text(tmp_path):
    write_character_tokenizer(ALPHABET, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("12+3=15;\n", "  7 \t= <é€>  ", ALPHABET):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        padded = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
        assert tokenizer.decode(padded, skip_special_tokens=True) == text
    assert tokenizer("1?")["input_ids"][1] == tokenizer.unk_token_id
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert character_tokenizer(ALPHABET).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_character_tokenizer_beside_any_model_keeps_spaces(tmp_path, model_type):
    """The automatic class goes by the model's type, and for one of these it drops them."""
    tokenizer = write_character_tokenizer(ALPHABET, tmp_path)
    new_model({**ARCHITECTURE, "model_type": model_type}, tokenizer, seed=0).save_pretrained(
        tmp_path
    )
    text = " 1 +\n 2 "
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.decode(loaded(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "alphabet, message", [("", "at least one"), ("abca", "'a' more than once")]
)
def test_bad_alphabets(alphabet, message):
    with pytest.raises(ModelError, match=message):
        character_tokenizer(alphabet)


def test_load_model(folder):
    loaded = load(folder)
    assert loaded.dtype == loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.model.config.eos_token_id == loaded.tokenizer.eos_token_id
    assert loaded.model.generation_config.eos_token_id == loaded.tokenizer.eos_token_id
    assert load(folder, dtype="bfloat16").model.dtype == torch.bfloat16


TAKEN = """
import resource, sys
from rollpacker.trainer.model import load_model
from rollpacker.trainer.trainer import ModelConfig

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

small, large = (ModelConfig(path=path, device="cpu") for path in sys.argv[1:])
load_model(small, without_weights=True)  # code that loading imports
before = peak_mib()
loaded = load_model(large, without_weights=True)
print(peak_mib() - before, sum(p.numel() for p in loaded.model.parameters()))
print({p.device.type for p in loaded.model.parameters()}, loaded.dtype, loaded.device)
"""


def test_names_and_shapes_alone_take_no_memory(folder, tmp_path_factory):
    """Of a model of 200 MB less than 20 MB, as the process measures it."""
    large = tmp_path_factory.mktemp("large")
    tokenizer = write_character_tokenizer(ALPHABET, large)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    new_model(ARCHITECTURE | sizes, tokenizer, seed=0).save_pretrained(large)
    told = subprocess.run(
        [sys.executable, "-c", TAKEN, str(folder), str(large)], capture_output=True, text=True
    )
    taken, parameters, *kinds = told.stdout.split(maxsplit=2)
    assert 4 * int(parameters) > 200 << 20, told.stderr
    assert float(taken) < 20
    assert kinds == ["{'meta'} torch.float32 cpu\n"]


def test_a_seed_gives_the_same_model():
    tokenizer = character_tokenizer("ab")
    one, same, other = (new_model(ARCHITECTURE, tokenizer, seed) for seed in (1, 1, 2))
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.get_parameter(weight), same.get_parameter(weight))
    assert not torch.equal(one.get_parameter(weight), other.get_parameter(weight))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "lama"}, "'lama' is not one that transformers knows"),
        ({"hiden_size": 3}, "did you mean 'hidden_size'"),
        ({"num_attention_heads": 0}, "cannot build"),
        ({"vocab_size": 3}, "does not fit"),
    ],
)
def test_bad_architectures(change, message):
    with pytest.raises(ModelError, match=message):
        new_model(ARCHITECTURE | change, character_tokenizer("abc"), seed=0)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load(tmp_path / "nothing")


def test_folders_that_are_no_models(folder):
    weights = folder / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ModelError, match="cannot load the model"):
        load(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(folder)
    with pytest.raises(ModelError, match="is a file"):
        load(folder / "tokenizer.json")


def test_weights_that_do_not_belong_to_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="incomplete"):
        load(folder)


def test_a_tokenizer_that_is_too_large_or_missing(folder):
    write_character_tokenizer(ALPHABET + "xyz", folder)
    with pytest.raises(ModelError, match="token 'z' is number"):
        load(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load(folder)


def test_fingerprint_follows_the_contents(folder, tmp_path_factory):
    before = fingerprint(folder)
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("not part of it")
    assert fingerprint(copy) == before == fingerprint(str(folder))
    write_character_tokenizer(ALPHABET[::-1], copy)
    assert fingerprint(copy) != before
    with pytest.raises(ModelError, match="no model"):
        fingerprint(folder / "nothing")
