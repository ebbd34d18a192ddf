"""Every prompt is trained on once, or dropped with a reason: the ledger counts them.

The ledger knows the prompts that were fetched and are not settled yet. A prompt leaves it exactly
once, by `train` or `drop`. A second exit, or one without an entry, is a bug and raises.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rollpacker.core.ids import PromptId


class LedgerError(AssertionError):
    """A prompt was about to be settled twice, or without having been fetched."""


class Ledger(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Prompts of a run and what became of them. A checkpoint holds it as it is."""

    open: dict[PromptId, None] = msgspec.field(default_factory=dict)
    """Prompts that were fetched and are not settled, in the order of arrival."""
    num_fetched: int = 0
    num_trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
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
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def _settle(self, prompt: PromptId) -> None:
        if prompt not in self.open:
            raise LedgerError(f"{prompt} is not open: never fetched, or settled before")
        del self.open[prompt]

    def check(self) -> None:
        """Raise unless every fetched prompt is open, trained or dropped."""
        settled = self.num_trained + sum(self.dropped.values())
        if self.num_fetched != settled + len(self.open):
            raise LedgerError(
                f"{self.num_fetched} fetched, but {settled} settled and {len(self.open)} open"
            )
