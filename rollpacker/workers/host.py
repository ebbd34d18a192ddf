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
    """A process as its owner sees it, on any host. `Child` has the docstrings that are missing."""

    pid: int
    """Id of the process on its own host; 0 while it is unknown. The owner sets it to that of a
    descendant that does the work."""

    def is_stopped(self) -> bool: ...

    def is_cut_off(self) -> bool:
        """Whether the process's host does not answer, so that silence of the process means nothing.
        Before long the process is heard again, or counts as ended with its host."""
        ...

    def how_ended(self, wait_s: float = 0.0) -> str | None: ...

    def went_with_host(self) -> bool:
        """Whether the process counts as ended only because its host cannot be reached any more."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """A machine on which processes can be started. Its methods may be called from any thread."""

    name: str

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Process, Line]:
        """Start `python -m module`; return it with a line, whose other side it finds by `LINE_FD`.

        `environment` is added to the host's variables; None removes one. A process that cannot be
        reached any more is reported as ended. Raises `OSError`.
        """
        ...

    def hold(self, layout: BufferLayout) -> BufferLayout:
        """Return memory of this host for weights that a process there will write: the same each
        time, as long as the host can be reached. Raises `OSError`, or `ValueError` if there is not
        enough memory."""
        ...

    def weights(self, source: WeightSource) -> WeightSource:
        """Return where processes of this host read these weights, after waiting until they have
        arrived. Raises `OSError` if they cannot be brought, `StaleWeightsError` if they changed
        meanwhile."""
        ...


class ThisHost:
    """The machine that this process runs on."""

    name = "this machine"
    _memory: Memory | None = None

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Child, Line]:
        """Start a process here with a line to it; see `Host`."""
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
        """Return memory for weights that a process here will write; see `Host`."""
        if self._memory is None:
            self._memory = layout.memory()
        return layout.at(self._memory)

    def weights(self, source: WeightSource) -> WeightSource:
        """Return these weights, which are on this host already; see `Host`."""
        return source
