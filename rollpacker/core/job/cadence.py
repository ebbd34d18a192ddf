"""When a step is followed by a checkpoint, and when by an evaluation.

Checkpoints are due every so many steps, after the last step, and when the run is asked to stop.
Evaluations are due before the first step, every so many steps, and after the last step. A stop is
to be quick: an evaluation that is due then waits until the run is resumed, even that of the last
step, which an interrupted run would otherwise never have.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    checkpoint_every_steps: int
    evaluates: bool = False
    """True if the run has held-out prompts to evaluate."""
    eval_every_steps: int | None = None
    """Steps between two evaluations. None: only before the first and after the last step."""

    def checkpoint_is_due(self, step: int, *, ending: bool) -> bool:
        """Whether a checkpoint is due after this step. `ending`: the run ends with it, or stops."""
        return ending or step % self.checkpoint_every_steps == 0

    def evaluation_is_due(self, step: int, *, evaluated_step: int | None, last: bool) -> bool:
        """Whether an evaluation is due after this step (0: before the first). `evaluated_step`:
        number of the step that was evaluated last. None: none was. `last`: no step follows."""
        if not self.evaluates or step == evaluated_step:
            return False
        every = self.eval_every_steps
        return last or step == 0 or (every is not None and step % every == 0)
