"""Loss weights that undo the length bias of the race.

Short rounds train on the first samples to finish. `Debias` watches what every launch shows, keeps a
`LengthModel` of the policy's own lengths up to date, and gives each trained sample a weight, a
function of its length alone, such that the weighted samples of the last steps are as long as the
policy's own.

Every fresh prompt is trained on once, so prompts need no correction; only the responses inside them
are selected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from rollpacker.core.ids import PromptId
from rollpacker.core.length_model import (
    FloatArray,
    LengthModel,
    PromptLengths,
    bin_starts,
    choose_length_model,
)
from rollpacker.core.tail_batching import DebiasMethod

MIN_EFFECTIVE = 0.71
"""Moment weights keep at least this effective sample size."""
MIN_WEIGHT = 0.05
"""Moment weights do not fall below this: a negative weight would turn a sample's sign."""

MAX_PROMPTS_PER_STEP = 192
"""Of a step that starts more, so many are watched, evenly spread: the fit gets no better and the
cost stays bounded."""
MIN_PROMPTS = 32
"""With fewer nothing is said."""
MAX_UNSEEN = 0.01
"""Nothing is said while more of the policy's own responses than this are longer than any complete
one: before the first long round nobody knows how long they are."""
REFIT_SHARE = 0.1
"""The model is fitted again when so many launches were seen, per prompt in the window."""
WARM_ITERATIONS = 8
COLD_ITERATIONS = 100
COLD_GROWTH = 3
"""A fit starts afresh when the window has grown by this factor since one last did."""


def effective_sample_size(weights: FloatArray, counts: FloatArray | None = None) -> float:
    """(sum w)^2 / (n sum w^2) of Kish: the share of the n samples that unweighted ones of the same
    precision would need, 0 to 1. `counts` says how many samples have each weight (None: one)."""
    weights = np.asarray(weights, dtype=np.float64)
    counts = np.ones_like(weights) if counts is None else counts
    squares = counts.sum() * (counts @ weights**2)
    if not squares > 0:
        raise ValueError("no sample has a weight")
    return float((counts @ weights) ** 2 / squares)


def density_weights(
    model: LengthModel, counts: FloatArray, *, max_weight: float = 10.0
) -> FloatArray:
    """(B,) weights by bin of length: the policy's own density over the trained one.

    `counts` (B,) are the trained samples in every bin. Over them the weights have the mean 1, and
    none is above `max_weight`. A bin without trained samples gets a weight between those of its
    neighbours.
    """
    share = _shares(counts, max_weight)
    seen = share > 0
    ratio = np.interp(
        np.arange(share.size), np.flatnonzero(seen), model.density[seen] / share[seen]
    )
    return _to_mean_one(ratio, share, max_weight)


def moment_weights(
    model: LengthModel,
    counts: FloatArray,
    *,
    max_weight: float = 10.0,
    min_effective: float = MIN_EFFECTIVE,
) -> FloatArray:
    """(B,) weights by bin of length that give the trained samples the policy's own mean length.

    They are `density_weights` plus the least that is needed, linear in the length, to make the mean
    exact. If that leaves an effective sample size below `min_effective`, the density ratio is first
    drawn towards 1, as little as will do; what the mean loses by it the linear part gives back.
    Bounded from below and above, so the mean is exact unless many weights lie on a bound.
    """
    share = _shares(counts, max_weight)
    ratio = density_weights(model, counts, max_weight=max_weight)
    own_mean = model.mean()

    def shrunk(towards_one: float) -> FloatArray:
        start = (1 - towards_one) * ratio + towards_one
        return _to_mean_length(start, share, model.centres, own_mean, max_weight)

    best = shrunk(0.0)
    if effective_sample_size(best, share) >= min_effective:
        return best
    low, high = 0.0, 1.0
    best = shrunk(high)
    for _ in range(10):
        middle = (low + high) / 2
        weights = shrunk(middle)
        if effective_sample_size(weights, share) >= min_effective:
            high, best = middle, weights
        else:
            low = middle
    return best


def _shares(counts: FloatArray, max_weight: float) -> FloatArray:
    if not max_weight >= 1:
        raise ValueError(f"max_weight must be at least 1, not {max_weight}")
    counts = np.asarray(counts, dtype=np.float64)
    if not counts.sum() > 0:
        raise ValueError("no trained samples to weigh")
    return np.asarray(counts / counts.sum(), dtype=np.float64)


def _to_mean_one(weights: FloatArray, share: FloatArray, max_weight: float) -> FloatArray:
    """Scaled to the mean 1, those that would rise above `max_weight` being held there."""
    for _ in range(50):
        mean = float(share @ weights)
        if not mean > 0:
            return np.ones_like(weights)
        weights = np.minimum(weights / mean, max_weight)
        if abs(share @ weights - 1) < 1e-12:
            break
    return weights


