"""When to stop calling a function that gives nobody a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.rewards.reward import Cause, Failed, Scored


class Patience:
    """Counts the calls in a row that gave no sample a verdict."""

    def __init__(self, name: str, most: int | None) -> None:
        """`most`: so many end it; None: it has no end."""
        self.ended: str | None = None
        """Why, once it has."""
        self._name = name
        self._most = most
        self._num_failed = 0

    def saw(self, verdicts: Sequence[Scored | Failed | None], *, even_so: bool = False) -> bool:
        """Whether patience ends with this call. A lost worker says nothing of the function
        (`even_so`: but this does)."""
        failed = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
        if len(failed) < len(verdicts):
            self._num_failed = 0
        elif even_so or failed[0].cause is not Cause.INFRASTRUCTURE:
            self._num_failed += 1
        if self._most is None or self._num_failed < self._most or self.ended is not None:
            return False
        self.ended = (
            f"reward {self._name} gave no verdict in {self._most} calls in a row, at last:"
            f" {failed[0].reason}"
        )
        return True
