"""Compares the lengths of trained responses with the policy's own lengths: how far tail batching
shifts them, and how far weights of samples in the loss (`tail_batching.debias`) undo the shift."""

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
"""Number of last steps over which trained lengths are compared with the policy's own lengths."""


class LengthBias:
    """Compares the lengths of trained responses with those of all the policy's responses, over the
    last `LENGTH_WINDOW` steps, with and without the samples' weights in the loss."""

    def __init__(self, cap: int | None) -> None:
        """`cap`: maximum number of tokens of a response. None if that is not known."""
        self._job: Mapping[str, Any] = {}
        self._begin_with(cap)

    def begin(self, cap: int | None, job: Mapping[str, Any]) -> None:
        """Begin a session (process of the run) with the settings `job`. A change of `cap`, the
        maximum number of tokens of a response, begins the comparison anew, as it changes the
        policy's lengths."""
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
        """For each step the lengths of its trained samples, and their weights in the loss."""
        self._whole: deque[bool] = deque(maxlen=LENGTH_WINDOW)
        """For each of the last steps, whether it trained on every response that it launched."""

    def add(self, step: StepHistory) -> dict[str, float]:
        """Count a step. Returns the metrics `length/...` and `debias/...` that have a value."""
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
        """Returns the metrics, but with `length/shift` (trained mean less the policy's mean) at 0
        if the last steps trained on every response: what is left is the policy's drift."""
        if "length/shift" in metrics and all(self._whole):
            own = metrics["length/trained_mean"]
            return metrics | {"length/policy_mean": own, "length/shift": 0.0}
        return metrics

    def _weighted(self) -> dict[str, float]:
        """Metrics of the samples' weights in the loss. Empty as long as all weights are 1."""
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
    """For each prompt the lengths in tokens of its complete responses, and of its stopped
    responses.

    If a response was generated again and differs from that of an earlier launch, the earlier length
    counts: only long responses are put off, so new lengths alone would be too short. `complement`:
    such a response never ends before its earlier cut, so its new length counts."""
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
                elif end.has_more_carried and not whole:
                    tokens = had.num_tokens
            ends[end.sample.prompt][not whole].append(tokens)
    return ends


def _weighted_lengths(step: StepHistory) -> list[tuple[int, float]]:
    """For each trained sample of the step, its length in tokens and its weight in the loss."""
    if step.train_on is None or step.train_on.weights is None:
        return [(sample.num_tokens, 1.0) for sample in step.trained_samples()]
    samples = [step.samples.get(sample) for group in step.groups for sample in group]
    weights = [weight for group in step.train_on.weights for weight in group]
    return [
        (sample.num_tokens, weight)
        for sample, weight in zip(samples, weights, strict=False)
        if sample is not None and sample.is_finished
    ]
