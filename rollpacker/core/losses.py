"""Losses of engines since the last committed step, and when they are too many."""

from __future__ import annotations


class Losses:
    def __init__(self, most: int, *, of_all: bool) -> None:
        """So many losses of one engine end the run; or of all together."""
        self._most = most
        self._of_all = of_all
        self._since: list[tuple[int, str]] = []
        """The engine, and why."""

    def __len__(self) -> int:
        return len(self._since)

    def __str__(self) -> str:
        return _listed(self._since)

    def clear(self) -> None:
        """A step is committed."""
        self._since.clear()

    def add(self, number: int, reason: str) -> str:
        """This engine was lost. Why the run cannot go on, in words; or nothing."""
        self._since.append((number, reason))
        counted = [one for one in self._since if self._of_all or one[0] == number]
        if len(counted) < self._most:
            return ""
        who = f"engine {number} was lost {len(counted)} times"
        if self._of_all:
            who = f"{len(counted)} engines were lost"
        return f"{who} without a committed step between them ({_listed(counted)})"


def _listed(losses: list[tuple[int, str]]) -> str:
    return "; ".join(f"engine {number}: {reason}" for number, reason in losses)
