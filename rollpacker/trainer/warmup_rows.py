"""The rows that a warm-up learns from: texts or chat messages, of a file or of a function, as
tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.chat_template import end_of_turn
from rollpacker.imports import load_function
from rollpacker.trainer.micro_batch import Row
from rollpacker.trainer.model import UNKNOWN
from rollpacker.trainer.warmup_output import WarmupError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollpacker.config.warmup import WarmupStage

Messages = list[dict[str, Any]]


def read_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    chat_options: Mapping[str, object] | None = None,
) -> list[Row]:
    """The rows of a JSONL file: prompt tokens, and completion tokens with the end token.

    Lines are `prompt` and `completion`, each a text or chat messages, or `messages`. Every message
    of the assistant (of `completion`, if there is one) is a row: what stands before it, as the chat
    template renders it when it asks for an answer; then the message and the token that ends a turn.

    Raises `WarmupError` that names the file and the line.
    """
    try:
        # Not splitlines: JSON may hold U+0085, U+2028 and U+2029 within a text.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WarmupError(f"{path}: cannot read it: {reason}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise WarmupError(f"{path}: no rows in it")
    records = ((f"{path}, line {number}", _json(line)) for number, line in numbered)
    return _parsed(records, tokenizer, max_tokens, chat_options)


def rows_of(
    stage: WarmupStage,
    seed: tuple[int, int],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    chat_options: Mapping[str, object] | None,
) -> list[Row]:
    """Those of the stage's file, or what its function makes, by `seed` alone."""
    if stage.path is not None:
        return read_rows(Path(stage.path), tokenizer, max_tokens, chat_options)
    assert stage.function is not None
    function = load_function(stage.function)
    made = islice(function(random.Random(f"{seed[0]}/{seed[1]}")), stage.rows)
    records = ((f"{stage.function}, row {i}", record) for i, record in enumerate(made, start=1))
    rows = _parsed(records, tokenizer, max_tokens, chat_options)
    if not rows:
        raise WarmupError(f"{stage.function} makes no rows")
    return rows


