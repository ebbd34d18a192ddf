"""Compares an engine's log-probabilities of one text with the trainer's, update by update.

Equal weights need not compute the same: an engine with code of its own may have kept something that
it derived from older weights. In bfloat16 the two differ by more than an update changes, so that
the difference alone finds gross faults only. But an update also draws the rounding of nearly all
tokens anew, on both sides. An engine that says what it said before has stale weights.
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
SURE = 10.0
"""Where the trainer's log-probs are below -`SURE` on average, as of a model whose logits are large,
the tolerance grows with them, as the rounding of logits does."""
SEEN, SHARE_SEEN, NUM_SEEN = 0.25, 0.6, 200
"""An update is seen in a token if it changed the trainer's log-prob by more than `SEEN` times the
mean difference of the two sides: the rounding of an engine may hide smaller ones. An engine that
repeats itself exactly is stale once updates in a row were seen in `SHARE_SEEN` of the tokens, and
`NUM_SEEN` times in all. Fewer tokens, time and again, may be those of a single number that only the
trainer rounds now up, now down."""

LogProbs = NDArray[np.float32]


def text_of(prompts: Iterable[Sequence[int]], context: int | None) -> tuple[int, ...]:
    """Return the first `TEXT_TOKENS` tokens of these prompts end to end, again and again if they
    have fewer; but no more than fit a context of so many tokens (None: unlimited)."""
    tokens = [token for prompt in itertools.islice(prompts, TEXT_TOKENS) for token in prompt]
    size = TEXT_TOKENS if context is None else min(TEXT_TOKENS, context - 1)
    return tuple(itertools.islice(itertools.cycle(tokens), size))


class Comparison:
    """What an engine and its trainer said of one text after the latest update, and in how many
    updates each token was seen to change since the engine last said something else."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: name of the weights' dtype."""
        self._tolerance = TOLERANCE.get(dtype, TOLERANCE_HALF)
        self._latest: tuple[LogProbs, LogProbs] | None = None
        self._missed = np.zeros(0, np.int64)

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
        before, self._latest = self._latest, now
        if before is None or len(before[0]) != len(now[0]) or (before[1] != now[1]).any():
            self._missed = np.zeros(len(now[0]), np.int64)
        elif changed:
            seen = np.abs(now[0] - before[0]) > SEEN * np.abs(before[0] - before[1]).mean()
            self._missed += seen
        return self.difference(*now) or self._why_stale()

    def difference(self, trainer: LogProbs, engine: LogProbs) -> str | None:
        """Return the mean difference in words if it is larger than the tolerance, else None."""
        difference = float(np.abs(trainer - engine).mean())
        allowed = self._tolerance * max(1.0, float(np.abs(trainer).mean()) / SURE)
        if difference <= allowed:
            return None
        return (
            f"log-probabilities of {len(trainer)} tokens differ by {difference:.3g} on average "
            f"(allowed: {allowed:.3g})"
        )

    def _why_stale(self) -> str | None:
        share = float((self._missed > 0).mean())
        if share < SHARE_SEEN or self._missed.sum() < NUM_SEEN:
            return None
        return (
            "its log-probabilities of a text stayed as they were, while updates changed "
            f"{share:.0%} of the trainer's"
        )
