"""What the cluster knows of a job that has nodes, or has had some (`core/cluster.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.core.coexecution.job import ClusterJob
from rollpacker.core.coexecution.learned import LearnedTimes
from rollpacker.core.coexecution.nodes import Node
from rollpacker.core.coexecution.placement import Rest


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
