"""The order in which prompts are taken from a data set: seeded and resumable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollpacker.bounds import check_at_least
from rollpacker.core.ids import PromptId
from rollpacker.data.dataset import DataError


@dataclass(eq=False, slots=True)
class PromptCursor:
    """Yields the prompt ids of every row of a data set once per epoch, in an order
    given by seed and epoch."""

    name: str
    num_rows: int
    seed: int
    shuffle: bool
    max_epochs: int | None
    sources: Sequence[str] | None = None
    """For each row, the `source` of its prompt's id, such as the row's task. None: `name` is
    the source of all rows."""
    _epoch: int = field(default=0, init=False)
    _position: int = field(default=0, init=False)
    _order: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise DataError(f"{self.name}: there are no rows to draw prompts from.")
        check_at_least(self, 1, "max_epochs")
        self._order = self._order_of(0)

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Return up to `count` ids of prompts of the current epoch (none after the last epoch),
        whether the epoch ended with them, and whether all epochs have ended."""
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        if self.ended:
            return (), True, True
        rows = self._order[self._position : self._position + count]
        prompts = tuple(PromptId(self._source(row), self._epoch, int(row)) for row in rows)
        self._position += len(prompts)
        epoch_ended = self._position == self.num_rows
        if epoch_ended:
            self._epoch += 1
            self._position = 0
            if not self.ended:
                self._order = self._order_of(self._epoch)
        return prompts, epoch_ended, self.ended

    def state(self) -> dict[str, Any]:
        """Return the cursor's position in the data, as values for JSON."""
        return {
            "name": self.name,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that `state` returned. Raises `DataError` if it is of another
        data set, seed or order."""
        for key, own in self.state().items():
            if key not in state:
                raise DataError(f"the saved place in the data ({self.name}) lacks {key}.")
            if key not in ("epoch", "position") and state[key] != own:
                raise DataError(
                    f"cannot resume: the run drew its {self.name} prompts with {key}={state[key]},"
                    f" now {key} is {own}. Restore the old dataset and settings, or start a new"
                    " run."
                )
        epoch, position = state["epoch"], state["position"]
        sound = isinstance(epoch, int) and isinstance(position, int) and epoch >= 0
        if not sound or not 0 <= position < self.num_rows:
            raise DataError(
                f"cannot resume: epoch {epoch!r}, position {position!r} lies outside the data"
                f" ({self.num_rows} rows)."
            )
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)

    @property
    def ended(self) -> bool:
        """Whether all epochs are finished. Always False if `max_epochs` is None."""
        return self.max_epochs is not None and self._epoch >= self.max_epochs

    def _source(self, row: int) -> str:
        return self.name if self.sources is None else self.sources[row]

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        # numpy promises these bits for good, but not what `permutation` makes of them.
        entropy = (int(self.seed < 0), abs(self.seed), epoch)
        bits = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(self.num_rows)
        return np.argsort(bits, kind="stable")
