"""Models that only score."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.trainer.batches import Row, collate
from rollpacker.trainer.frozen import frozen_copy, load_teacher
from rollpacker.trainer.model import ModelError, character_tokenizer, new_model

ALPHABET = "abcdefg"
ROWS = [Row([3, 4], [5, 6, 7]), Row([5], [4])]


def language_model(alphabet: str = ALPHABET, seed: int = 0, **settings: object) -> PreTrainedModel:
    architecture = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.2,
    }
    return new_model(architecture | settings, character_tokenizer(alphabet), seed)


def write(folder: Path, alphabet: str = ALPHABET, **settings: object) -> PreTrainedModel:
    model = language_model(alphabet, **settings)
    model.save_pretrained(folder)
    character_tokenizer(alphabet).save_pretrained(folder)
    return model


def plain_log_probs(model: PreTrainedModel, temperature: float) -> torch.Tensor:
    values = []
    for context, targets, _ in ROWS:
        logits = model(torch.tensor([[*context, *targets]])).logits[0] / temperature
        table = logits.log_softmax(-1)
        values += [table[len(context) - 1 + i, target] for i, target in enumerate(targets)]
    return torch.stack(values)


def batch():
    return collate(ROWS, 0, torch.device("cpu"))


def test_a_frozen_copy_stays_as_it_was() -> None:
    model = language_model().double()
    reference = frozen_copy(model)
    expected = plain_log_probs(model, 0.7).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert (plain_log_probs(model, 0.7) - expected).abs().max() > 1e-3
    scores = reference.log_probs(batch(), 0.7)
    torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12)
    assert not scores.requires_grad
    assert not any(p.requires_grad for p in reference.policy.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_a_teacher_is_another_model_of_the_same_vocabulary(tmp_path: Path) -> None:
    teacher = write(tmp_path, hidden_size=32, seed=5)
    policy = language_model().double()
    loaded = load_teacher(str(tmp_path), model=policy, tokenizer=character_tokenizer(ALPHABET))
    expected = plain_log_probs(teacher.double(), 1.0).detach()
    torch.testing.assert_close(loaded.log_probs(batch(), 1.0), expected, rtol=1e-10, atol=1e-12)
    half = load_teacher(
        str(tmp_path),
        model=policy,
        tokenizer=character_tokenizer(ALPHABET),
        dtype=torch.bfloat16,
    )
    assert {p.dtype for p in half.policy.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("alphabet", "message"),
    [
        ("abcdegf", r"token 8 is 'g' there and 'f' in"),
        ("abcdef", r"token 9 is missing there and 'g' in"),
        ("abcdefgh", r"token 10 is 'h' there and missing in"),
    ],
)
def test_another_vocabulary_is_refused(alphabet: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, alphabet)
    with pytest.raises(ModelError, match=message):
        load_teacher(str(tmp_path), model=language_model(), tokenizer=character_tokenizer(ALPHABET))


def test_rows_of_padding_may_be_more_but_not_fewer(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    write(tmp_path, vocab_size=16)
    load_teacher(str(tmp_path), model=language_model(), tokenizer=tokenizer)
    with pytest.raises(ModelError, match="has 16 rows of embeddings, the policy has 20"):
        load_teacher(str(tmp_path), model=language_model(vocab_size=20), tokenizer=tokenizer)
