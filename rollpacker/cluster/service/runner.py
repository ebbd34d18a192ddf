"""The contract of the part that starts and ends a cluster's jobs: on this host, or on ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollpacker.cluster.decide.nodes import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """An order to start a job."""

    job: str
    incarnation: int
    """Number of the start among the job's starts. With the job's name it names this start."""
    command: Sequence[str]
    """The command line, such as `rollpacker train my_run.yaml --resume`."""
    environ: Mapping[str, str]
    """Variables of the environment besides the host's own, with the address of the job's seat."""
    folder: str
    """Path of the working directory in which the job runs."""
    rollout_nodes: Sequence[Node]
    train_nodes: Sequence[Node]


class NoHost(OSError):
    """Raised if a node has no host at present, so that no job can be started there."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(message)
        self.node = node


class Runner(Protocol):
    """Starts and ends jobs, known by name and number of the start (incarnation), also those of an
    earlier service. Calls may be repeated. They raise `OSError` if hosts do not answer."""

    def start(self, order: JobOrder) -> None:
        """Start the job, unless this start was made before. Raises `NoHost` without a host."""
        ...

    def has_host(self, node: Node) -> bool:
        """Whether the node has a host at present."""
        ...

    def stop(self, job: str, incarnation: int) -> None:
        """Ask the job to end at its next commit, with a checkpoint and exit code 130."""
        ...

    def kill(self, job: str, incarnation: int) -> None:
        """Kill all processes of the job, on all hosts. They are gone when this returns."""
        ...

    def ended(self, job: str, incarnation: int) -> int | None:
        """Return the exit code of the job's start; None while it runs, -1 if it is unknown."""
        ...

    def last_lines(self, job: str) -> str:
        """Return the end of what the job has printed. Empty if that cannot be read now."""
        ...

    def want(self, num_nodes: Mapping[str, int]) -> None:
        """Report how many nodes of each pool are needed, to whatever can rent nodes or give them
        back."""
        ...
