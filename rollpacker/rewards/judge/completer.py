"""The protocol of what a judge asks: it completes chat messages. Light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollpacker.rewards.reward import Cause


class MakeCompleter(Protocol):
    """Makes a completer of a model folder, on an engine of this process."""

    def __call__(
        self, model_path: str, *, max_reply_tokens: int, concurrency: int
    ) -> Completer: ...


class Completer(Protocol):
    """An endpoint, or an engine in this process. Besides these two methods it may have `outage()`,
    as of a `RewardPart`, and the counters `num_retries` and `waited_s`."""

    async def complete(self, messages: Sequence[Mapping[str, str]], *, timeout_s: float) -> str:
        """The reply to chat messages. `timeout_s` limits the work on it, not the waiting before.

        Raises:
            CompletionFailed: there is none, and why.
            TimeoutError: there was none in time.
            ValueError: these messages can never be completed, such as too long a prompt.
        """
        ...

    async def close(self) -> None: ...


class CompletionFailed(RuntimeError):
    """A request has no reply; the message says why."""

    def __init__(self, reason: str, cause: Cause, *, wrong_set_up: bool = False) -> None:
        """`cause` as of a verdict. `wrong_set_up`: no request can succeed until the user changes
        something (a key, a model's name, an address)."""
        super().__init__(reason)
        self.cause = cause
        self.wrong_set_up = wrong_set_up
