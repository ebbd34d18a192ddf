"""Losses of engines and of the trainer: how often they may happen before the run is given up.

`EngineLost` is answered by `core/fleet/fleet.py`, which asks here whether the run goes on. The
answer to `TrainerLost` is `RestoreTrainer`: new processes, with the weights of the last optimizer
step. `TrainerReady` needs none: what the trainer had to answer is still to come.

A loss of the trainer changes nothing that the job waits for. Responses are kept until their step is
committed, and the trainer's new processes answer every open command, once.
"""

from __future__ import annotations

from rollpacker.core.commands import RestoreTrainer
from rollpacker.core.events import TrainerLost, TrainerReady


class EngineLosses:
    """Losses of engines since the last committed step. Too many of them end the run."""

    def __init__(self, most: int, *, of_all: bool) -> None:
        """`most` losses of one engine end the run; with `of_all`, `most` losses of all engines."""
        self._most = most
        self._of_all = of_all
        self._since: list[tuple[int, str]] = []
        """Number of the engine and reason of each loss since the last committed step."""

    def __len__(self) -> int:
        return len(self._since)

    def __str__(self) -> str:
        return _listed(self._since)

    def clear(self) -> None:
        """Forgets all losses of engines, since a step was committed."""
        self._since.clear()

    def add(self, number: int, reason: str) -> str:
        """Counts a loss of this engine. Returns why the run must end, in words; empty if not."""
        self._since.append((number, reason))
        counted = [one for one in self._since if self._of_all or one[0] == number]
        if len(counted) < self._most:
            return ""
        who = f"engine {number} was lost {len(counted)} times"
        if self._of_all:
            who = f"{len(counted)} engines were lost"
        return f"{who} without a committed step between them ({_listed(counted)})"


class TrainerLosses:
    """Losses of the trainer's processes. `max_losses` losses without a committed step in between
    end the run. None: the trainer cannot be lost."""

    def __init__(self, max_losses: int | None) -> None:
        self.max_losses = max_losses
        self.incarnation = 0
        self.given_up = ""
        """Why the run cannot go on, in words; empty while it can."""
        self._reasons: list[str] = []
        """Reason of each loss of the trainer since the last committed step."""

    def on_lost(self, event: TrainerLost, version: int) -> list[RestoreTrainer]:
        """Commands that start the trainer's processes anew, with the weights of `version`, which
        the last optimizer step made. Sets `given_up` instead if there were too many losses."""
        assert self.max_losses is not None, f"{event} in a run whose trainer cannot be lost"
        if event.incarnation != self.incarnation:
            return []  # known already
        self._reasons.append(event.reason)
        count = len(self._reasons)
        if count >= self.max_losses:
            times = "once" if count == 1 else f"{count} times"
            self.given_up = (
                f"the trainer was lost {times} without a committed step between them "
                f"({'; '.join(self._reasons)})"
            )
            return []
        self.incarnation += 1
        return [RestoreTrainer(incarnation=self.incarnation, version=version)]

    def on_ready(self, event: TrainerReady, version: int) -> None:
        """Records that the trainer is back. Raises `AssertionError` if its weights' version, or the
        count of its restarts (incarnation), is not the one that was asked for."""
        assert (event.incarnation, event.version) == (self.incarnation, version), (
            f"{event} with version {version} of incarnation {self.incarnation}"
        )

    def committed(self) -> None:
        """Forgets all losses of the trainer, since a step was committed."""
        self._reasons.clear()


def _listed(losses: list[tuple[int, str]]) -> str:
    return "; ".join(f"engine {number}: {reason}" for number, reason in losses)
