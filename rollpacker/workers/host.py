"""The hosts on which a run's processes are started: this machine, or others (`workers/hosts/`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from rollpacker.workers.child import Child
from rollpacker.workers.line import LINE_FD, Line

if TYPE_CHECKING:
    from rollpacker.weights.buffer import BufferLayout, Memory, WeightSource


class Process(Protocol):
    """A process as its owner sees it, on this host or on another. `Child` has the docstrings."""

    pid: int
    """Process id on its own host. The owner sets it once it knows of a descendant that does the
    work; before, it may be 0."""

    def is_stopped(self) -> bool: ...

    def is_cut_off(self) -> bool:
        """Whether its host does not answer: its silence says nothing of itself. Before long it is
        heard again, or has ended with the host."""
        ...

    def how_ended(self, wait_s: float = 0.0) -> str | None: ...

    def went_with_host(self) -> bool:
        """Whether a process that has ended did not end by itself, but counts as ended since its
        host cannot be reached any more."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """A machine. Its methods may be called from any thread."""

    name: str

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Process, Line]:
        """Start `python -m module` with a line, whose other side it finds by `LINE_FD`.

        `environment` is added to what processes there have anyway; None takes away. A process that
        cannot be reached any more has ended, as far as its owner is told. Raises `OSError`.
        """
        ...

    def hold(self, layout: BufferLayout) -> BufferLayout:
        """Memory of this host for weights that a process there will write: the same each time, as
        long as this object lives and the host can be reached. Raises `OSError`, or `ValueError` if
        there is no room."""
        ...

    def weights(self, source: WeightSource) -> WeightSource:
        """Return where processes of this host read these weights; waits until they are there.
        Raises `OSError` if they cannot be brought, `StaleWeightsError` if they changed
        meanwhile."""
        ...


class ThisHost:
    """The machine of the run's own process."""

    name = "this machine"
    _memory: Memory | None = None

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Child, Line]:
        """See `Host`."""
        line, theirs = Line.pair()
        variables = {**os.environ, **environment, LINE_FD: str(theirs.fileno())}
        with theirs:
            child = Child.start(
                [sys.executable, "-m", module],
                name,
                guarded=guarded,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in variables.items() if value is not None},
            )
        return child, line

    def hold(self, layout: BufferLayout) -> BufferLayout:
        """See `Host`."""
        if self._memory is None:
            self._memory = layout.memory()
        return layout.at(self._memory)

    def weights(self, source: WeightSource) -> WeightSource:
        """See `Host`."""
        return source