def _parsed(
    records: Iterable[tuple[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    chat_options: Mapping[str, object] | None,
) -> list[Row]:
    """Of what stands in each place; messages begin with the place."""
    parse = _Parser(tokenizer, chat_options or {})
    texts: list[tuple[str, _Text]] = []
    for place, record in records:
        try:
            texts += [(place, text) for text in parse(record)]
        except WarmupError as error:
            raise WarmupError(f"{place}: {error}") from None
    rows = _tokenize([text for _, text in texts], tokenizer, parse.end_of_turn)
    for (place, text), row in zip(texts, rows, strict=True):
        if problem := _problem_with(text, row, tokenizer, max_tokens):
            raise WarmupError(f"{place}: {problem}")
    return rows


def _json(line: str) -> object:
    """The line's value; of one that is no JSON the error, which the parser raises."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return WarmupError(f"not JSON: {error}")


@dataclass(frozen=True, slots=True)
class _Text:
    prompt: str
    completion: str
    rendered: bool
    """The prompt comes from a chat template, which has put the special tokens in."""


class _Parser:
    """Makes texts of a file's lines, one for each completion or message of the assistant."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, object]
    ) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, Any] = dict(chat_options)
        self.end_of_turn = end_of_turn(tokenizer, self._options)

    def __call__(self, record: object) -> list[_Text]:
        if isinstance(record, WarmupError):
            raise record
        if not isinstance(record, dict):
            raise WarmupError("must be an object with `prompt` and `completion`, or `messages`")
        tools = record.get("tools")
        if "messages" in record and "prompt" not in record:
            return self._turns([], _messages(record["messages"], "messages"), tools)
        prompt, completion = record.get("prompt"), record.get("completion")
        if not isinstance(prompt, str | list) or not prompt:
            raise WarmupError("`prompt` must be a text or chat messages, and not empty")
        if not isinstance(completion, str | list) or not completion:
            raise WarmupError("`completion` must be a text or chat messages, and not empty")
        if isinstance(prompt, str) and isinstance(completion, str):
            return [_Text(prompt, completion, rendered=False)]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        return self._turns(_messages(prompt, "prompt"), _messages(completion, "completion"), tools)

    def _turns(self, before: Messages, messages: Messages, tools: Any) -> list[_Text]:
        """A text for each of the assistant's `messages`. `tools`: schemas, which the template
        shows."""
        if self._tokenizer.chat_template is None:
            raise WarmupError(
                "chat messages need a tokenizer with a chat template; use a text prompt"
            )
        turns = []
        for message in messages:
            if message["role"] == "assistant":
                if not before:
                    raise WarmupError("nothing stands before the assistant's first message")
                turns.append(self._turn(before, message, tools))
            before = [*before, message]
        if not turns:
            raise WarmupError("no message of the assistant to learn from")
        return turns

    def _turn(self, before: Messages, message: dict[str, Any], tools: Any) -> _Text:
        """What the assistant says next. Its calls are what the template makes of them."""
        asked = self._rendered(before, tools)
        text = message["content"]
        if message.get("tool_calls"):
            text = self._rendered([*before, message], tools, to_go_on=False)
            if not text.startswith(asked):
                raise WarmupError(
                    "the chat template writes a message with tool calls otherwise than behind its"
                    " own generation prompt"
                )
            end = (
                "" if self.end_of_turn is None else str(self._tokenizer.decode([self.end_of_turn]))
            )
            text = text[len(asked) :].rstrip().removesuffix(end)
        if not text:
            raise WarmupError("a message of the assistant is empty")
        return _Text(asked, text, rendered=True)

    def _rendered(self, messages: Messages, tools: Any, *, to_go_on: bool = True) -> str:
        options = {"add_generation_prompt": to_go_on, **self._options}
        if tools:
            options["tools"] = tools
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # whatever a template's author wrote
            raise WarmupError(f"the chat template refuses the messages: {error}") from None
        assert isinstance(text, str), "not tokenized"
        return text


def _messages(value: object, key: str) -> Messages:
    sound = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )
    if not sound:
        raise WarmupError(
            f'`{key}`: chat messages must look like {{"role": "user", "content": "..."}}'
        )
    assert isinstance(value, list)
    return value


def _tokenize(
    texts: Sequence[_Text], tokenizer: PreTrainedTokenizerBase, ends_turn: int | None
) -> list[Row]:
    """All at once, which is many times faster than one by one. `ends_turn` ends what answers a
    rendered prompt; None: the end token does."""
    end = tokenizer.eos_token_id
    ends = {False: end, True: end if ends_turn is None else ends_turn}

    def encode(strings: list[str], special: bool) -> Iterator[list[int]]:
        if not strings:
            return iter(())
        return iter(tokenizer(strings, add_special_tokens=special)["input_ids"])

    plain = encode([t.prompt for t in texts if not t.rendered], special=True)
    rendered = encode([t.prompt for t in texts if t.rendered], special=False)
    completions = encode([t.completion for t in texts], special=False)
    return [
        Row(next(rendered if t.rendered else plain), [*next(completions), ends[t.rendered]])
        for t in texts
    ]


def _problem_with(
    text: _Text, row: Row, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> str | None:
    prompt, completion, _ = row
    unknown = tokenizer.unk_token_id
    if tokenizer.unk_token == UNKNOWN and (unknown in prompt or unknown in completion):
        known = tokenizer.get_vocab()
        stranger = next(c for c in text.prompt + text.completion if c not in known)
        return f"character {stranger!r} is not in the alphabet"
    num_tokens = len(prompt) + len(completion)
    if max_tokens is not None and num_tokens > max_tokens:
        return f"{num_tokens} tokens are more than the model's {max_tokens}"
    return None
