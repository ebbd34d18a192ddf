"""What the trainer is at while the run does something else, and how often it was lost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrainerBook:
    """Of the log so far."""

    num_streaming: int = 0
    """Groups whose gradients are being accumulated while the round goes on."""
    losses: int = 0
    away_s: float = 0.0
    """From losses until it was back."""
    interrupted: str = ""
    """The phase that goes on when it is back. Empty: nobody waits for that."""
    _lost_since: float | None = None

    def begin_session(self) -> None:
        """Another process is at work, with a trainer of its own."""
        self.num_streaming, self.interrupted, self._lost_since = 0, "", None

    def lose(self, now: float) -> None:
        """Gradients that it had begun are lost with it."""
        self.num_streaming = 0
        self.losses += 1
        if self._lost_since is None:
            self._lost_since = now

    def ready(self, now: float) -> None:
        if self._lost_since is not None:
            self.away_s += now - self._lost_since
            self._lost_since = None