def _to_mean_length(
    weights: FloatArray,
    share: FloatArray,
    lengths: FloatArray,
    own_mean: float,
    max_weight: float,
) -> FloatArray:
    """The weights that meet the mean weight 1 and the mean length with the least change, in squares
    over the samples; repeated because of the bounds."""
    centred = lengths - share @ lengths
    variance = share @ centred**2
    if not variance > 0:
        return _to_mean_one(weights, share, max_weight)
    for _ in range(30):
        missing = own_mean - share @ (weights * lengths)
        weights = weights + (1 - share @ weights) + missing / variance * centred
        weights = _to_mean_one(np.clip(weights, MIN_WEIGHT, max_weight), share, max_weight)
        if abs(missing) < 1e-6 * own_mean:
            break
    return weights


@dataclass(slots=True)
class _Step:
    prompts: dict[PromptId, PromptLengths]
    """Those first launched in this step, with what all their launches have shown."""
    ignored: list[PromptId]
    """Prompts of this step that are not watched."""
    counts: FloatArray
    """(B,) trained samples per bin."""
    tokens: FloatArray
    """(B,) their tokens."""


class Debias:
    """Watches one run and weighs its trained samples.

    A prompt belongs to the step of its *first* launch and is forgotten with it; what comes later of
    a forgotten prompt is ignored. (To keep a prompt for as long as its last launch is recent would
    favour those that are launched again, and those are the long ones.)

    Refits go on from the last fit and take place when the launches seen since then are a tenth of
    the prompts in the window: with 160 prompts started per short round and a window of 50 steps
    every five steps or so, some 30 ms each. The fit starts afresh, in some 0.3 s, when the window
    has tripled since it last did, and once per window: after a sudden change of the policy a fit
    that goes on from the last one can end in a poor optimum. The weights are made anew in every
    step, because one long round changes how much of the tail was trained on.
    """

    def __init__(
        self,
        method: DebiasMethod,
        *,
        cap: int | None,
        window_steps: int = 50,
        max_weight: float = 10.0,
    ) -> None:
        """`cap`: the longest response there can be, in tokens; None if there is no bound."""
        if method not in get_args(DebiasMethod):
            raise ValueError(f"debias must be one of {', '.join(get_args(DebiasMethod))}: {method}")
        if window_steps < 1:
            raise ValueError(f"window_steps must be at least 1, not {window_steps}")
        if not max_weight >= 1:
            raise ValueError(f"max_weight must be at least 1, not {max_weight}")
        self.method = method
        self.window_steps = window_steps
        self.max_weight = max_weight
        self._given_cap = None if cap is None else max(cap, 2)
        self._cap = self._given_cap or 2
        self._num_bins = bin_starts(self._cap).size
        self._steps: deque[_Step] = deque()
        self._known: dict[PromptId, dict[PromptId, PromptLengths]] = {}
        """Every watched prompt, and which step's prompts (or the new ones) it is among."""
        self._ignored: deque[list[PromptId]] = deque()
        """Prompts forgotten in each of the last `window_steps` steps."""
        self._is_ignored: set[PromptId] = set()
        self._new: dict[PromptId, PromptLengths] = {}
        """First launched since the last step."""
        self._num_seen = 0
        """Launches of watched prompts since the last fit."""
        self._num_at_cold_fit = 0
        """Prompts in the window when a fit last started afresh."""
        self._steps_since_cold_fit = 0
        self._model: LengthModel | None = None
        self._table: FloatArray | None = None
        """(B,) weight of a sample, by bin of length."""

    # -- what the job calls ------------------------------------------------------------

    def observe(self, prompt: PromptId, finished: Sequence[int], stopped: Sequence[int]) -> None:
        """One launch of a prompt: lengths of its complete responses, and where the others were
        stopped, in tokens.

        Raises `ValueError` for a length below 0 or above the cap.
        """
        self._make_room(
            min([*finished, *stopped], default=0), max([*finished, *stopped], default=0)
        )
        if prompt in self._is_ignored:
            return
        self._num_seen += 1
        among = self._known.setdefault(prompt, self._new)
        before = among.get(prompt, PromptLengths())
        among[prompt] = PromptLengths(
            finished=(*before.finished, *finished), stopped=(*before.stopped, *stopped)
        )

    def step(self, trained_lengths: Sequence[int]) -> list[float] | None:
        """The end of a step, after its launches were observed: the weight of each trained sample.

        None with the method "none", and while too little is known. Over the trained samples of the
        window the weights have the mean 1; over one step they need not. They are those of the steps
        before: a step that happens to hold much of the tail would otherwise weigh it less for that
        very reason, and the weighted lengths would come out short.
        """
        self._make_room(min(trained_lengths, default=0), max(trained_lengths, default=0))
        early = self.weigh(trained_lengths)
        self._close_step(trained_lengths)
        self._steps_since_cold_fit += 1
        if self._num_seen and self._num_seen >= REFIT_SHARE * len(self._known):
            self._refit()
        self._table = self._make_table()
        return self.weigh(trained_lengths) if early is None else early

    def weigh(self, lengths: Sequence[int]) -> list[float] | None:
        """What samples of these lengths weigh now; None where `step` gives None."""
        if self._table is None or self._model is None:
            return None
        weights: list[float] = self._table[self._model.bins(lengths)].tolist()
        return weights

    @property
    def model(self) -> LengthModel | None:
        """The last fit; None while too little is known."""
        return self._model if self._trusted() else None

    def metrics(self) -> dict[str, float]:
        """Trained lengths against the policy's own, over the window, and the weights.

        `length/trained_mean` is there as soon as something was trained on; the others come when
        enough is known. `length/shift` is trained over own mean, minus 1;
        `length/tail_trained_share` the share of the own tail beyond its 95 % quantile that was
        trained on.
        """
        counts, tokens = self._trained()
        if not counts.sum():
            return {}
        trained_mean = float(tokens.sum() / counts.sum())
        metrics = {"length/trained_mean": trained_mean}
        model = self.model
        if model is None:
            return metrics
        own_mean = model.mean()
        metrics |= {
            "length/policy_mean": own_mean,
            "length/shift": trained_mean / own_mean - 1,
            "length/tail_trained_share": model.tail_share_of(counts),
            "length/within_prompt_correlation": model.within_prompt_correlation(),
        }
        if self._table is not None:
            weighted = counts * self._table
            on_bound = self._table >= self.max_weight * (1 - 1e-9)
            metrics |= {
                "length/weighted_mean": float(tokens @ self._table / weighted.sum()),
                "debias/effective_sample_size": effective_sample_size(self._table, counts),
                "debias/max_weight": float(self._table[counts > 0].max()),
                "debias/clip_share": float(counts[on_bound].sum() / counts.sum()),
            }
        return metrics

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as JSON. An instance that restores it goes on as this one would."""
        return {
            "method": self.method,
            "cap": self._given_cap,
            "steps": [
                {
                    "prompts": _prompts_to_plain(step.prompts),
                    "ignored": [str(prompt) for prompt in step.ignored],
                    "counts": step.counts.tolist(),
                    "tokens": step.tokens.tolist(),
                }
                for step in self._steps
            ],
            "ignored": [[str(prompt) for prompt in step] for step in self._ignored],
            "new": _prompts_to_plain(self._new),
            "current_cap": self._cap,
            "num_seen": self._num_seen,
            "num_at_cold_fit": self._num_at_cold_fit,
            "steps_since_cold_fit": self._steps_since_cold_fit,
            "model": None if self._model is None else self._model.to_plain(),
            "table": None if self._table is None else self._table.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the `state` of another instance with the same cap.

        Another method has its own weights, and a shorter window forgets the oldest steps, from the
        next step on.
        """
        if state["cap"] != self._given_cap:
            raise ValueError(
                f"the lengths of the checkpoint are capped at {state['cap']} tokens, those of this "
                f"run at {self._given_cap}: the two do not mix. Resume with the cap as it was"
            )
        self._cap = state["current_cap"]
        self._num_bins = bin_starts(self._cap).size
        self._steps = deque(
            _Step(
                prompts=_prompts_from_plain(step["prompts"]),
                ignored=[PromptId.parse(text) for text in step["ignored"]],
                counts=np.array(step["counts"], dtype=np.float64),
                tokens=np.array(step["tokens"], dtype=np.float64),
            )
            for step in state["steps"]
        )
        self._ignored = deque([PromptId.parse(text) for text in step] for step in state["ignored"])
        self._new = _prompts_from_plain(state["new"])
        self._known = dict.fromkeys(self._new, self._new)
        for step in self._steps:
            self._known |= dict.fromkeys(step.prompts, step.prompts)
        self._is_ignored = {prompt for step in self._ignored for prompt in step}
        self._is_ignored.update(prompt for step in self._steps for prompt in step.ignored)
        self._num_seen = state["num_seen"]
        self._num_at_cold_fit = state["num_at_cold_fit"]
        self._steps_since_cold_fit = state["steps_since_cold_fit"]
        self._model = None if state["model"] is None else LengthModel.from_plain(state["model"])
        table = state["table"] if state["method"] == self.method else None
        self._table = None if table is None else np.array(table, dtype=np.float64)

    # -- the window --------------------------------------------------------------------

    def _close_step(self, trained: Sequence[int]) -> None:
        prompts, ignored = _thin_out(self._new, MAX_PROMPTS_PER_STEP)
        for prompt in ignored:
            del self._known[prompt]
        if ignored:
            self._num_seen -= len(ignored)
            self._known |= dict.fromkeys(prompts, prompts)
        self._is_ignored.update(ignored)
        lengths = np.asarray(trained, dtype=np.int64)
        bins = np.maximum(np.searchsorted(bin_starts(self._cap), lengths, side="right") - 1, 0)
        self._steps.append(
            _Step(
                prompts=prompts,
                ignored=ignored,
                counts=np.bincount(bins, minlength=self._num_bins).astype(np.float64),
                tokens=np.bincount(bins, lengths, self._num_bins).astype(np.float64),
            )
        )
        self._new = {}
        while len(self._steps) > self.window_steps:
            self._forget(self._steps.popleft())

    def _forget(self, step: _Step) -> None:
        for prompt in step.prompts:
            del self._known[prompt]
        self._is_ignored.update(step.prompts)
        self._ignored.append([*step.prompts, *step.ignored])
        while len(self._ignored) > self.window_steps:
            self._is_ignored.difference_update(self._ignored.popleft())

    def _make_room(self, shortest: int, longest: int) -> None:
        """Check lengths against the cap; without one, raise the bound that stands in for it."""
        if shortest < 0 or (self._given_cap is not None and longest > self._given_cap):
            wrong = shortest if shortest < 0 else longest
            raise ValueError(
                f"a length of {wrong} tokens, outside 0 to the cap of {self._given_cap}"
            )
        if self._given_cap is not None or longest < self._cap:
            return
        self._cap = 2 ** (longest.bit_length())
        # A power of two starts a bin under every cap, so the bins so far stay what they are.
        more = bin_starts(self._cap).size - self._num_bins
        self._num_bins += more
        for step in self._steps:
            step.counts = np.pad(step.counts, (0, more))
            step.tokens = np.pad(step.tokens, (0, more))
        self._model = self._table = None

    def _trained(self) -> tuple[FloatArray, FloatArray]:
        """(B,) trained samples of the window per bin, and their tokens."""
        nothing = np.zeros(self._num_bins)
        counts = sum((step.counts for step in self._steps), start=nothing)
        return counts, sum((step.tokens for step in self._steps), start=nothing)

    # -- the fit -----------------------------------------------------------------------

    def _trusted(self) -> bool:
        model = self._model
        return (
            model is not None and model.num_prompts >= MIN_PROMPTS and model.unseen() < MAX_UNSEEN
        )

    def _refit(self) -> None:
        prompts = [seen for step in self._steps for seen in step.prompts.values()]
        self._num_seen = 0
        cold = (
            not self._trusted()
            or len(prompts) >= COLD_GROWTH * self._num_at_cold_fit
            or self._steps_since_cold_fit >= self.window_steps
        )
        if cold:
            if _tail_is_dark(prompts):
                self._model = None
                return
            self._num_at_cold_fit = len(prompts)
            self._steps_since_cold_fit = 0
        self._model = choose_length_model(
            prompts,
            cap=self._cap,
            start=None if cold else self._model,
            max_iterations=COLD_ITERATIONS if cold else WARM_ITERATIONS,
        )

    def _make_table(self) -> FloatArray | None:
        model = self.model
        counts, _ = self._trained()
        if self.method == "none" or model is None or not counts.sum():
            return None
        weigh = density_weights if self.method == "density" else moment_weights
        return weigh(model, counts, max_weight=self.max_weight)


