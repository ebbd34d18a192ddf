"""What a job tells of a step that it has committed: how long it was in each of its phases.

A run tells it of its log (`cluster/profile/phase_times.py`), a program of another framework by the
clock (`cluster/seats/phases.py`), and profiles are made of it. Every commit ends one, also of a
step that had nothing to train on, so that there are as many as a job has steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.cluster.decide.job import Times

EMPTY = "empty"
"""A kind of iteration: nothing was trained on."""
EVALUATED = "+evaluation"
"""Of an iteration with an evaluation: the end of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One step, in seconds, without waits for pools and switches."""

    step: int
    kind: str
    """Of its longest round (a step whose rounds refill it has several), or `EMPTY`; and whether it
    ended with an evaluation, whose generation takes as long at the first step as at the last."""
    rollout_s: float
    """From the commit before to the last sample's end, and the same of refills, from their launch,
    and what an evaluation generated: the rollout pool is held. Fetching prompts is part of it."""
    between_s: float
    """Verdicts (or a refill's prompts) are awaited after generation; no pool is held."""
    train_s: float
    """Until the weights are published or handed over, with gradients that were begun before:
    the training pool is held. 0 in a step that had nothing to train on."""
    after_s: float
    """Commit, checkpoint, verdicts of an evaluation, callbacks."""
    last: bool | None = None
    """The process begins no other one after it. None: nobody says."""

    @property
    def is_empty(self) -> bool:
        """Nothing was trained on."""
        return self.kind.startswith(EMPTY)

    @property
    def times(self) -> Times:
        """As the cluster counts them: each phase took some time (`Times.positive`)."""
        return Times(self.rollout_s, self.between_s, self.train_s, self.after_s).positive()
