"""The rows of tokens for a warm-up (supervised fine-tuning), made of texts or chat messages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollpacker.chat_template import end_of_turn
from rollpacker.imports import load_function
from rollpacker.trainer.micro_batch import Row
from rollpacker.trainer.model import UNKNOWN
from rollpacker.trainer.warmup_output import WarmupError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollpacker.config.warmup import WarmupStage

Messages = list[dict[str, Any]]


def rows_of(stage: WarmupStage, seed: tuple[int, int], parser: RowParser) -> list[Row]:
    """Return the rows of the stage's file, or of what its function makes from `seed`;
    `parser` turns records into rows. Raises `WarmupError`, which names the file and the line,
    or the function and the row."""
    if stage.path is not None:
        return read_rows(Path(stage.path), parser)
    assert stage.function is not None
    made = load_function(stage.function)(random.Random(f"{seed[0]}/{seed[1]}"))
    numbered = enumerate(islice(made, stage.rows), start=1)
    rows = parser.rows((f"{stage.function}, row {number}", record) for number, record in numbered)
    if not rows:
        raise WarmupError(f"{stage.function} makes no rows")
    return rows


def read_rows(path: Path, parser: RowParser) -> list[Row]:
    """Read the rows of a JSONL file. Raises `WarmupError`, which names the file and the line."""
    try:
        # Not splitlines: JSON may hold U+0085, U+2028 and U+2029 within a text.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WarmupError(f"{path}: cannot read it: {reason}") from error
    records: list[tuple[str, object]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records += [(f"{path}, line {number}", json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            raise WarmupError(f"{path}, line {number}: not JSON: {error}") from None
    if not records:
        raise WarmupError(f"{path}: no rows in it")
    return parser.rows(records)


class _Text(NamedTuple):
    place: str
    prompt: str
    completion: str
    rendered: bool
    """Whether the prompt comes from a chat template, so that it has its special tokens already."""


class RowParser:
    """Makes rows from records. A row has prompt tokens, and completion tokens with an end token. A
    record is an object with `prompt` and `completion`, each a text or chat messages, or with
    `messages` alone. Every message of the assistant (in `completion`, if there is one) gives a row:
    its prompt is the text before the message, rendered by the chat template with the generation
    prompt; its completion is the message and the token that ends a turn. `max_tokens` is the most
    tokens of a row; None: any number."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int | None = None,
        chat_options: Mapping[str, object] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._options: dict[str, Any] = dict(chat_options or {})
        self._end_of_turn = end_of_turn(tokenizer, self._options)

    def rows(self, records: Iterable[tuple[str, object]]) -> list[Row]:
        """Make rows from pairs of a place (such as file and line) and a record. Raises
        `WarmupError`, which names the place of a bad record."""
        texts: list[_Text] = []
        for place, record in records:
            try:
                texts += [_Text(place, *text) for text in self._texts(record)]
            except WarmupError as error:
                raise WarmupError(f"{place}: {error}") from None
        rows = self._tokenized(texts)
        for text, row in zip(texts, rows, strict=True):
            self._check(text, row)
        return rows

    def _texts(self, record: object) -> list[tuple[str, str, bool]]:
        """Return for each completion in a record the prompt, the completion, and whether a chat
        template rendered the prompt."""
        if not isinstance(record, dict):
            raise WarmupError("must be an object with `prompt` and `completion`, or `messages`")
        tools = record.get("tools")
        if "messages" in record and "prompt" not in record:
            return self._turns([], _messages(record, "messages", "assistant"), tools)
        for key in ("prompt", "completion"):
            if not isinstance(record.get(key), str | list) or not record[key]:
                raise WarmupError(f"`{key}` must be a text or chat messages, and not empty")
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return [(prompt, completion, False)]
        before = _messages(record, "prompt", "user")
        return self._turns(before, _messages(record, "completion", "assistant"), tools)

    def _turns(
        self, before: Messages, messages: Messages, tools: Any
    ) -> list[tuple[str, str, bool]]:
        """Return for each assistant's message in `messages` its prompt, its completion, and True (a
        chat template rendered them). `tools` are JSON schemas for the template; None: no tools."""
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

    def _turn(self, before: Messages, message: dict[str, Any], tools: Any) -> tuple[str, str, bool]:
        """Return an assistant's message as prompt, completion, and True (a chat template rendered
        them). Tool calls are written as the template writes them."""
        asked, text = self._rendered(before, tools, to_go_on=True), message["content"]
        if message.get("tool_calls"):
            text = self._rendered([*before, message], tools, to_go_on=False)
            if not text.startswith(asked):
                raise WarmupError(
                    "the chat template writes a message with tool calls otherwise than behind its"
                    " own generation prompt"
                )
            end = self._end_of_turn
            ending = "" if end is None else str(self._tokenizer.decode([end]))
            text = text[len(asked) :].rstrip().removesuffix(ending)
        if not text:
            raise WarmupError("a message of the assistant is empty")
        return asked, text, True

    def _rendered(self, messages: Messages, tools: Any, *, to_go_on: bool) -> str:
        options = {"add_generation_prompt": to_go_on, **self._options}
        if tools:
            options["tools"] = tools
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # whatever a template's author wrote
            raise WarmupError(f"the chat template refuses the messages: {error}") from None
        assert isinstance(text, str), "not tokenized"
        return text

    def _tokenized(self, texts: list[_Text]) -> list[Row]:
        end = self._tokenizer.eos_token_id
        ends = {False: end, True: end if self._end_of_turn is None else self._end_of_turn}

        def encode(strings: list[str], special: bool) -> Iterator[list[int]]:
            if not strings:
                return iter(())
            return iter(self._tokenizer(strings, add_special_tokens=special)["input_ids"])

        plain = encode([t.prompt for t in texts if not t.rendered], special=True)
        rendered = encode([t.prompt for t in texts if t.rendered], special=False)
        completions = encode([t.completion for t in texts], special=False)
        return [
            Row(next(rendered if t.rendered else plain), [*next(completions), ends[t.rendered]])
            for t in texts
        ]

    def _check(self, text: _Text, row: Row) -> None:
        unknown, tokens = self._tokenizer.unk_token_id, [*row.context, *row.response]
        if self._tokenizer.unk_token == UNKNOWN and unknown in tokens:
            known = self._tokenizer.get_vocab()
            stranger = next(c for c in text.prompt + text.completion if c not in known)
            raise WarmupError(f"{text.place}: character {stranger!r} is not in the alphabet")
        if self._max_tokens is not None and len(tokens) > self._max_tokens:
            raise WarmupError(
                f"{text.place}: {len(tokens)} tokens are more than the model's {self._max_tokens}"
            )


def _messages(record: Mapping[str, Any], key: str, role: str) -> Messages:
    """Return the chat messages that a record has under `key`. A plain text becomes one
    message of this `role`."""
    value = record[key]
    if isinstance(value, str) and key != "messages":
        return [{"role": role, "content": value}]
    sound = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )
    if not sound:
        raise WarmupError(
            f'`{key}`: chat messages must look like {{"role": "user", "content": "..."}}'
        )
    found: Messages = value
    return found
