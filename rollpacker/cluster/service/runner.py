"""The contract of what starts the cluster's jobs and ends them: this host, or ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollpacker.cluster.decide.nodes import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """A job that is to run."""

    job: str
    incarnation: int
    """Number of the start among the job's starts. With the job's name it names this start."""
    command: Sequence[str]
    """The command line, such as `rollpacker train my_run.yaml --resume`."""
    environ: Mapping[str, str]
    """Variables besides the host's own, with its seat among them."""
    folder: str
    """The folder in which it runs."""
    rollout_nodes: Sequence[Node]
    train_nodes: Sequence[Node]


class NoHost(OSError):
    """A node has no host now."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(message)
        self.node = node


class Runner(Protocol):
    """Knows jobs by name and incarnation, also those that an earlier service has started. Calls may
    be repeated. They raise `OSError` where nothing can be asked."""

    def start(self, order: JobOrder) -> None:
        """Start it, unless this very start was made before. Raises `NoHost`."""
        ...

    def has_host(self, node: Node) -> bool:
        """Whether the node has one now."""
        ...

    def stop(self, job: str, incarnation: int) -> None:
        """Ask it to end at its next commit, with a checkpoint (exit code 130 of `train`)."""
        ...

    def kill(self, job: str, incarnation: int) -> None:
        """End all its processes, wherever they are, at once. They are gone when this returns."""
        ...

    def ended(self, job: str, incarnation: int) -> int | None:
        """Return its exit code, None while it runs, and -1 for a start that nobody knows."""
        ...

    def last_lines(self, job: str) -> str:
        """The end of what the job has printed, or nothing if that cannot be read now."""
        ...

    def want(self, num_nodes: Mapping[str, int]) -> None:
        """Tell how many nodes of each pool are wanted, if somebody here can rent them or give them
        back."""
        ...
