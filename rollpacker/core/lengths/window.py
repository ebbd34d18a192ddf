"""The lengths that a run's last steps have shown, and the model fitted to them.

Every launch of a prompt shows something of the policy's lengths, also where it was stopped. A
window of the last steps keeps what was shown and what was trained on, and a `LengthModel` of the
policy's own lengths is fitted to it and kept up to date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.ids import PromptId
from rollpacker.core.lengths.bins import FloatArray, IntArray, bin_starts, bins_of, check_lengths
from rollpacker.core.lengths.counts import PromptLengths
from rollpacker.core.lengths.fit import choose_length_model
from rollpacker.core.lengths.model import LengthModel

MAX_PROMPTS_PER_STEP = 192
"""Maximum number of prompts of a step whose lengths are kept ("watched"), evenly spread over the
step: with more the fit gets no better, and the cost stays bounded."""
MIN_PROMPTS = 32
"""Fewest prompts in the window with which a model is fitted."""
MAX_UNSEEN = 0.01
"""Largest share of the policy's own responses that may be longer than any complete one for a model
to be given out: before the first long round nobody knows how long they are."""
REFIT_SHARE = 0.1
"""The model is fitted again when the launches since the last fit are at least this share of the
number of prompts in the window."""
WARM_ITERATIONS = 8
COLD_ITERATIONS = 100
COLD_GROWTH = 3
"""Growth of the window since the last fit from scratch, as a factor, that calls for another."""


@dataclass(slots=True)
class _StepLengths:
    prompts: dict[PromptId, PromptLengths]
    """Prompts first launched in this step, with the lengths that all their launches have shown."""
    ignored: list[PromptId]
    """Prompts of this step without kept lengths, if it has over `MAX_PROMPTS_PER_STEP`."""
    counts: FloatArray
    """(B,) number of trained samples of the step per bin of length."""
    tokens: FloatArray
    """(B,) tokens of the trained samples of the step per bin of length."""


class SavedPrompt(NamedTuple):
    """A prompt and its `PromptLengths`, as a checkpoint holds them."""

    prompt: PromptId
    finished: tuple[int, ...]
    stopped: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedStep:
    """Lengths of one step's responses, as a checkpoint holds them."""

    prompts: list[SavedPrompt]
    ignored: list[PromptId]
    counts: FloatArray
    tokens: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedWindow:
    """A `LengthWindow` as a checkpoint holds it."""

    method: str = "none"
    """Name of the method that made the loss weights in `table`. "none": there are no weights."""
    cap: int | None
    steps: list[SavedStep]
    ignored: list[list[PromptId]]
    new: list[SavedPrompt]
    current_cap: int
    num_seen: int
    num_at_cold_fit: int
    steps_since_cold_fit: int
    model: LengthModel | None
    table: FloatArray | None = None
    """(B,) loss weights by bin of length. None: there are no weights."""


