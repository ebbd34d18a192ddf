"""The trainer's processes, which can be lost: they are brought back, or the run is given up.

    TrainerLost    RestoreTrainer: new processes, at the weights of the last optimizer step
    TrainerReady   nothing: who waits for the trainer's answer still does

A loss changes nothing that the job waits for. What was generated is there until its step is
committed, and every answer that the trainer owes is still to come, once, from its next incarnation.
"""

from __future__ import annotations

from rollpacker.core.commands import RestoreTrainer
from rollpacker.core.events import TrainerLost, TrainerReady


class TrainerLosses:
    """`max_losses`: so many without a commit between them end the run. None: there is no trainer
    that can be lost."""

    def __init__(self, max_losses: int | None) -> None:
        self.max_losses = max_losses
        self.incarnation = 0
        self.given_up = ""
        """Why the run cannot go on, in words."""
        self._reasons: list[str] = []
        """Since the last commit."""

    def on_lost(self, event: TrainerLost, version: int) -> list[RestoreTrainer]:
        """The answer; `version`: of the last optimizer step. Sets `given_up` where that is what
        follows."""
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
        """It is back. Raises `AssertionError` if it is not where it was."""
        assert (event.incarnation, event.version) == (self.incarnation, version), (
            f"{event} with version {version} of incarnation {self.incarnation}"
        )

    def committed(self) -> None:
        """A step was committed: losses before it do not count any more."""
        self._reasons.clear()
