"""Compares an engine's log-probabilities of one text with the trainer's, update by update.

Equal weights need not compute the same: an engine with code of its own may have kept something that
it derived from older weights. In bfloat16 the two differ by more than an update changes, so that
the difference alone finds gross faults only; how both *change* from one update to the next finds
stale weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

TEXT_TOKENS = 256
TOLERANCE = {"float32": 1e-3}
TOLERANCE_HALF = 0.3
"""Largest mean difference of a token's log-probability between engine and trainer for weights in
other formats than float32, for which it is `TOLERANCE`."""
MOVED, STOOD_STILL = 0.5, 0.05
"""An engine is stale if an update changed this share of the trainer's log-probs or more, and this
share of the engine's or less. Rounding alone changes nearly all log-probs of an engine that has new
weights: if each changed with a probability of only 0.25, one in 10^14 sound updates of 255 tokens
would be refused."""
LARGE_CHANGE, NUM_CHANGED, LEAST_SLOPE, UNEXPLAINED = 16.0, 16.0, 0.5, 0.25
"""An engine is stale if the trainer's log-probs have changed by more than `LARGE_CHANGE` times what
the two differed by at first, in no fewer than `NUM_CHANGED` tokens, the regression of the engine's
change on the trainer's has a slope below `LEAST_SLOPE`, and what it leaves of the engine's change
is below `UNEXPLAINED` times the trainer's change (all as mean squares). For a sound engine the
slope is then at least 0.87 but for an error of 0.03, unless its noise has grown since, and in that
case too much is left."""
_RESOLUTION = 1e-12
"""Mean square of what float32 log-probs differ by at least."""

LogProbs = NDArray[np.float32]


def text_of(prompts: Iterable[Sequence[int]], context: int | None) -> tuple[int, ...]:
    """Return the first `TEXT_TOKENS` tokens of these prompts end to end, again and again if they
    have fewer; but no more than fit a context of so many tokens (None: unlimited)."""
    tokens = [token for prompt in itertools.islice(prompts, TEXT_TOKENS) for token in prompt]
    size = TEXT_TOKENS if context is None else min(TEXT_TOKENS, context - 1)
    return tuple(itertools.islice(itertools.cycle(tokens), size))


class Comparison:
    """What an engine and its trainer said of one text after the first update that was compared and
    after the latest."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: name of the weights' dtype."""
        self.tolerance = TOLERANCE.get(dtype, TOLERANCE_HALF)
        self._first: tuple[LogProbs, LogProbs] | None = None
        self._latest: tuple[LogProbs, LogProbs] | None = None

    def add(
        self, trainer: Sequence[float], engine: Sequence[float], *, changed: bool = True
    ) -> str | None:
        """Note what both say of each token after an update. Returns what shows that the engine
        computes with other weights, in words, or None. `changed`: whether the update brought other
        weights than the one before. Numbers that are not finite on the trainer's side are not
        compared, as the samples will show them."""
        now = np.array(trainer, np.float32), np.array(engine, np.float32)
        if not np.isfinite(now[0]).all():
            return None
        first, latest = self._first, self._latest
        if first is None or latest is None or len(first[0]) != len(now[0]):
            first = latest = self._first = now
            changed = False
        self._latest = now
        return (
            gross_difference(*now, self.tolerance)
            or (why_unmoved(latest, now) if changed else None)
            or why_behind(first, now)
        )


def gross_difference(trainer: LogProbs, engine: LogProbs, tolerance: float) -> str | None:
    """Return the mean difference in words if it is larger than `tolerance`, else None."""
    difference = float(np.abs(trainer - engine).mean())
    if difference <= tolerance:
        return None
    return (
        f"log-probabilities of {len(trainer)} tokens differ by {difference:.3g} on average "
        f"(allowed: {tolerance:g})"
    )


def why_unmoved(before: tuple[LogProbs, LogProbs], now: tuple[LogProbs, LogProbs]) -> str | None:
    """Return in words that an update changed the trainer's log-probs and not the engine's, else
    None. Each pair has the trainer's log-probs and the engine's."""
    trainer, engine = (float((a != b).mean()) for a, b in zip(before, now, strict=True))
    if trainer < MOVED or engine > STOOD_STILL:
        return None
    return (
        f"the update changed {trainer:.0%} of the trainer's log-probabilities of a text and "
        f"{engine:.0%} of the engine's"
    )


def why_behind(first: tuple[LogProbs, LogProbs], now: tuple[LogProbs, LogProbs]) -> str | None:
    """Return in words that the engine's log-probs have not followed the trainer's since the first
    update that was compared, else None. Each pair has the trainer's log-probs and the engine's."""
    theirs, own = ((b - a).astype(np.float64) for a, b in zip(first, now, strict=True))
    noise = float(np.square(first[0] - first[1]).mean()) + _RESOLUTION
    change = float(np.square(theirs).mean())
    num_changed = np.square(theirs).sum() ** 2 / max(float((theirs**4).sum()), _RESOLUTION**2)
    if change < LARGE_CHANGE * noise or num_changed < NUM_CHANGED:
        return None
    slope = float((theirs * own).mean()) / change
    left = float(np.square(own - slope * theirs).mean())
    if slope >= LEAST_SLOPE or left > UNEXPLAINED * change:
        return None
    return f"the engine's log-probabilities of a text follow {slope:.0%} of the trainer's changes"
