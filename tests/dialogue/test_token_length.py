"""How few tokens a text has at least: never more than it has, whatever it says."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.dialogue.token_length import token_length
from rollpacker.dialogue.trajectory import TooLong
from rollpacker.trainer.model import character_tokenizer
from tests.dialogue.families import CORPUS, FAMILIES, byte_backend, template_of, tokenizer_of

PIECES = [
    *" ".join(CORPUS).split(),
    *("\u1f82", unicodedata.normalize("NFD", "\u1f82"), "e\u0301", "\ud55c", "\u1112\u1161\u11ab"),
    *(" ", "  " * 40, "\n", "\t", "9", "9" * 50, "<|im_end|>", "<pad>", "</s>", "\x00", "\u2028"),
]


def fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def composing() -> PreTrainedTokenizerFast:
    backend = byte_backend()
    backend.normalizer = normalizers.NFC()
    return fast(backend)


TOKENIZERS: dict[str, Any] = {name: tokenizer_of(name) for name in FAMILIES}
TOKENIZERS["NFC"] = composing()
TOKENIZERS["characters"] = character_tokenizer("abc 09", ["<|im_start|>"])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens(name: str) -> None:
    tokenizer, draw = TOKENIZERS[name], random.Random(name)
    found = token_length(tokenizer)
    assert found is not None
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(1, 30))) for _ in range(300)]
    texts += [piece * 40 for piece in PIECES]
    texts += [token * 40 for token in tokenizer.get_vocab()]
    for text in texts:
        assert found.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text


def swallows_space() -> PreTrainedTokenizerFast:
    made = fast(byte_backend())
    made.add_tokens([AddedToken("<end>", rstrip=True)])
    return made


def normalized(normalizer: Any) -> PreTrainedTokenizerFast:
    backend = byte_backend()
    backend.normalizer = normalizer
    return fast(backend)


def of_words(cut: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = cut
    return fast(backend)


def without_some_bytes() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast(backend)


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (swallows_space(), "<end>" + " " * 5000),
        (normalized(normalizers.Strip()), " " * 5000),
        (normalized(normalizers.Replace(Regex(" +"), " ")), " " * 5000),
        (normalized(normalizers.Replace("aaaa", "a")), "a" * 5000),
        (of_words(pre_tokenizers.Whitespace()), "w" * 5000),
        (of_words(pre_tokenizers.Split(Regex(r"[\s\S]"), "removed")), "w" * 5000),
        (without_some_bytes(), "c" * 5000),
    ],
)
def test_where_any_text_may_be_a_token_or_none_nobody_can_say(tokenizer: Any, text: str) -> None:
    assert len(tokenizer.encode(text, add_special_tokens=False)) < 5000 / 3
    assert token_length(tokenizer) is None


@pytest.mark.parametrize("name", ["chatml", "mistral"])
def test_what_fits_is_encoded_whole_and_what_does_not_is_not_at_all(name: str) -> None:
    template = template_of(name)
    marker = FAMILIES[name].special[0]
    for content in ("more", "more " * 50, f"{marker} " * 30, "\u4f60" * 50):
        message = {"role": "user", "content": content}
        for make in (
            lambda most, told=message: template.prompt([told], most=most),
            lambda most, told=message: template.appended([told], (), most=most),
        ):
            whole = make(None)
            assert make(len(whole)) == whole
    endless = {"role": "user", "content": f"{marker} 9" * 100_000}
    encoded = _watched(template)
    for make in (
        lambda: template.prompt([endless], most=1000),
        lambda: template.appended([endless], (), most=1000),
    ):
        with pytest.raises(TooLong):
            make()
    assert encoded == []


def _watched(template: DialogueTemplate) -> list[str]:
    """What is encoded from here on."""
    encoder, encoded = template._encoder, []
    inner = encoder.encode

    def encode(text: str, *more: Any, **named: Any) -> list[int]:
        encoded.append(text)
        return inner(text, *more, **named)

    encoder.encode = encode  # type: ignore[method-assign]
    return encoded
