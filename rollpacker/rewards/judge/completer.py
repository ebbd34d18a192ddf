"""The protocol of the model that a judge asks to complete chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollpacker.rewards.reward import Cause


class MakeCompleter(Protocol):
    """Makes a completer from a model folder, on an engine in this process."""

    def __call__(
        self, model_path: str, *, max_reply_tokens: int, concurrency: int
    ) -> Completer: ...


class Completer(Protocol):
    """The model that a judge asks: an endpoint, or an engine in this process. It may also have
    `outage()`, as a `RewardPart` does, and the counters `num_retries` and `waited_s`."""

    async def complete(self, messages: Sequence[Mapping[str, str]], *, timeout_s: float) -> str:
        """Return the reply to chat messages. `timeout_s` limits the work on the reply, not the
        waiting before.

        Raises:
            CompletionFailed: there is no reply; the message says why.
            TimeoutError: there was no reply in time.
            ValueError: these messages can never be completed, such as too long a prompt.
        """
        ...

    async def close(self) -> None: ...


class CompletionFailed(RuntimeError):
    """A request has no reply; the message says why."""

    def __init__(self, reason: str, cause: Cause, *, wrong_set_up: bool = False) -> None:
        """`cause`: as in a `Failed` verdict. `wrong_set_up`: whether no request can succeed until
        the user changes something (a key, a model's name, an address)."""
        super().__init__(reason)
        self.cause = cause
        self.wrong_set_up = wrong_set_up
