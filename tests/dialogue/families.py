"""Families of models: a template each, in the family's format, and a tokenizer made on the spot."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollpacker.dialogue.template import DialogueTemplate

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = [
    "the tool returned a result and the user asked the assistant another question",
    '{"name": "search", "arguments": {"query": "where is the town", "limit": 7}}',
    "system user assistant model function functions\n\ntool_call tool_response parameter",
    "hello world, how many numbers are there? 12 and 345 and 6789.",
    "na\u00efve caf\u00e9 \u4f60\u597d \u4e16\u754c \u0437\u0434\u0440\u0430\u0432 \U0001f642",
]

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what"},
                "limit": {"type": "integer", "description": "how many"},
            },
            "required": ["query"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {"zones": {"type": "array"}}},
    },
}
TOOLS = (SEARCH, CLOCK)


@dataclass(frozen=True)
class Family:
    """What a test has to know of a family; the package is told none of it."""

    template: str
    special: tuple[str, ...]
    """Of the added vocabulary, special."""
    end: str
    plain: tuple[str, ...] = ()
    """Of the added vocabulary, not special."""
    pieces: bool = False
    """Words are made of pieces with a mark for spaces (as SentencePiece), else of bytes."""
    system: bool = True
    tools: bool = True
    parallel: bool = True
    rewrites: bool = False
    more_ends: tuple[str, ...] = ()


_D = "<\uff5c{}\uff5c>"
FAMILIES = {
    "chatml": Family(
        "chatml",
        ("<|im_start|>",),
        "<|im_end|>",
        plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "thinking": Family(
        "thinking",
        ("<|im_start|>",),
        "<|im_end|>",
        plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        system=False,
        rewrites=True,
    ),
    "llama": Family(
        "llama",
        ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        parallel=False,
    ),
    "mistral": Family(
        "mistral",
        (
            *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ),
        "</s>",
        pieces=True,
    ),
    "mistral_newest_tools": Family(
        "mistral_newest_tools",
        (
            *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[ARGS]"),
        ),
        "</s>",
        system=False,
        rewrites=True,
    ),
    "deepseek": Family(
        "deepseek",
        (_D.format("begin\u2581of\u2581sentence"),),
        _D.format("end\u2581of\u2581sentence"),
        plain=tuple(
            _D.format(name)
            for name in (
                *("User", "Assistant", "tool\u2581sep"),
                *(
                    f"tool\u2581{what}\u2581{which}"
                    for what in ("call", "calls", "output", "outputs")
                    for which in ("begin", "end")
                ),
            )
        ),
    ),
    "gemma": Family(
        "gemma", ("<start_of_turn>",), "<end_of_turn>", pieces=True, system=False, tools=False
    ),
    "glm": Family(
        "glm",
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        "<|endoftext|>",
        plain=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        system=False,
        more_ends=("<|user|>", "<|observation|>"),
    ),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Shared: leave it as it is."""
    family = FAMILIES[name]
    backend = piece_backend() if family.pieces else byte_backend()
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    special = [*family.special, *family.more_ends, "<pad>"]
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, normalized=False) for text in family.plain])
    begin = family.special[0] if name in ("llama", "deepseek") else "<begin>"
    made.add_special_tokens({"eos_token": family.end, "bos_token": begin, "pad_token": "<pad>"})
    made.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text().rstrip("\n")
    return made


def template_of(name: str, tools: tuple[Any, ...] = (), **kwargs: Any) -> DialogueTemplate:
    tokenizer = tokenizer_of(name)
    ends = tokenizer.convert_tokens_to_ids(list(FAMILIES[name].more_ends))
    return DialogueTemplate(tokenizer, tools=tools, end_tokens=ends, **kwargs)


def tokenizer_with(name: str, source: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer with another template."""
    made = copy.deepcopy(tokenizer_of(name))
    made.chat_template = source
    return made


def _trained(pre_tokenizer: Any, alphabet: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 250, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS * 4, trainer)
    return made


def byte_backend() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = _trained(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet)
    made.decoder = decoders.ByteLevel()
    return made


def piece_backend() -> Tokenizer:
    """With a byte for what has no piece, and a space before a text's first word."""
    letters = [chr(code) for code in range(33, 127)] + ["\u2581"]
    trained = _trained(pre_tokenizers.Metaspace(prepend_scheme="first"), letters)
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    made = Tokenizer(
        models.BPE(vocabulary, [tuple(pair) for pair in model["merges"]], byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made
