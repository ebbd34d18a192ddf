"""What a learner has accumulated since its last update."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.trainer.step_sums import StepSums
from rollpacker.trainer.trainer import TrainSample


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """Dropped as a whole when the step ends, one way or the other."""

    sums: StepSums = field(default_factory=StepSums)
    gradient_scale: float = 1.0
    """What the gradient so far must still be multiplied by."""
    parts: list[tuple[float, list[TrainSample]]] = field(default_factory=list)
    """The samples of each call, with what their weights were multiplied by since."""
    finite: bool = True
    """No loss that passes between calls came to was anything else, as far as is known."""

    @property
    def has_samples(self) -> bool:
        return any(samples for _, samples in self.parts)

    def rescale(self, factor: float, *, gradient_has_it: bool) -> None:
        """The samples so far were weighted provisionally. `gradient_has_it`: their gradient was
        multiplied by the factor already."""
        if not gradient_has_it:
            self.gradient_scale *= factor
        self.parts = [(so_far * factor, samples) for so_far, samples in self.parts]
        self.sums.scale(factor)

    def anew(self) -> OpenStep:
        """The step before its first pass, which remembers how many passes were for nothing. What
        the gradient is multiplied by stays: it is the same in all replicas."""
        done = self.sums.recomputed_micro_batches + self.sums.micro_batches
        return OpenStep(
            sums=StepSums(recomputed_micro_batches=done),
            gradient_scale=self.gradient_scale,
            parts=self.parts,
        )
