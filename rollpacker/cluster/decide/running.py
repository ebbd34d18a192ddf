"""What the cluster knows of a job that has nodes, or has had some (`cluster/decide/cluster.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.cluster.decide.events import Committed
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.learned import LearnedTimes
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.decide.placement import Rest

MAX_LOSSES = 3
"""A job that is lost more often than this without a commit is given up, unless ..."""
LOSSES_S = 3600.0
"""... its losses are further apart than this."""
PATIENCE = 3.0
"""A job may be away for this many times what it said at most, ..."""
PATIENCE_S = 30.0
"""... and for so long in any case, before others go on without it."""


# size: one field for each thing that is known of a job
@dataclass(slots=True)
class Running:
    """One job."""

    job: ClusterJob
    came_s: float
    """When it was submitted."""
    group: int = -1
    rollout_nodes: tuple[Node, ...] = ()
    has_waited: bool = False
    """For nodes."""
    joined: bool = False
    """It takes part in the turns, which it does from its first ask on."""
    token: int = 0
    """Of its last grant."""
    began_s: float = 0.0
    """Its first ask, or when that would have been if it had not waited for nodes."""
    steps: int = 0
    work_s: float = 0.0
    looked: int = 0
    """The change of the cluster up to which it was asked whether the job should move."""
    learned: LearnedTimes | None = None
    rest: Rest | None = None
    """Once it has committed an iteration, or waited for nodes."""
    lost_s: tuple[float, ...] = ()
    """When it was lost, since its last commit."""
    is_cancelled: bool = False

    def loses(self, at_s: float) -> bool:
        """It is lost. Returns whether that is once too often."""
        recent = (one for one in self.lost_s if at_s - one < LOSSES_S)
        self.lost_s = (*recent, at_s)
        return len(self.lost_s) > MAX_LOSSES

    def commits(self, event: Committed) -> int:
        """It has committed an iteration. Returns how many are left to do."""
        steps = event.step - self.job.steps_before
        if not event.step or event.numbers_otherwise:
            steps = self.steps + 1
        self.steps, self.work_s, self.lost_s = steps, self.work_s + event.work_s, ()
        if event.last is None:
            return self.job.steps - steps
        return 0 if event.last else max(self.job.steps - steps, 1)

    @property
    def patience_s(self) -> float:
        """So long others wait for it where it neither holds nodes nor wants any."""
        worst = self.job.worst
        return max(PATIENCE_S, PATIENCE * max(worst.between_s, worst.after_s))
