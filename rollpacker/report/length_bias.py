"""Trained lengths against the policy's own: what the race shifts and what the weights undo."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollpacker.core.ids import PromptId
from rollpacker.core.lengths.bins import FloatArray
from rollpacker.core.lengths.weights import effective_sample_size
from rollpacker.core.lengths.window import LengthWindow
from rollpacker.report.carrying import complements, keeps_noise
from rollpacker.report.step_history import End, RoundHistory, StepHistory

LENGTH_WINDOW = 50
"""Steps over which the lengths that were trained on are compared with the policy's own."""


class LengthBias:
    """Trained lengths against the policy's own, over the last steps, and what the loss weights that
    were in force make of them."""

    def __init__(self, cap: int | None) -> None:
        """`cap`: the longest response there can be, in tokens; None if that is not known."""
        self._job: Mapping[str, Any] = {}
        self._begin_with(cap)

    def begin(self, cap: int | None, job: Mapping[str, Any]) -> None:
        """A session of this job begins. With another limit of responses the comparison begins as
        well: the policy's own lengths are others."""
        self._job = job
        if cap != self._cap:
            before, saved = self._cap, self._window.state()
            self._begin_with(cap)
            if before is not None and cap is not None and before < cap:
                self._window.restore(saved)  # of its prompts only the long responses still come

    def _begin_with(self, cap: int | None) -> None:
        self._cap = cap
        self._window = LengthWindow(cap=cap, window_steps=LENGTH_WINDOW)
        self._trained: deque[tuple[FloatArray, FloatArray]] = deque(maxlen=LENGTH_WINDOW)
        """Lengths and weights of each step's trained samples."""
        self._whole: deque[bool] = deque(maxlen=LENGTH_WINDOW)
        """Whether a step trained on every response that it launched, whatever its length."""

    def add(self, step: StepHistory) -> dict[str, float]:
        """The metrics after this step: `length/...` and `debias/...`, what is known of them."""
        if keeps_noise(self._job):
            complement = complements(self._job)
            for round_ in step.rounds:  # of a prompt that is there twice the last one counts
                for prompt, (finished, stopped) in _ends([round_], complement).items():
                    self._window.observe(prompt, finished, stopped, continued=True)
        else:
            for prompt, (finished, stopped) in _ends(step.rounds, False).items():
                self._window.observe(prompt, finished, stopped)
        trained = _weighted_lengths(step)
        self._window.close_step([num_tokens for num_tokens, _ in trained])
        both = np.array(trained, dtype=np.float64).reshape(-1, 2)
        self._trained.append((both[:, 0], both[:, 1]))
        num_launched = sum(len(round_.samples) for round_ in step.rounds)
        self._whole.append(len(trained) == num_launched > 0)
        return self._unshifted(self._window.metrics()) | self._weighted()

    def _unshifted(self, metrics: dict[str, float]) -> dict[str, float]:
        """Where every response was trained on nothing was selected: the shift is 0, and not what
        the policy's own mean lags behind while lengths drift."""
        if "length/shift" in metrics and all(self._whole):
            own = metrics["length/trained_mean"]
            return metrics | {"length/policy_mean": own, "length/shift": 0.0}
        return metrics

    def _weighted(self) -> dict[str, float]:
        """Metrics of the loss weights. Empty as long as all weights are 1."""
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


def _ends(
    rounds: Sequence[RoundHistory], complement: bool
) -> dict[PromptId, tuple[list[int], list[int]]]:
    """Lengths of complete responses, and where the others were stopped, by prompt.

    What was carried and came out differently was drawn a second time because it was long: only its
    first draw says how long responses are, unless `complement` made the second one longer.
    """
    launched = dict.fromkeys(s.prompt for round_ in rounds for s in round_.samples)
    ends: dict[PromptId, tuple[list[int], list[int]]] = {p: ([], []) for p in launched}
    for round_ in rounds:
        for end in round_.ends:
            tokens, whole = end.num_tokens, end.end is not End.STOPPED
            had, kept = end.carried, end.num_kept
            if had is not None:
                if kept is not None and kept < had.num_tokens and (had.whole or not complement):
                    tokens, whole = had.num_tokens, had.whole
                elif kept is None and end.num_tokens == had.num_tokens and not whole:
                    whole = had.whole  # not looked at
            ends[end.sample.prompt][not whole].append(tokens)
    return ends


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
