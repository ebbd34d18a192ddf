"""Makes prompt sets (tokenized prompts to train or evaluate on) from rows. A prompt
that is evaluated on is not trained on. Rows that are left out are counted and
reported with their places."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollpacker.data.chat import Chat, chat_of, shown_prompt
from rollpacker.data.dataset import DataConfig, DataError, DatasetConfig, PromptRow, PromptSet
from rollpacker.data.files import RawRow, brought_rows, read_rows
from rollpacker.data.procedural import make_rows
from rollpacker.data.rendering import NUM_SHOWN, Messages, Prompt, PromptMaker, tokenize
from rollpacker.data.row_warnings import row_warnings

logger = logging.getLogger(__name__)

TOO_LONG = "prompt too long"
IN_EVAL = "prompt also in eval"
MORE_READ = 200
"""Number of rows that `load_few` reads beyond those it shall show, since some may be
held out for evaluation."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A row with its prompt, before it is tokenized."""

    where: str
    prompt: Prompt
    messages: Messages | None
    columns: dict[str, Any]
    task: str | None
    is_named: bool


def load_prompts(
    config: DataConfig,
    tokenizer: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_context_tokens: int | None = None,
    max_response_tokens: int = 0,
    end_tokens: Collection[int] = (),
    brought: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[PromptSet, PromptSet | None]:
    """Load the prompts to train on, and those to evaluate on (None if the config has none). A
    prompt may have `config.max_prompt_tokens` tokens, and fewer if it would not fit into
    `max_context_tokens` (None: no limit) together with `max_response_tokens`. `end_tokens` are
    tokens at which responses stop, besides the tokenizer's own end token. `brought` are the rows
    that the environment provided, for kind environment. Raises `DataError` for unusable data."""
    limit = _prompt_limit(config, max_context_tokens, max_response_tokens)
    chat = partial(
        chat_of,
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        chat_template_kwargs=chat_template_kwargs,
    )
    train_chat = eval_chat = chat(config.train, "train")
    train = _made_rows(config.train, "train", train_chat, brought)
    held_out: list[_Made] | None = None
    share: tuple[str, ...] = ()
    dropped: Counter[str] = Counter()
    if config.eval is not None:
        eval_chat = chat(config.eval, "eval")
        held_out = _made_rows(config.eval, "eval", eval_chat)
        train = _without(train, held_out, dropped)
    elif config.eval_fraction:
        train, held_out = _split(train, config.eval_fraction)
        share = _told_share(len(held_out), len(train) + len(held_out), config.eval_fraction)
    finish = partial(_prompt_set, config, tokenizer, chat_template_kwargs, limit)
    train_set = finish("train", train, dropped, train_chat)
    if held_out is None:
        return train_set, None
    eval_set = finish("eval", held_out, Counter(), eval_chat)
    return train_set, replace(eval_set, told=(*eval_set.told, *share))


def load_few(
    config: DataConfig,
    split: str,
    tokenizer: Any,
    *,
    rows: int = 1,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_context_tokens: int | None = None,
    end_tokens: Collection[int] = (),
    brought: Sequence[Mapping[str, Any]] | None = None,
) -> PromptSet:
    """Load the prompts of the first `rows` rows of the data set `split` ("train" or "eval"),
    however long, to display them. Training rows that `eval_fraction` holds out are skipped.
    `brought` are the rows that the environment provided. Raises `DataError` for unusable data."""
    few = _of(config, split)
    fraction = config.eval_fraction if split == "train" else 0.0
    num_read = rows + (MORE_READ if fraction else 0)
    if few.kind != "reasoning_gym":  # whose rows depend on how many there are
        few = replace(few, size=min(few.size or num_read, num_read))
    config = (
        replace(config, eval=few, eval_fraction=0.0)
        if split == "eval"
        else replace(config, train=few, eval_fraction=0.0)
    )
    chat = chat_of(few, split, tokenizer, end_tokens, chat_template_kwargs)
    made = _made_rows(few, split, chat, brought)
    made = ([row for row in made if not _is_held_out(row, fraction)] or made)[:rows]
    limit = max_context_tokens or sys.maxsize
    looked_at = _prompt_set(
        config, tokenizer, chat_template_kwargs, limit, split, made, Counter(), chat
    )
    return replace(looked_at, told=_told(split, looked_at.rows, chat, tokenizer, few=True))


def _prompt_limit(config: DataConfig, context: int | None, response: int) -> int:
    if context is None:
        return config.max_prompt_tokens
    if context - response < 1:
        raise DataError(
            f"the model's context has {context} tokens and a response may take {response}: no room"
            " for a prompt. Lower rollout.max_response_tokens."
        )
    return min(config.max_prompt_tokens, context - response)


def _made_rows(
    config: DatasetConfig,
    split: str,
    chat: Chat,
    brought: Sequence[Mapping[str, Any]] | None = None,
) -> list[_Made]:
    rows: list[RawRow]
    if config.kind == "reasoning_gym":
        rows = make_rows(config, split)
    elif config.kind == "environment":
        rows = brought_rows(config, brought)
    else:
        rows = read_rows(config)
    known = list(dict.fromkeys(column for row in rows for column in row.columns))
    maker = PromptMaker(config, known, chat=chat.renders)
    made, problems = [], []
    for row in rows:
        try:
            columns, prompt = maker.columns(row), maker.prompt(row)
            messages = maker.messages(prompt)
            task = maker.task(row)
            made.append(_Made(row.where, prompt, messages, columns, task, row.is_named))
        except DataError as error:
            problems.append(str(error))
    if problems:
        shown = problems[:NUM_SHOWN]
        more = f"\n  ... and {len(problems) - len(shown)} more" if len(problems) > NUM_SHOWN else ""
        if len(problems) == 1:
            raise DataError(problems[0])
        raise DataError(
            f"data.{split}: {len(problems)} of {len(rows)} rows cannot be used:\n  "
            + "\n  ".join(shown)
            + more
        )
    _report_other_answer(config, split, rows)
    return made


def _report_other_answer(config: DatasetConfig, split: str, rows: Sequence[RawRow]) -> None:
    name = config.answer_column
    if name in (None, "answer"):
        return
    other = (
        row for row in rows if row.columns.get("answer", row.columns[name]) != row.columns[name]
    )
    if (first := next(other, None)) is not None:
        logger.warning(
            "data.%s: rewards get the column %s as `answer`; the rows' own column answer, which"
            " says something else (%s), does not reach them",
            split,
            name,
            first.where,
        )


def _key(prompt: Prompt) -> bytes:
    """Return a hash of a prompt, equal for equal prompts, by which training and evaluation
    prompts are kept apart."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()


def _without(train: list[_Made], held_out: list[_Made], dropped: Counter[str]) -> list[_Made]:
    banned = {_key(row.prompt) for row in held_out}
    kept = [row for row in train if _key(row.prompt) not in banned]
    num_banned = len(train) - len(kept)
    if not kept:
        raise DataError(
            f"every prompt of data.train ({len(train)} rows) is also in data.eval: nothing is left"
            " to train on. Evaluate on other data, or set eval_fraction instead."
        )
    if num_banned:
        dropped[IN_EVAL] = num_banned
        logger.info("train: left out %d rows whose prompt is also in eval", num_banned)
    _report_small_tasks(train, kept)
    return kept


def _report_small_tasks(train: list[_Made], kept: list[_Made]) -> None:
    """Warn of each task that keeps less than half of its rows: `train` has all training rows,
    `kept` those whose prompts are not also evaluation prompts. The task has few distinct problems,
    and the mixture of tasks changes."""
    before = Counter(_task_name(row) for row in train)
    after = Counter(_task_name(row) for row in kept)
    for task, count in before.items():
        if task and after[task] < count / 2:
            distinct = len({_key(row.prompt) for row in train if _task_name(row) == task})
            logger.warning(
                "train: task %s keeps %d of %d rows; it has too few distinct problems (%d) to keep"
                " train and eval apart. Make it more varied, or eval smaller.",
                task,
                after[task],
                count,
                distinct,
            )


def _task_name(row: _Made) -> str:
    task, options = row.columns.get("task"), row.columns.get("task_options")
    return f"{task} {options}" if task and options is not None else ""


def _split(rows: list[_Made], fraction: float) -> tuple[list[_Made], list[_Made]]:
    train: list[_Made] = []
    held_out: list[_Made] = []
    for row in rows:
        (held_out if _is_held_out(row, fraction) else train).append(row)
    if not held_out or not train:
        side = "nothing to evaluate on" if not held_out else "nothing to train on"
        raise DataError(
            f"eval_fraction {fraction} leaves {side} ({len(rows)} rows); change it, or add rows."
        )
    return train, held_out


def _is_held_out(row: _Made, fraction: float) -> bool:
    return int.from_bytes(_key(row.prompt)[:8], "big") / 2**64 < fraction


def _told_share(num_held_out: int, num_rows: int, fraction: float) -> tuple[str, ...]:
    """Return one line for the terminal if far more or far fewer rows are held out than asked for,
    since a hash of the prompt decides; else nothing."""
    asked = fraction * num_rows
    if abs(num_held_out - asked) <= max(1, 0.2 * asked):
        return ()
    return (
        f"{num_held_out} of {num_rows} rows are held out, data.eval_fraction={fraction:g} asks for"
        f" {asked:.0f}: a hash of the prompt chooses, so small files differ",
    )


def _prompt_set(
    config: DataConfig,
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any] | None,
    limit: int,
    name: str,
    rows: list[_Made],
    dropped: Counter[str],
    chat: Chat,
) -> PromptSet:
    made: list[Prompt] = [row.messages or row.prompt for row in rows]
    tokens = tokenize(made, tokenizer, chat_template_kwargs)
    _report_tokens(name, rows, tokens, tokenizer)
    chats = [(row.where, row.messages) for row in rows if row.messages is not None]
    for line in row_warnings(chats, tokenizer, _of(config, name).system_prompt):
        logger.warning("data.%s: %s", name, line)
    lengths = zip((row.where for row in rows), map(len, tokens), strict=True)
    too_long = [f"{where} ({length})" for where, length in lengths if length > limit]
    if too_long:
        dropped[TOO_LONG] = len(too_long)
        _report_too_long(name, len(rows), too_long, config, limit)
    kept = tuple(
        PromptRow(
            prompt=row.prompt,
            tokens=ids,
            columns=row.columns,
            task=row.task,
            messages=row.messages,
            where=row.where,
        )
        for row, ids in zip(rows, tokens, strict=True)
        if len(ids) <= limit
    )
    has_texts = any(isinstance(row.prompt, str) for row in kept)
    return PromptSet(
        rows=kept,
        fingerprint=_fingerprint(kept, _of(config, name).answer_column),
        num_dropped=dict(dropped),
        chat=has_texts and chat.renders and _of(config, name).system_prompt is None,
        told=_told(name, kept, chat, tokenizer, are_named=rows[0].is_named),
    )


def _of(config: DataConfig, name: str) -> DatasetConfig:
    return config.eval if name == "eval" and config.eval is not None else config.train


def _told(
    name: str,
    rows: Sequence[PromptRow],
    chat: Chat,
    tokenizer: Any,
    *,
    few: bool = False,
    are_named: bool = False,
) -> tuple[str, ...]:
    """Return lines for the terminal about a data set. `few` says that these are only some of its
    rows, `are_named` that the environment gives the prompts."""
    if are_named:
        prompts = "the environment says the prompts (rollpacker play shows one)"
        return (f"data.{name}: {len(rows)} rows; {prompts}",)
    kinds = {isinstance(row.prompt, str) for row in rows}
    how = [chat.why] if True in kinds else []
    how += ["chat messages by the chat template"] if False in kinds else []
    first = rows[0].tokens
    return (
        f"data.{name}: {'' if few else f'{len(rows)} prompts, '}{'; '.join(how)}",
        f"first prompt, {len(first)} tokens: {shown_prompt(first, tokenizer)}",
    )


def _report_tokens(
    name: str, rows: list[_Made], tokens: Sequence[tuple[int, ...]], tokenizer: Any
) -> None:
    empty = next((row.where for row, ids in zip(rows, tokens, strict=True) if not ids), None)
    if empty is not None:
        raise DataError(f"{empty}: the tokenizer makes no token of the prompt.")
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return
    with_unknown = [
        row.where
        for row, ids in zip(rows, tokens, strict=True)
        if unknown in ids and not row.is_named
    ]
    if with_unknown:
        logger.warning(
            "%s: %d of %d prompts hold characters that the tokenizer does not know, the first: %s",
            name,
            len(with_unknown),
            len(rows),
            with_unknown[0],
        )


def _report_too_long(
    name: str, num_rows: int, too_long: list[str], config: DataConfig, limit: int
) -> None:
    """Log which prompts have more than `limit` tokens and are left out. Raises `DataError` if that
    is all prompts, or a larger share than `max_dropped_fraction`."""
    more = f" and {len(too_long) - NUM_SHOWN} more" if len(too_long) > NUM_SHOWN else ""
    what = (
        f"data.{name}: {len(too_long)} of {num_rows} prompts have more than {limit} tokens:"
        f" {', '.join(too_long[:NUM_SHOWN])}{more}"
    )
    if len(too_long) == num_rows or len(too_long) > config.max_dropped_fraction * num_rows:
        cause = (
            "Raise data.max_prompt_tokens"
            if limit == config.max_prompt_tokens
            else "The model's context has no room for more; lower rollout.max_response_tokens"
        )
        refusal = "Nothing is left"
        if len(too_long) < num_rows:
            allowed = f"data.max_dropped_fraction={config.max_dropped_fraction}"
            refusal = f"That is more than {allowed} allows"
        raise DataError(f"{what}. {refusal}. {cause}, or shorten the prompts.")
    logger.warning("%s. They are left out.", what)


def _fingerprint(rows: Sequence[PromptRow], answer_column: str | None) -> str:
    """Return the SHA-256 of a data set's prompts, tokens and columns. The column `answer_column`,
    which rewards get as `answer` too, counts once; None: there is no such column."""
    twice = None if answer_column == "answer" else answer_column
    digest = hashlib.sha256()
    for row in rows:
        columns = {key: value for key, value in row.columns.items() if key != twice}
        digest.update(_canonical([row.prompt, row.tokens, columns]).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _canonical(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except TypeError:  # keys that JSON does not have
        return json.dumps(_plain_keys(value), sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(_canonical(item) for item in value)
    return f"{type(value).__name__} {value}" if _has_text(value) else type(value).__name__


def _has_text(value: Any) -> bool:
    """Whether str() of an object shows its value. Else it shows the object's address, which
    differs from run to run."""
    kind: type[object] = type(value)
    return (kind.__repr__, kind.__str__) != (object.__repr__, object.__str__)


def _plain_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {repr(key): _plain_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_keys(item) for item in value]
    return value
