"""Parts that all adapters use: their own arguments, first messages, the model's text, and seeds."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.environments.environment import Message

DEFAULT_NUM_ROWS = 1024
"""Number of rows of an environment that needs only a seed, if the config does not set it."""


class AdapterError(ValueError):
    """The environment that a config names cannot be used; the message says why and what to do."""


class OwnArguments:
    """Takes an adapter's own arguments out of the config's `environment.arguments`. The arguments
    that are left are passed on to the package that it adapts."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self._name = name
        self._arguments = arguments
        self._own: list[str] = []

    def take(self, key: str, default: Any, *kinds: type) -> Any:
        """Remove and return the argument `key`, or `default` if it is not set. Raises
        `AdapterError` if its value is of none of the types `kinds`."""
        self._own.append(key)
        value = self._arguments.pop(key, default)
        wrong = isinstance(value, bool) and bool not in kinds
        if value is not default and (wrong or not isinstance(value, kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise AdapterError(f"{self._name}: {key} is {value!r}, which is no {wanted}.")
        return value

    def take_num_rows(self) -> int:
        """Remove and return the argument `num_rows` (`DEFAULT_NUM_ROWS` if it is not set). Raises
        `AdapterError` if it is no positive whole number."""
        number: int = self.take("num_rows", DEFAULT_NUM_ROWS, int)
        if number < 1:
            raise AdapterError(f"{self._name}: num_rows is {number}; it must be at least 1.")
        return number

    def check_nothing_left(self) -> None:
        """Raise `AdapterError` if an argument is left, since the adapter does not know it."""
        for key in self._arguments:
            raise AdapterError(
                f"{self._name} takes no argument {key}.{did_you_mean(key, self._own)}"
                f" It takes: {', '.join(self._own)}."
            )


def numbered_rows(number: int) -> list[dict[str, Any]]:
    """Return `number` rows for an environment that needs only a seed. A row's single column,
    `episode`, is its index."""
    return [{"episode": index} for index in range(number)]


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the row's `seed` modulo 2**31, which all packages accept; 0 if the row has none."""
    return int(row.get("seed", 0)) % 2**31


def opening(*parts: str | None, system_prompt: str | None) -> list[Message]:
    """The first messages of an episode: the system prompt (None: none), and a user's message with
    these parts, without those that are None or empty."""
    text = "\n\n".join(part for part in parts if part)
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": text}]


def said(text: str) -> list[Message]:
    """A user's message with this text, in a list; an empty list for an empty text."""
    return [{"role": "user", "content": text}] if text else []


def text_of(message: Message) -> str:
    """The text of the model's message, without its tool calls."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content or ()
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


def plain(value: Any) -> Any:
    """Return the value in a form that JSON can hold: arrays and scalars of numpy
    become lists and numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def as_text(value: Any) -> str:
    """An observation as text for the model: a text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(plain(value), default=str)


_random_lock = threading.Lock()


class OwnRandomness:
    """Keeps an episode's own state of the process's random numbers (`random`, `numpy.random`). Some
    packages seed these and draw from them, so episodes in one process would disturb each other.
    Calls into the package are made in the context `drawn_from`, one at a time."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        import numpy as np

        with _random_lock:
            others = (random.getstate(), np.random.get_state())
            if self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = (random.getstate(), np.random.get_state())
                random.setstate(others[0])
                np.random.set_state(others[1])
