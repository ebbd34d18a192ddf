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
    """The model that a judge asks: an endpoint, or an engine in this process. It may also have a
    method `outage` (see `RewardPart.outage`), and as numbers for the metrics `num_retries` and
    `waited_s` (seconds of waiting)."""

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
        """`cause`: whose fault it is (see `Cause`), for the sample's `Failed` verdict.
        `wrong_set_up`: whether requests fail until the user changes a setting (key, model,
        address)."""
        super().__init__(reason)
        self.cause = cause
        self.wrong_set_up = wrong_set_up