def _tail_is_dark(prompts: Sequence[PromptLengths]) -> bool:
    """Nothing is complete, or so many samples were stopped beyond the longest complete response
    that a fit could not be trusted."""
    longest = max((max(p.finished) for p in prompts if p.finished), default=None)
    if longest is None:
        return True
    num_beyond = sum(stop >= longest for p in prompts for stop in p.stopped)
    num_samples = sum(len(p.finished) + len(p.stopped) for p in prompts)
    return num_beyond > MAX_UNSEEN * num_samples


def _thin_out(
    prompts: dict[PromptId, PromptLengths], most: int
) -> tuple[dict[PromptId, PromptLengths], list[PromptId]]:
    """At most `most` of the prompts, evenly spread over their order, and the others."""
    if len(prompts) <= most:
        return prompts, []
    names = list(prompts)
    kept = {names[i * len(names) // most] for i in range(most)}
    return (
        {prompt: seen for prompt, seen in prompts.items() if prompt in kept},
        [prompt for prompt in names if prompt not in kept],
    )


def _prompts_to_plain(prompts: Mapping[PromptId, PromptLengths]) -> list[list[Any]]:
    return [[str(name), list(seen.finished), list(seen.stopped)] for name, seen in prompts.items()]


def _prompts_from_plain(plain: Sequence[Sequence[Any]]) -> dict[PromptId, PromptLengths]:
    return {
        PromptId.parse(name): PromptLengths(finished=tuple(finished), stopped=tuple(stopped))
        for name, finished, stopped in plain
    }
