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
SEEN, NUM_SEEN, FOLLOWED = 0.5, 100, 0.1
"""An update is seen in a token if it changed the trainer's log-prob by more than `SEEN` times the
mean difference of the two sides: the rounding of an engine may hide smaller ones. A sound engine's
log-probs change in about as many tokens. It is stale once updates in a row were seen in `NUM_SEEN`
tokens together, and each changed its log-probs in at most `FOLLOWED` times those it was seen in."""

LogProbs = NDArray[np.float32]


def text_of(prompts: Iterable[Sequence[int]], context: int | None) -> tuple[int, ...]:
    """Return the first `TEXT_TOKENS` tokens of these prompts end to end, again and again if they
    have fewer; but no more than fit a context of so many tokens (None: unlimited)."""
    tokens = [token for prompt in itertools.islice(prompts, TEXT_TOKENS) for token in prompt]
    size = TEXT_TOKENS if context is None else min(TEXT_TOKENS, context - 1)
    return tuple(itertools.islice(itertools.cycle(tokens), size))


class Comparison:
    """What an engine and its trainer said of one text after the latest update, and in how many
    tokens updates were seen that the engine did not follow."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: name of the weights' dtype."""
        self._tolerance = TOLERANCE.get(dtype, TOLERANCE_HALF)
        self._latest: tuple[LogProbs, LogProbs] | None = None
        self._num_missed = 0

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
        if before is not None and changed and len(before[0]) == len(now[0]):
            seen = np.abs(now[0] - before[0]) > SEEN * np.abs(before[0] - before[1]).mean()
            followed = (now[1] != before[1]).sum() > FOLLOWED * seen.sum()
            self._num_missed = 0 if followed else self._num_missed + int(seen.sum())
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
        if self._num_missed < NUM_SEEN:
            return None
        return (
            "its log-probabilities of a text stayed as they were, while updates changed "
            f"{self._num_missed} of the trainer's"
        )
