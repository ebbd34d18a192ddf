"""How much of what it repeats a test repeats."""

from __future__ import annotations

import os


def number_of(few: int) -> int:
    """How many faults, events or dialogues a test has: `few`, or what ROLLPACKER_NUMBER says.

    `ROLLPACKER_NUMBER=200 make nightly` is for somebody who has hours.
    """
    return int(os.environ.get("ROLLPACKER_NUMBER", few))