class LengthWindow:
    """Lengths that the last steps of a run have shown, and the model fitted to them.

    A prompt belongs to the step of its *first* launch and is forgotten with that step; what later
    launches of it show is then ignored. (To keep a prompt for as long as its last launch is recent
    would favour those that are launched again, and those have the long responses.)

    Refits go on from the last fit and take place when the launches seen since then are a tenth of
    the prompts in the window: with 160 prompts started per short round and a window of 50 steps
    every five steps or so, some 30 ms each. A fit from scratch, some 0.3 s, takes place when the
    window has tripled since the last such fit, and once per window: after a sudden change of the
    policy a fit that goes on from the last one can end in a poor optimum.
    """

    def __init__(self, *, cap: int | None, window_steps: int = 50) -> None:
        """`cap`: the longest response there can be, in tokens; None if there is no bound."""
        if window_steps < 1:
            raise ValueError(f"window_steps must be at least 1, not {window_steps}")
        self.window_steps = window_steps
        self._given_cap = None if cap is None else max(cap, 2)
        self._cap = self._given_cap or 2
        self._steps: deque[_StepLengths] = deque()
        self._known: dict[PromptId, dict[PromptId, PromptLengths]] = {}
        """Mapping that holds the lengths of each prompt: `prompts` of its step, or `_new`."""
        self._ignored: deque[list[PromptId]] = deque()
        """Prompts of which new lengths are ignored, in a list for each of the last `window_steps`
        steps: their own step has left the window."""
        self._is_ignored: set[PromptId] = set()
        self._new: dict[PromptId, PromptLengths] = {}
        """Lengths of the watched prompts first launched since the last step ended."""
        self._num_seen = 0
        """Number of launches of watched prompts since the last fit."""
        self._num_at_cold_fit = 0
        """Number of prompts in the window at the last fit from scratch."""
        self._steps_since_cold_fit = 0
        self._model: LengthModel | None = None

    def observe(
        self,
        prompt: PromptId,
        finished: Sequence[int],
        stopped: Sequence[int],
        *,
        continued: bool = False,
    ) -> None:
        """Records one launch of a prompt: lengths of its complete responses, and those at which
        others were stopped, in tokens. `continued`: these are earlier launches' responses, which
        have grown. Raises `ValueError` for a length below 0 or above the cap."""
        self.make_room([*finished, *stopped])
        if prompt in self._is_ignored:
            return
        self._num_seen += 1
        among = self._known.setdefault(prompt, self._new)
        before = PromptLengths() if continued else among.get(prompt, PromptLengths())
        among[prompt] = PromptLengths(
            finished=(*before.finished, *finished), stopped=(*before.stopped, *stopped)
        )

    def close_step(self, trained_lengths: Sequence[int]) -> None:
        """Ends a step. `observe` was given all of its launches before; `trained_lengths` are the
        lengths, in tokens, of the samples that it trained on."""
        self.make_room(trained_lengths)
        self._add_step(trained_lengths)
        self._steps_since_cold_fit += 1
        if self._num_seen and self._num_seen >= REFIT_SHARE * len(self._known):
            self._refit()

    @property
    def model(self) -> LengthModel | None:
        """Model of the last fit. None: nothing was fitted, or with fewer than `MIN_PROMPTS`
        prompts, or responses beyond the longest complete one are too frequent (`MAX_UNSEEN`)."""
        return self._model if self._trusted() else None

    @property
    def num_bins(self) -> int:
        return bin_starts(self._cap).size

    def bins(self, lengths: Sequence[int]) -> IntArray:
        """Bin of each length in tokens. Raises `ValueError` for one below 0 or above the cap."""
        values = np.asarray(lengths, dtype=np.int64)
        check_lengths(values, self._cap)
        return bins_of(bin_starts(self._cap), values)

    def trained(self) -> tuple[FloatArray, FloatArray]:
        """(B,) number of the window's trained samples per bin of length, and (B,) their tokens."""
        nothing = np.zeros(self.num_bins)
        counts = sum((step.counts for step in self._steps), start=nothing)
        return counts, sum((step.tokens for step in self._steps), start=nothing)

    def metrics(self) -> dict[str, float]:
        """Metrics that compare trained lengths with the policy's own, over the window.
        `length/trained_mean` is there as soon as something was trained on, the others once there is
        a model. `length/shift` is the mean trained length over the policy's own, minus 1;
        `length/tail_trained_share` is the share of the policy's responses beyond their 95 %
        quantile that was trained on."""
        counts, tokens = self.trained()
        if not counts.sum():
            return {}
        trained_mean = float(tokens.sum() / counts.sum())
        metrics = {"length/trained_mean": trained_mean}
        model = self.model
        if model is None:
            return metrics
        own_mean = model.mean()
        return metrics | {
            "length/policy_mean": own_mean,
            "length/shift": trained_mean / own_mean - 1,
            "length/tail_trained_share": model.tail_share_of(counts),
            "length/within_prompt_correlation": model.within_prompt_correlation(),
        }

    def make_room(self, lengths: Sequence[int]) -> None:
        """Raises `ValueError` for lengths below 0 or above the cap; without a cap, adds bins."""
        shortest, longest = min(lengths, default=0), max(lengths, default=0)
        if shortest < 0 or (self._given_cap is not None and longest > self._given_cap):
            wrong = shortest if shortest < 0 else longest
            raise ValueError(
                f"a length of {wrong} tokens, outside 0 to the cap of {self._given_cap}"
            )
        if self._given_cap is not None or longest < self._cap:
            return
        before = self.num_bins
        self._cap = 2 ** (longest.bit_length())
        # A power of two starts a bin under every cap, so the bins so far stay what they are.
        more = self.num_bins - before
        for step in self._steps:
            step.counts = np.pad(step.counts, (0, more))
            step.tokens = np.pad(step.tokens, (0, more))
        self._model = None

    # -- checkpoints -------------------------------------------------------------------

    def saved(self) -> SavedWindow:
        """State for a checkpoint. A window that restores it continues as this one would."""
        return SavedWindow(
            cap=self._given_cap,
            steps=[
                SavedStep(
                    prompts=_to_saved(step.prompts),
                    ignored=step.ignored,
                    counts=step.counts,
                    tokens=step.tokens,
                )
                for step in self._steps
            ],
            ignored=list(self._ignored),
            new=_to_saved(self._new),
            current_cap=self._cap,
            num_seen=self._num_seen,
            num_at_cold_fit=self._num_at_cold_fit,
            steps_since_cold_fit=self._steps_since_cold_fit,
            model=self._model,
        )

    def state(self) -> dict[str, Any]:
        """The state of `saved` as plain JSON values, for a checkpoint."""
        return to_plain(self.saved())

    def restore(self, state: Mapping[str, Any]) -> SavedWindow:
        """Restores another window's `state`, and returns it as a `SavedWindow`. A shorter window
        forgets the oldest steps when the next step ends. If this window's cap is larger, all
        lengths are forgotten, since a response cut off at the old cap was not at its end; later
        launches of their prompts are ignored. Raises `ValueError` for a smaller cap."""
        saved = from_plain(SavedWindow, state)
        if saved.cap != self._given_cap:
            if saved.cap is None or self._given_cap is None or saved.cap > self._given_cap:
                raise ValueError(
                    f"the lengths of the checkpoint are capped at {saved.cap} tokens, those of "
                    f"this run at {self._given_cap}: the two do not mix. Resume with the cap as it "
                    "was, or a larger one"
                )
            return self._ignore(saved)
        self._cap = saved.current_cap
        self._steps = deque(
            _StepLengths(_from_saved(step.prompts), step.ignored, step.counts, step.tokens)
            for step in saved.steps
        )
        self._ignored = deque(saved.ignored)
        self._new = _from_saved(saved.new)
        self._known = dict.fromkeys(self._new, self._new)
        for step in self._steps:
            self._known |= dict.fromkeys(step.prompts, step.prompts)
        self._is_ignored = {prompt for forgotten in self._ignored for prompt in forgotten}
        self._is_ignored.update(prompt for step in self._steps for prompt in step.ignored)
        self._num_seen = saved.num_seen
        self._num_at_cold_fit = saved.num_at_cold_fit
        self._steps_since_cold_fit = saved.steps_since_cold_fit
        self._model = saved.model
        return saved

    def _ignore(self, saved: SavedWindow) -> SavedWindow:
        """Keeps no lengths, and ignores later launches of the saved window's prompts."""
        known = [one.prompt for step in saved.steps for one in step.prompts]
        known += [prompt for step in saved.steps for prompt in step.ignored]
        known += [one.prompt for one in saved.new]
        self._ignored = deque([*saved.ignored, known])
        self._is_ignored = {prompt for forgotten in self._ignored for prompt in forgotten}
        return replace(saved, table=None)

    # -- the steps ---------------------------------------------------------------------

    def _add_step(self, trained: Sequence[int]) -> None:
        prompts, ignored = _thin_out(self._new, MAX_PROMPTS_PER_STEP)
        for prompt in ignored:
            del self._known[prompt]
        if ignored:
            self._num_seen -= len(ignored)
            self._known |= dict.fromkeys(prompts, prompts)
        self._is_ignored.update(ignored)
        lengths = np.asarray(trained, dtype=np.int64)
        bins, num_bins = bins_of(bin_starts(self._cap), lengths), self.num_bins
        self._steps.append(
            _StepLengths(
                prompts=prompts,
                ignored=ignored,
                counts=np.bincount(bins, minlength=num_bins).astype(np.float64),
                tokens=np.bincount(bins, lengths, num_bins).astype(np.float64),
            )
        )
        self._new = {}
        while len(self._steps) > self.window_steps:
            self._forget(self._steps.popleft())

    def _forget(self, step: _StepLengths) -> None:
        for prompt in step.prompts:
            del self._known[prompt]
        self._is_ignored.update(step.prompts)
        self._ignored.append([*step.prompts, *step.ignored])
        while len(self._ignored) > self.window_steps:
            self._is_ignored.difference_update(self._ignored.popleft())

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


