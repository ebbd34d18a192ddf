"""The machines on which a run's processes are started: this one, or others (`workers/hosts/`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rollpacker.workers.child import Child
from rollpacker.workers.line import LINE_FD, Line

if TYPE_CHECKING:
    from rollpacker.weights.buffer import BufferLayout, Memory, WeightSource

GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the numbers or names of the GPUs that CUDA shows to a process."""


class Process(Protocol):
    """A process on any host, as its owner (which started it) sees it. See also `Child`."""

    pid: int
    """Id of the process on its own host; 0 while it is unknown. The owner may set it to that of a
    descendant that does the work."""

    def is_stopped(self) -> bool: ...

    def is_cut_off(self) -> bool:
        """Return whether the process's host does not answer now, so that its silence means nothing.
        Later it is heard again, or counts as ended with its host."""
        ...

    def how_ended(self, wait_s: float = 0.0) -> str | None: ...

    def went_with_host(self) -> bool:
        """Return whether the process counts as ended only since its host cannot be reached."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """A machine on which processes can be started. Its methods may be called from any thread."""

    name: str

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Process, Line]:
        """Start `python -m module` on this host. Returns the process, and a line (message socket)
        to it.

        A `guarded` process ends with this one. `environment` is added to the host's variables; None
        removes one. Numbers in its `CUDA_VISIBLE_DEVICES` count among the GPUs that the run may use
        on this host. A process out of reach is reported as ended. Raises `OSError`.
        """
        ...

    def hold(self, layout: BufferLayout) -> BufferLayout:
        """Reserve memory on this host into which a process there will write weights, and return its
        layout: the same memory in each call, as long as the host can be reached. Raises `OSError`,
        or `ValueError` if there is not enough memory."""
        ...

    def weights(self, source: WeightSource) -> WeightSource:
        """Return where processes of this host read this version of the weights, after waiting until
        it has arrived. Raises `OSError` if it cannot be brought, `StaleWeightsError` if it changed
        meanwhile."""
        ...


class ThisHost:
    """The machine on which this process runs, as a `Host`."""

    name = "this machine"
    gpus: Sequence[str] = ()
    """Names, for CUDA_VISIBLE_DEVICES, of the GPUs that the run may use here. Empty: those that
    this process sees."""
    _memory: Memory | None = None

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Child, Line]:
        """Start `python -m module` here. Returns the process and a line (socket) to it."""
        line, theirs = Line.pair()
        variables = {**variables_of(self, environment), LINE_FD: str(theirs.fileno())}
        with theirs:
            child = Child.start(
                [sys.executable, "-m", module],
                name,
                guarded=guarded,
                pass_fds=[theirs.fileno()],
                env=variables,
            )
        return child, line

    def hold(self, layout: BufferLayout) -> BufferLayout:
        """Reserve memory for weights on this machine, the same at each call. Returns `layout` with
        the place of that memory."""
        if self._memory is None:
            self._memory = layout.memory()
        return layout.at(self._memory)

    def weights(self, source: WeightSource) -> WeightSource:
        """Return `source` itself: its weights are on this machine already."""
        return source


def variables_of(host: ThisHost, environment: Mapping[str, str | None]) -> dict[str, str]:
    """Return all environment variables of a process that this host starts with `environment`."""
    merged = {**os.environ, **environment}
    gpus = host.gpus or _names(os.environ.get(GPUS))
    if gpus and environment.get(GPUS):
        merged[GPUS] = ",".join(gpus[int(number)] for number in _names(environment[GPUS]))
    return {name: value for name, value in merged.items() if value is not None}


def _names(listed: str | None) -> list[str]:
    return [name.strip() for name in (listed or "").split(",") if name.strip()]
