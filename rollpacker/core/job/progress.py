"""How far a run has come: its counts of steps, and the ledger of its prompts.

Every prompt is trained on once, or dropped with a reason. The ledger holds the prompts that were
fetched and are not settled yet; `train` or `drop` settles a prompt. To settle one twice, or one
that was not fetched, is a bug and raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollpacker.codec import part_of
from rollpacker.core.commands import Commit
from rollpacker.core.ids import PromptId
from rollpacker.core.job.cadence import Cadence

MAX_EMPTY_STEPS = 3
"""After this number of steps in a row without anything to train on the run ends."""


class Progress(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Counts of a run's steps and rounds, as a checkpoint holds them."""

    step: int = 0
    """Number of steps committed."""
    version: int = 0
    """Number of optimizer steps applied; a step without anything to train on does not add one."""
    num_rounds: int = 0
    num_empty_steps: int = 0
    """Number of steps in a row, up to the last, that had nothing to train on."""
    data_ended: bool = False
    """True if the dataset has no more prompts, in any epoch."""
    evaluated_step: int | None = None
    """Number of the step that was evaluated last. None: no step was."""

    def out_of_steps(self, max_steps: int | None, *, after: int = 0) -> bool:
        """Whether `max_steps` are done, or will be `after` further steps; only prompts that earlier
        rounds left unfinished may still be trained on. False if `max_steps` is None."""
        return max_steps is not None and self.step + after >= max_steps

    def evaluation_is_due(self, cadence: Cadence | None, *, last: bool) -> bool:
        """Whether an evaluation is due after the last committed step. `cadence`: when evaluations
        are due (None: never). `last`: no step follows."""
        return cadence is not None and cadence.evaluation_is_due(
            self.step, evaluated_step=self.evaluated_step, last=last
        )

    def commit(self, cadence: Cadence | None, *, last: bool, stopping: bool) -> Commit:
        """Makes the `Commit` of the current step. An evaluation that it asks for is recorded as
        done at once, since no checkpoint is written before the evaluation."""
        evaluate = not stopping and self.evaluation_is_due(cadence, last=last)
        if evaluate:
            self.evaluated_step = self.step
        return Commit(
            step=self.step,
            last=last,
            stopping=stopping,
            checkpoint=cadence is not None
            and cadence.checkpoint_is_due(self.step, ending=last or stopping),
            evaluate=evaluate,
        )

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Progress:
        """Restores the counts from a job's saved `state`, of which they are a part."""
        progress = part_of(cls, state)
        # A run that ended for it gets another chance: its user may have mended the cause.
        progress.num_empty_steps %= MAX_EMPTY_STEPS
        return progress


class LedgerError(AssertionError):
    """Raised when a prompt would be settled (trained on or dropped) twice, or was not fetched."""


class Ledger(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Counts what became of a run's prompts, and holds the open ones; part of every checkpoint."""

    open: dict[PromptId, None] = msgspec.field(default_factory=dict)
    """Prompts that were fetched and are not settled, in the order of arrival."""
    num_fetched: int = 0
    num_trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of prompts dropped, by reason."""

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
        """Raises `LedgerError` unless open, trained and dropped prompts add up to those fetched."""
        settled = self.num_trained + sum(self.dropped.values())
        if self.num_fetched != settled + len(self.open):
            raise LedgerError(
                f"{self.num_fetched} fetched, but {settled} settled and {len(self.open)} open"
            )
