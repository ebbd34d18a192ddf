"""Makes a row's prompt (text or chat messages), and the tokens of prompts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from rollpacker.data.dataset import DataError, DatasetConfig
from rollpacker.data.files import RawRow
from rollpacker.did_you_mean import did_you_mean
from rollpacker.imports import ImportSpecError, load_function

Messages = list[dict[str, str]]
Prompt = str | Messages

NUM_SHOWN = 3
"""Largest number of bad rows that a message lists."""


class PromptMaker:
    """Makes prompts from rows as the config says: by a function, by a template, or from a column.
    It also picks the columns that rewards get."""

    def __init__(
        self, config: DatasetConfig, columns: Sequence[str], *, chat: bool = False
    ) -> None:
        """Prepare for rows with these names of `columns`. `chat` says whether text
        prompts go through the chat template. Raises `DataError` if the prompt's column
        or function is missing."""
        self._config = config
        self._columns = columns
        self._chat = chat
        self._column = config.prompt_column
        if config.kind == "reasoning_gym" and self._column == "prompt":
            self._column = "question"
        self._function: Callable[[dict[str, Any]], Any] | None = None
        if config.prompt_function is not None:
            try:
                self._function = load_function(config.prompt_function)
            except ImportSpecError as error:
                raise DataError(f"prompt_function {error}") from None
        elif config.prompt_template is None:
            require_column(self._column, columns, "Set prompt_column to one of them", config.path)

    def columns(self, row: RawRow) -> dict[str, Any]:
        """Return the columns that rewards get: those of the row without its prompt, and with the
        answer also as `answer`. Raises `DataError` if the answer's column is missing."""
        columns = dict(row.columns)
        is_prompt = self._function is None and self._config.prompt_template is None
        if is_prompt and self._config.kind != "reasoning_gym":  # its scorers want the whole row
            columns.pop(self._column, None)
        answer = self._config.answer_column
        if answer is not None:
            if answer not in row.columns:
                self._require(answer, row, "answer_column")
            columns[answer] = row.columns[answer]  # though it may be the prompt's own
            columns["answer"] = row.columns[answer]
        return columns

    def task(self, row: RawRow) -> str | None:
        """Return the row's kind of task; None: the row names none. Raises `DataError` if a column
        is set in `task_column` and missing in the row."""
        name = self._config.task_column
        if name is not None:
            self._require(name, row, "task_column")
            value = row.columns[name]
        else:
            value = row.columns.get("task", row.columns.get("data_source"))
        return None if value is None else str(value)

    def prompt(self, row: RawRow) -> Prompt:
        """Return the row's prompt as rewards get it, a text or chat messages. Raises `DataError`,
        which says what is wrong with the row."""
        prompt = _checked(self._bare_prompt(row), row.where)
        if not isinstance(prompt, str):
            prompt = self._with_system(prompt)
        texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise DataError(
                    f"{row.where}: the prompt holds half a character (a lone surrogate)."
                ) from None
        return prompt

    def messages(self, prompt: Prompt) -> Messages | None:
        """Return the messages that the chat template gets for this prompt. None: the prompt is a
        text and does not go through the template."""
        if not isinstance(prompt, str):
            return prompt
        return self._with_system([{"role": "user", "content": prompt}]) if self._chat else None

    def _bare_prompt(self, row: RawRow) -> Any:
        if self._function is not None:
            try:
                return self._function(dict(row.columns))
            except Exception as error:  # the user's function
                raise DataError(
                    f"{row.where}: prompt_function {self._config.prompt_function} raised"
                    f" {type(error).__name__}: {error}"
                ) from None
        if self._config.prompt_template is not None:
            return _filled(self._config.prompt_template, row)
        if self._column not in row.columns:
            self._require(self._column, row, "prompt_column")
        return row.columns[self._column]

    def _require(self, name: str, row: RawRow, setting: str) -> None:
        cure = f"Set {setting} to one of them"
        if name in self._columns:
            cure = "Other rows have it: add it to this one, or leave the row out"
        require_column(name, list(row.columns), cure, row.where)

    def _with_system(self, messages: Messages) -> Messages:
        system = self._config.system_prompt
        if system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": system}, *messages]


def require_column(name: str, columns: Sequence[str], cure: str, where: str | None) -> None:
    """Raise `DataError`, which suggests the nearest name, if `name` is not among `columns`. For the
    message, `cure` says what the user can do, and `where` names the row or file."""
    if name in columns:
        return
    raise DataError(
        f"{where}: there is no column {name}.{did_you_mean(name, columns)}"
        f" It has: {', '.join(map(str, columns))}. {cure}."
    )


def _filled(template: str, row: RawRow) -> str:
    names: dict[str, Any] = {}
    metadata = row.columns.get("metadata")
    if isinstance(metadata, Mapping):
        names.update(metadata)
    names.update(row.columns)
    try:
        for _, field, _, _ in Formatter().parse(template):
            if field and "._" in field:
                raise DataError(f"prompt_template: {{{field}}} reaches for private attributes.")
        return template.format_map(names)
    except KeyError as error:
        missing = str(error.args[0]) if error.args else "?"
        close = difflib.get_close_matches(missing, [str(n) for n in names], n=1, cutoff=0.5)
        hint = f' Did you mean "{{{close[0]}}}"?' if close else ""
        raise DataError(
            f"{row.where}: prompt_template wants {{{missing}}}, which the row does not have.{hint}"
            f" It has: {', '.join(str(name) for name in names)}."
        ) from None
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            f"{row.where}: prompt_template cannot be filled ({error}). A literal brace is written"
            " twice: {{ or }}."
        ) from None


def _checked(prompt: Any, where: str) -> Prompt:
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: the prompt is empty.")
        return prompt
    if isinstance(prompt, list | tuple) and prompt:
        messages = []
        for message in prompt:
            sound = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not sound or not isinstance(message.get("content"), str):
                raise DataError(
                    f'{where}: chat messages must look like {{"role": "user", "content": "..."}}.'
                )
            messages.append({key: value for key, value in message.items() if value is not None})
        return messages
    raise DataError(
        f"{where}: the prompt must be a text or a list of chat messages,"
        f" not {'empty' if prompt in (None, [], ()) else type(prompt).__name__}."
    )


def tokenize(
    prompts: Sequence[Prompt], tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None
) -> list[tuple[int, ...]]:
    """Return each prompt's token ids. Chat messages go through the tokenizer's chat template."""
    tokens: list[tuple[int, ...]] = [()] * len(prompts)
    for is_text in (False, True):
        places = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) is is_text]
        if not places:
            continue
        texts: Sequence[Any] = [prompts[i] for i in places]
        if not is_text:
            texts = _rendered(texts, tokenizer, chat_template_kwargs or {})
        encoded = tokenizer(
            texts, add_special_tokens=is_text, return_attention_mask=False, verbose=False
        )
        for i, ids in zip(places, encoded["input_ids"], strict=True):
            tokens[i] = tuple(ids)
    return tokens


def _rendered(
    chats: Sequence[Any], tokenizer: Any, chat_template_kwargs: Mapping[str, Any]
) -> list[str]:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the prompts are chat messages, but the tokenizer has no chat template. Use an"
            " instruct model, or make text prompts (prompt_template, no system_prompt)."
        )
    try:
        return list(
            tokenizer.apply_chat_template(
                list(chats), tokenize=False, add_generation_prompt=True, **chat_template_kwargs
            )
        )
    except Exception as error:  # whatever a template's author wrote
        raise DataError(f"the tokenizer's chat template refuses the messages: {error}") from None
