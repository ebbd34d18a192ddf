"""The contract of the part that starts and ends a cluster's jobs: on this host, or on ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollpacker.cluster.decide.nodes import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """What a runner needs to know to start a job."""

    job: str
    incarnation: int
    """Number of this start of the job, from 1."""
    command: Sequence[str]
    """The command line, such as `rollpacker train my_run.yaml --resume`."""
    environ: Mapping[str, str]
    """Variables to add to the host's environment; one of them has the address of the job's seat."""
    folder: str
    """Path of the working directory in which the job runs."""
    rollout_nodes: Sequence[Node]
    train_nodes: Sequence[Node]


class NoHost(OSError):
    """Raised if no host (machine) stands for a node at present: no job can be started there."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(message)
        self.node = node


class Runner(Protocol):
    """Starts and ends jobs, each known by its name and the number of its start (incarnation), also
    if an earlier service started it. Calls may be repeated; `OSError`: a host does not answer."""

    def start(self, order: JobOrder) -> None:
        """Start the job, unless the start of this number (incarnation) was made before. Raises
        `NoHost` if one of its nodes has no host (machine) at present."""
        ...

    def has_host(self, node: Node) -> bool:
        """Whether a host (machine) stands for this node of a pool at present."""
        ...

    def stop(self, job: str, incarnation: int) -> None:
        """Ask this start of a job to end after its iteration: with a checkpoint, exit code 130."""
        ...

    def kill(self, job: str, incarnation: int) -> None:
        """Kill all processes of this start of the job, on all hosts, until they are gone."""
        ...

    def ended(self, job: str, incarnation: int) -> int | None:
        """Return the exit code of this start of the job; None while it runs, -1 if unknown."""
        ...

    def last_lines(self, job: str) -> str:
        """Return the end of what the job has printed. Empty if it cannot be read now."""
        ...

    def want(self, num_nodes: Mapping[str, int]) -> None:
        """Tell whatever can rent nodes (an autoscaler) how many nodes of each pool are needed."""
        ...
