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
"""Number of steps after which a run with factors "auto" chooses anew how much more its short rounds
launch than they need."""


class Learned:
    def __init__(self, config: JobConfig) -> None:
        tail, cap = config.tail_batching, config.max_response_tokens
        self.factors = tail.factors
        """Factors of the short rounds now: how much more they launch than they need."""
        self.debias: Debias | None = None
        self.window: LengthWindow | None = None
        """Lengths of the last steps' responses. None: nothing is to be learnt from them."""
        self.planner: FactorPlanner | None = None
        """Chooses `factors` by measured rounds. None: the configuration gives them."""
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
        self._continued = tail.selection == "none"
        """True if a prompt left unfinished goes on with its responses, not with new ones."""
        self._now = 0.0
        """Time of the current event in seconds, rounded to microseconds as in the log."""
        self._since = 0.0
        """Time in seconds at which the round or the training began that is being timed."""
        self._rollout_s = 0.0
        """Seconds that the engines were busy with the current round; 0 while they still are."""

    def take_time(self, time_s: float) -> None:
        """Records the time of the event that is handled now, in seconds."""
        self._now = round(time_s, 6)

    def _seconds(self) -> float:
        return round(self._now - self._since, 6)

    def begin_round(self) -> None:
        self._since, self._rollout_s = self._now, 0.0

    def engine_is_empty(self) -> None:
        """Records that no engine has a sample of the round any more; later calls do nothing."""
        if self.planner is not None and not self._rollout_s:
            self._rollout_s = self._seconds()

    def end_round(self, round_: Round) -> None:
        """Records the lengths and the duration of a round that is over."""
        if self.planner is not None:
            self.planner.observe_round(
                round_.plan.kind,
                longest_tokens=round_.longest_tokens,
                tokens=round_.tokens(),
                seconds=self._rollout_s,
            )
        if self.window is not None:
            for prompt, finished, stopped in round_.lengths():
                self.window.observe(prompt, finished, stopped, continued=self._continued)

    def weights(self, trained_lengths: Sequence[int]) -> list[float] | None:
        """Loss weights of the samples that a step trains on, given their lengths in tokens. None:
        all weigh the same."""
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
        """Chooses `factors` if they are "auto": once enough is known, and every few steps."""
        planner, window = self.planner, self.window
        if planner is None or not planner.ready or window is None:
            return
        model = window.model
        if model is not None and (planner.current is None or step % CHOOSE_EVERY == 0):
            self.factors = Factors(*planner.choose(model).factors)

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was learnt, as three entries of the job's saved state."""
        lengths = self.debias or self.window
        return {
            "factors": list(self.factors),
            "lengths": None if lengths is None else lengths.state(),
            "planner": None if self.planner is None else self.planner.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what was learnt from the job's saved state. `factors` that the run chose stay;
        given ones are those of the configuration now."""
        lengths = self.debias or self.window
        if lengths is not None and state["lengths"] is not None:
            lengths.restore(state["lengths"])
        if self.planner is not None and state["planner"] is not None:
            self.planner.restore(state["planner"])
            self.factors = Factors(*state["factors"])
