"""Texts that are put together of the bytes of tokens are those that the tokenizer itself makes."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rollpacker.chat_template import Detokenizer
from tests.dialogue.families import FAMILIES, byte_backend, tokenizer_of


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("skips", [False, True])
def test_any_tokens_have_the_text_that_the_tokenizer_has(name: str, skips: bool) -> None:
    tokenizer = tokenizer_of(name)
    backend = tokenizer.backend_tokenizer
    plain, raw = Detokenizer(tokenizer), Detokenizer(tokenizer, is_raw=True)
    everything = [*range(len(tokenizer))]
    written = tokenizer.convert_ids_to_tokens(everything)
    single = [token for token in everything if len(written[token]) == 1]  # bytes, most of them
    chance = random.Random(0)
    for _ in range(3000):
        pool = chance.choice([single, everything])
        tokens = chance.choices(pool, k=chance.randint(0, 12))
        assert plain(tokens, skip_special_tokens=skips) == tokenizer.decode(
            tokens, skip_special_tokens=skips
        )
        assert raw(tokens, skip_special_tokens=skips) == backend.decode(
            tokens, skip_special_tokens=skips
        )


def test_bytes_that_are_no_text_read_as_the_tokenizer_reads_them() -> None:
    backend = byte_backend()
    text = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), is_raw=True)
    of_byte = {byte: backend.token_to_id(mark) for byte, mark in bytes_to_unicode().items()}
    first = (
        0x20,
        0x61,
        0x80,
        0xA0,
        0xBF,
        0xC1,
        0xC3,
        0xE0,
        0xE2,
        0xED,
        0xEF,
        0xF0,
        0xF4,
        0xF5,
        0xFF,
    )
    for one in first:
        for two in (0x61, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xE2):
            for rest in ((), (0x80,), (0xBF, 0x61), (0x80, 0x80), (0x82, 0xAC, 0xF0)):
                tokens = [of_byte[byte] for byte in (one, two, *rest)]
                want = backend.decode(tokens, skip_special_tokens=False)
                assert text(tokens, skip_special_tokens=False) == want, (one, two, rest)


def test_tokens_that_are_added_later_and_such_as_nobody_has() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    text = Detokenizer(tokenizer)
    late = len(tokenizer)
    assert text([late, 5], skip_special_tokens=False) == tokenizer.decode([5])
    tokenizer.add_tokens([AddedToken("<na\u00efve \u4f60>", normalized=False)])
    for tokens in ([late], [5, late, 6], [late, late]):
        want = tokenizer.decode(tokens, skip_special_tokens=False)
        assert text(tokens, skip_special_tokens=False) == want
        assert "<na\u00efve \u4f60>" in want
    tokenizer.add_special_tokens({"additional_special_tokens": ["<late>"]})
    for skips in (False, True):
        want = tokenizer.decode([5, late + 1, 6], skip_special_tokens=skips)
        assert text([5, late + 1, 6], skip_special_tokens=skips) == want
        assert ("<late>" in want) is not skips


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


def test_who_does_more_to_a_text_does_so_still() -> None:
    shouting = Shouting(tokenizer_object=byte_backend())
    tokens = shouting.encode("hello world", add_special_tokens=False)
    assert Detokenizer(shouting)(tokens, skip_special_tokens=False) == "HELLO WORLD"
    assert Detokenizer(shouting, is_raw=True)(tokens, skip_special_tokens=False) == "hello world"
