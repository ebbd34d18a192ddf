"""Who was trained on: every prompt once, or dropped with a reason.

The ledger knows the prompts that were fetched and are not settled yet. A prompt leaves it exactly
once, by `train` or `drop`. A second exit, or one without an entry, is a bug and raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.ids import PromptId


class LedgerError(AssertionError):
    """A prompt was about to be settled twice, or without having been fetched."""


@dataclass(slots=True)
class Ledger:
    open: dict[PromptId, None] = field(default_factory=dict)
    """Fetched and not settled, in the order of arrival."""
    num_fetched: int = 0
    num_trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Prompts dropped, by reason."""

    def fetch(self, prompts: Iterable[PromptId]) -> None:
        for prompt in prompts:
            if prompt in self.open:
                raise LedgerError(f"{prompt} was fetched while it is still open")
            self.open[prompt] = None
            self.num_fetched += 1

    def train(self, prompt: PromptId) -> None:
        self._settle(prompt)
        self.num_trained += 1

    def drop(self, prompt: PromptId, reason: str) -> None:
        self._settle(prompt)
        self.dropped[reason] += 1

    def _settle(self, prompt: PromptId) -> None:
        if prompt not in self.open:
            raise LedgerError(f"{prompt} is not open: never fetched, or settled before")
        del self.open[prompt]

    def check(self) -> None:
        """Raise unless every fetched prompt is open, trained or dropped."""
        settled = self.num_trained + self.dropped.total()
        if self.num_fetched != settled + len(self.open):
            raise LedgerError(
                f"{self.num_fetched} fetched, but {settled} settled and {len(self.open)} open"
            )

    def state(self) -> dict[str, Any]:
        return to_plain(self)

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Ledger:
        ledger = from_plain(cls, state)
        ledger.check()
        return ledger
