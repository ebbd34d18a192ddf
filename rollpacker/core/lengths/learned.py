"""What the job learns from its rounds, and what follows: how much more short rounds launch than
they need (their factors), and loss weights.

Calls come in the order `begin_round`, `engine_is_empty`, `end_round`, and, if the step has all its
groups, `weights` and `synced`. A round shows lengths and the seconds of generating them; from
`weights` to `synced` passes the rest of the step. With given factors and without loss weights
(`debias`) there is nothing to learn, and every call returns at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.core.job.config import JobConfig
from rollpacker.core.lengths.debias import Debias
from rollpacker.core.lengths.factor_plan import FactorPlanner
from rollpacker.core.lengths.window import LengthWindow
from rollpacker.core.rounds.round import Round
from rollpacker.core.rounds.tail_batching import Factors

CHOOSE_EVERY = 10
"""Steps after which a run with factors "auto" chooses the factors of short rounds anew."""


class Learned:
    def __init__(self, config: JobConfig) -> None:
        tail, cap = config.tail_batching, config.max_response_tokens
        self.factors = tail.factors
        """Factors (launched over needed) of prompts and of samples per prompt in short rounds."""
        self.debias: Debias | None = None
        self.window: LengthWindow | None = None
        """Lengths of the last steps' responses. None: neither factors nor weights need them."""
        self.planner: FactorPlanner | None = None
        """Chooses `factors` by durations of rounds. None: the configuration gives the factors."""
        if tail.enabled and tail.debias != "none":
            self.debias = Debias(cap=cap)
            self.window = self.debias.window
        elif tail.chooses:
            self.window = LengthWindow(cap=cap)
        if tail.chooses:
            self.planner = FactorPlanner(
                config.prompts_per_step,
                config.samples_per_prompt,
                max_length_shift=tail.max_length_shift,
                debiased=tail.debias != "none",
            )
        self.is_timed = tail.chooses or config.follows_carrying
        """Whether decisions depend on the seconds of rounds."""
        self._continued = tail.selection == "none"
        """Whether a later round goes on with the responses of an unfinished prompt."""
        self._now = 0.0
        """Time of the current event in seconds, rounded to microseconds as in the log."""
        self._since = 0.0
        """Time, in seconds, at which the round (or the training, if that has begun) began."""
        self.rollout_s = 0.0
        """Seconds that the engines were busy with the current round; 0 while they still are."""

    def take_time(self, time_s: float) -> None:
        """Records the time of the event that is handled now, in seconds."""
        self._now = round(time_s, 6)

    def _seconds(self) -> float:
        return round(self._now - self._since, 6)

    def begin_round(self) -> None:
        self._since, self.rollout_s = self._now, 0.0

    def engine_is_empty(self) -> None:
        """Records that no engine has a sample of the round any more; later calls do nothing."""
        if self.is_timed and not self.rollout_s:
            self.rollout_s = self._seconds()

    def end_round(self, round_: Round) -> None:
        """Records the lengths of a finished round's responses, and its seconds of generation."""
        if self.planner is not None:
            self.planner.observe_round(
                round_.plan.kind,
                longest_tokens=round_.longest_tokens,
                tokens=round_.tokens(),
                seconds=self.rollout_s,
            )
        if self.window is not None:
            for prompt, finished, stopped in round_.lengths():
                self.window.observe(prompt, finished, stopped, continued=self._continued)

    def weights(self, trained_lengths: Sequence[int]) -> list[float] | None:
        """Loss weights of a step's samples of these lengths in tokens. None: all weigh the same."""
        self._since = self._now
        if self.debias is not None:
            return self.debias.step(trained_lengths)
        if self.window is not None:
            self.window.close_step(trained_lengths)
        return None

    def synced(self) -> None:
        """Records that the step's training is done and that the engines have the new weights."""
        if self.planner is not None:
            self.planner.observe_fixed(self._seconds())

    def choose_factors(self, step: int) -> None:
        """Chooses `factors` anew every `CHOOSE_EVERY` steps, and as soon as there is a length
        model. Does nothing if the configuration gives them."""
        planner, window = self.planner, self.window
        if planner is None or not planner.ready or window is None:
            return
        model = window.model
        if model is not None and (planner.current is None or step % CHOOSE_EVERY == 0):
            self.factors = Factors(*planner.choose(model).factors)

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Factors, lengths and observed durations, as three entries of the job's saved state."""
        lengths = self.debias or self.window
        return {
            "factors": list(self.factors),
            "lengths": None if lengths is None else lengths.state(),
            "planner": None if self.planner is None else self.planner.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores factors, lengths and durations from the job's saved state. Factors that the
        configuration gives are not restored."""
        lengths = self.debias or self.window
        if lengths is not None and state["lengths"] is not None:
            lengths.restore(state["lengths"])
        if self.planner is not None and state["planner"] is not None:
            self.planner.restore(state["planner"])
            self.factors = Factors(*state["factors"])
