"""Makes the text that is stored of a trajectory: who said what, what each turn took and earned, and
which tokens were generated or given. The middle of a long trajectory is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from rollpacker.engines.engine import Response
from rollpacker.environments.environment import Episode
from rollpacker.run.errors import Decode
from rollpacker.run.folder.plain_json import plain_text, shortened

MAX_TEXT_CHARS = 4096
"""Number of characters after which a single text, such as a message's, is cut off."""
MAX_PART_CHARS = 65_536
"""Most characters of all messages, and of all tokens' text. Beyond that the middle is left out."""

T = TypeVar("T")


def dialogue_text(response: Response, episode: Episode, render: Decode) -> str:
    """Returns a trajectory as JSON text with three keys. `begin`: the messages that the environment
    said first; null if the data row's are the prompt. `turns`: for each the model's `message`, the
    `answers`, its `reward` (null: none), `policy_s` and `environment_s`. `tokens`: stretches after
    the prompt, [was sampled, number of tokens, text]. A number n in a list: n items left out."""
    begin = "null"
    if episode.prompt is not None:
        begin = _list([plain_text(_bounded(one)) for one in episode.prompt])
    turns = _list([*map(plain_text, _turns(episode))])
    tokens = _both_ends(_stretches(response, render), lambda stretch: len(stretch[2]))
    return f'{{"begin": {begin}, "turns": {turns}, "tokens": {plain_text(tokens)}}}'


def _list(items: Sequence[str]) -> str:
    """Returns a JSON list of these JSON texts, without its middle if the list is too long."""
    kept = _both_ends(items, lambda item: len(item))
    return f"[{', '.join(map(str, kept))}]"


def _turns(episode: Episode) -> list[dict[str, Any]]:
    """Returns a dict for each turn: the model's message, the answers, reward and seconds."""
    starts = [n for n, one in enumerate(episode.messages) if one.get("role") == "assistant"]
    found = []
    for turn, (start, end) in enumerate(pairwise([*starts, len(episode.messages)])):
        message, *answers = map(_bounded, episode.messages[start:end])
        found.append(
            {
                "message": message,
                "answers": answers,
                "reward": _of(episode.rewards, turn),
                "policy_s": _rounded(_of(episode.policy_s, turn)),
                "environment_s": _rounded(_of(episode.answer_s, turn)),
            }
        )
    return found


def _of(values: Sequence[float | None], turn: int) -> float | None:
    return values[turn] if turn < len(values) else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _bounded(message: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): shortened(value, MAX_TEXT_CHARS) for name, value in message.items()}


def _stretches(response: Response, render: Decode) -> list[tuple[bool, int, str]]:
    edges = [0, *(edge for span in response.given for edge in span), len(response.tokens)]
    found = []
    for number, (start, end) in enumerate(pairwise(edges)):
        if end > start:
            text = shortened(render(response.tokens[start:end]), MAX_TEXT_CHARS)
            found.append((number % 2 == 0, end - start, text))
    return found


def _both_ends(items: Sequence[T], size_of: Callable[[T], int]) -> list[T | int]:
    """Returns all items, or as many of the first and last as fit into `MAX_PART_CHARS`, with the
    number of omitted items between."""
    sizes = [*map(size_of, items)]
    if sum(sizes) <= MAX_PART_CHARS:
        return [*items]
    head = _num_within(sizes, MAX_PART_CHARS // 2)
    tail = _num_within(sizes[:head:-1], MAX_PART_CHARS // 2)
    return [*items[:head], len(items) - head - tail, *items[len(items) - tail :]]


def _num_within(sizes: Sequence[int], most: int) -> int:
    total = 0
    for number, size in enumerate(sizes):
        total += size
        if total > most:
            return number
    return len(sizes)
