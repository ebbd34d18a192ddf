"""Guess the number: a game of several turns, what its best player reaches, and games of a clumsy
player to begin from.

A number from 1 to `highest` is drawn. The model guesses and is told "higher" or "lower" until it
has found it, which is worth 1, or has used up its guesses, which is worth 0. With 20 numbers and 5
guesses a player that about halves what is left each time always wins; the clumsy one of the
demonstrations wins six games of ten.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

HIGHEST, GUESSES = 20, 5
CLUMSY = 0.2
"""Chance of a guess in the demonstrations that heeds nothing that was said."""

Message = dict[str, str]


class Guess:
    """An environment: one game."""

    deterministic = True

    def __init__(self, highest: int = HIGHEST, guesses: int = GUESSES) -> None:
        self.highest, self.left = highest, guesses
        self.number = 0

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """A row may say the `number`; else it is drawn by the row's seed."""
        drawn = random.Random(row["seed"]).randint(1, self.highest)
        self.number = drawn if row.get("number") is None else int(row["number"])
        return [first_message(self.highest)]

    async def step(self, message: Mapping[str, Any]) -> tuple[list[Message], float, bool]:
        """What is no number counts as a guess, too."""
        told = hint(message["content"] or "", self.number)
        self.left -= 1
        if told == "right" or not self.left:
            return [], float(told == "right"), True
        return [{"role": "user", "content": told}], 0.0, False


def first_message(highest: int) -> Message:
    return {"role": "user", "content": f"1-{highest}"}


def hint(guess: str, number: int) -> str:
    """What is said to a guess: "right", "higher", "lower", or "?" if it is no number."""
    if re.fullmatch(r"\d{1,9}", guess) is None:
        return "?"
    if int(guess) == number:
        return "right"
    return "higher" if number > int(guess) else "lower"


@cache
def best_return(highest: int = HIGHEST, guesses: int = GUESSES) -> float:
    """The best possible chance to find a number that is drawn evenly, by trying all first
    guesses."""
    if not highest or not guesses:
        return 0.0
    return (
        max(
            1
            + below * best_return(below, guesses - 1)
            + (highest - 1 - below) * best_return(highest - 1 - below, guesses - 1)
            for below in range(highest)
        )
        / highest
    )


def dialogues(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Demonstrations, without end: games of a player that mostly guesses any of the numbers that
    are still possible, and sometimes any at all."""
    while True:
        number, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
        messages = [first_message(HIGHEST)]
        for _ in range(GUESSES):
            heeds = rng.random() >= CLUMSY
            guess = rng.randint(low, high) if heeds else rng.randint(1, HIGHEST)
            told = hint(str(guess), number)
            messages += [{"role": "assistant", "content": str(guess)}]
            if told == "right":
                break
            messages += [{"role": "user", "content": told}]
            if told == "higher":
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
        yield {"messages": messages}
