"""A tokenizer of single characters, made on the spot."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ALPHABET = "_$?\n" + "".join(chr(code) for code in range(32, 127) if chr(code) not in "_$?")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if brief %}!{% endif %}{% endif %}"
)


def character_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a character, `?` for unknown ones."""
    vocabulary = {character: index for index, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", pad_token="_", eos_token="$"
    )
    fast.chat_template = TEMPLATE if chat else None
    return fast


def chat_tokenizer(*, ends_turns: bool) -> PreTrainedTokenizerFast:
    """With a template of tokens of its own, which ends each turn with `<|end|>`; `ends_turns`: as
    an instruct model's, whose end token that is."""
    tokenizer = character_tokenizer()
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*roles, "<|end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    if ends_turns:
        tokenizer.eos_token = "<|end|>"
    return tokenizer


def text_of(tokens: tuple[int, ...]) -> str:
    return "".join(ALPHABET[token] for token in tokens)
