"""Parts that all adapters share: their own arguments, the first messages, the model's text,
seeds."""

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
"""Number of rows of an environment that is made of a seed alone, unless the config says another."""


class AdapterError(ValueError):
    """The environment that a config names cannot be had; the message says why and what to do."""


class OwnArguments:
    """An adapter's own arguments, taken out of those of a config; what is left is the package's."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self._name = name
        self._arguments = arguments
        self._own: list[str] = []

    def take(self, key: str, default: Any, *kinds: type) -> Any:
        """The argument's value. Raises `AdapterError` if it is not of these kinds (None is what
        `default` may be, not what a config may say)."""
        self._own.append(key)
        value = self._arguments.pop(key, default)
        wrong = isinstance(value, bool) and bool not in kinds
        if value is not default and (wrong or not isinstance(value, kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise AdapterError(f"{self._name}: {key} is {value!r}, which is no {wanted}.")
        return value

    def take_num_rows(self) -> int:
        """The argument `num_rows`. Raises `AdapterError` if it is no positive whole number."""
        number: int = self.take("num_rows", DEFAULT_NUM_ROWS, int)
        if number < 1:
            raise AdapterError(f"{self._name}: num_rows is {number}; it must be at least 1.")
        return number

    def check_nothing_left(self) -> None:
        """Raises `AdapterError` for an argument that nobody takes."""
        for key in self._arguments:
            raise AdapterError(
                f"{self._name} takes no argument {key}.{did_you_mean(key, self._own)}"
                f" It takes: {', '.join(self._own)}."
            )


def numbered_rows(number: int) -> list[dict[str, Any]]:
    """Rows of an environment that is made of its seed alone."""
    return [{"episode": index} for index in range(number)]


def seed_of(row: Mapping[str, Any]) -> int:
    """The row's seed, such as every package takes it: below 2**31."""
    return int(row.get("seed", 0)) % 2**31


def opening(*parts: str | None, system_prompt: str | None) -> list[Message]:
    """The first messages of an episode, whose user says these parts as far as there are any."""
    text = "\n\n".join(part for part in parts if part)
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": text}]


def said(text: str) -> list[Message]:
    """One message of the environment with this text; no message for an empty text."""
    return [{"role": "user", "content": text}] if text else []


def text_of(message: Message) -> str:
    """The text of the model's message, without its tool calls."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content or ()
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


def plain(value: Any) -> Any:
    """The value without arrays and scalars of numpy, which JSON has not."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def as_text(value: Any) -> str:
    """An observation as the model reads it: a text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(plain(value), default=str)


_random_lock = threading.Lock()


class OwnRandomness:
    """The process's random numbers (`random`, `numpy.random`), for one episode alone.

    Some packages seed and draw from them; episodes that share a process would otherwise draw from
    one another's. Around every call into the package, one at a time.
    """

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
