"""Trained lengths against the policy's own: what the race shifts and what the weights undo."""

from __future__ import annotations

from collections import deque

import numpy as np

from rollpacker.core.ids import PromptId
from rollpacker.core.lengths.bins import FloatArray
from rollpacker.core.lengths.weights import effective_sample_size
from rollpacker.core.lengths.window import LengthWindow
from rollpacker.report.step_history import End, StepHistory

LENGTH_WINDOW = 50
"""Steps over which the lengths that were trained on are compared with the policy's own."""


class LengthBias:
    """Trained lengths against the policy's own, over the last steps, and what the loss weights that
    were in force make of them."""

    def __init__(self, cap: int | None) -> None:
        """`cap`: the longest response there can be, in tokens; None if that is not known."""
        self._begin_with(cap)

    def begin(self, cap: int | None) -> None:
        """A session begins. With another limit of responses the comparison begins as well: the
        policy's own lengths are others."""
        if cap != self._cap:
            self._begin_with(cap)

    def _begin_with(self, cap: int | None) -> None:
        self._cap = cap
        self._window = LengthWindow(cap=cap, window_steps=LENGTH_WINDOW)
        self._trained: deque[tuple[FloatArray, FloatArray]] = deque(maxlen=LENGTH_WINDOW)
        """Lengths and weights of each step's trained samples."""

    def add(self, step: StepHistory) -> dict[str, float]:
        """The metrics after this step: `length/...` and `debias/...`, what is known of them."""
        launched = dict.fromkeys(s.prompt for round_ in step.rounds for s in round_.samples)
        ends: dict[PromptId, tuple[list[int], list[int]]] = {p: ([], []) for p in launched}
        for round_ in step.rounds:
            for end in round_.ends:
                ends[end.sample.prompt][end.end is End.STOPPED].append(end.num_tokens)
        for prompt, (finished, stopped) in ends.items():
            self._window.observe(prompt, finished, stopped)
        trained = _weighted_lengths(step)
        self._window.close_step([num_tokens for num_tokens, _ in trained])
        both = np.array(trained, dtype=np.float64).reshape(-1, 2)
        self._trained.append((both[:, 0], both[:, 1]))
        return self._window.metrics() | self._weighted()

    def _weighted(self) -> dict[str, float]:
        """What the weights do; nothing as long as all are 1."""
        lengths, weights = (np.concatenate(parts) for parts in zip(*self._trained, strict=True))
        if not weights.any() or (weights == 1).all():
            return {}
        newest = self._trained[-1][1]
        metrics = {
            "length/weighted_mean": float(weights @ lengths / weights.sum()),
            "debias/effective_sample_size": effective_sample_size(weights),
            "debias/max_weight": float(weights.max()),
        }
        if newest.size:
            metrics["debias/mean_weight"] = float(newest.mean())
        return metrics


def _weighted_lengths(step: StepHistory) -> list[tuple[int, float]]:
    """The length of each trained sample, with the weight of its loss."""
    if step.train_on is None or step.train_on.weights is None:
        return [(sample.num_tokens, 1.0) for sample in step.trained_samples()]
    samples = [step.samples.get(sample) for group in step.groups for sample in group]
    weights = [weight for group in step.train_on.weights for weight in group]
    return [
        (sample.num_tokens, weight)
        for sample, weight in zip(samples, weights, strict=False)
        if sample is not None and sample.is_finished
    ]
