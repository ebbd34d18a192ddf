"""A reward for responses that never end: nothing is right or wrong in them, but they differ."""

from __future__ import annotations

from collections.abc import Sequence


def share(completions: Sequence[str]) -> list[float]:
    """The share of digits among a completion's characters."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
