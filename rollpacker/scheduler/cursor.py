"""Prompts of a trainer that has a data loader of its own, by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollpacker.core.ids import PromptId

SOURCE = "train"


class Counted:
    """Numbers a trainer's prompts, from 0, in the order in which its data loader gives them. A
    prompt's random numbers depend on its number, so the loader must give the same prompts in the
    same order after a resume."""

    def __init__(self, fetch: Callable[[int], int]) -> None:
        """`fetch` is called with a number of prompts, takes so many more from the data loader, and
        returns how many it got: fewer where the data end."""
        self._fetch = fetch
        self.num_fetched = 0
        """Number of prompts fetched so far: the next prompt's number."""
        self.ended = False
        """Whether the data have ended."""

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Fetch up to `count` prompts. Returns their ids, and twice whether the data have ended:
        to RollPacker, all of a trainer's epochs are one."""
        found = 0 if self.ended else self._fetch(count)
        if not 0 <= found <= count:
            raise ValueError(f"{found} prompts were fetched, where {count} were asked for")
        self.ended = found < count
        first, self.num_fetched = self.num_fetched, self.num_fetched + found
        rows = range(first, self.num_fetched)
        return tuple(PromptId(SOURCE, 0, row) for row in rows), self.ended, self.ended

    def state(self) -> dict[str, Any]:
        return {"num_fetched": self.num_fetched, "ended": self.ended}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_fetched, self.ended = state["num_fetched"], state["ended"]