def _tail_is_dark(prompts: Sequence[PromptLengths]) -> bool:
    """Whether these prompts do not allow a fit: no response is complete, or more than a share
    `MAX_UNSEEN` of the samples were stopped beyond the longest complete one."""
    longest = max((max(p.finished) for p in prompts if p.finished), default=None)
    if longest is None:
        return True
    num_beyond = sum(stop >= longest for p in prompts for stop in p.stopped)
    num_samples = sum(len(p.finished) + len(p.stopped) for p in prompts)
    return num_beyond > MAX_UNSEEN * num_samples


def _thin_out(
    prompts: dict[PromptId, PromptLengths], most: int
) -> tuple[dict[PromptId, PromptLengths], list[PromptId]]:
    """Splits a step's prompts into at most `most`, evenly spread over their order, and a rest."""
    if len(prompts) <= most:
        return prompts, []
    names = list(prompts)
    kept = {names[i * len(names) // most] for i in range(most)}
    return (
        {prompt: seen for prompt, seen in prompts.items() if prompt in kept},
        [prompt for prompt in names if prompt not in kept],
    )


def _to_saved(prompts: Mapping[PromptId, PromptLengths]) -> list[SavedPrompt]:
    return [SavedPrompt(name, seen.finished, seen.stopped) for name, seen in prompts.items()]


def _from_saved(saved: Sequence[SavedPrompt]) -> dict[PromptId, PromptLengths]:
    return {one.prompt: PromptLengths(finished=one.finished, stopped=one.stopped) for one in saved}
