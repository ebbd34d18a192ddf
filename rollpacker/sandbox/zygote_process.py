"""A zygote (process that forks the runs) in bubblewrap, used from outside for a run at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollpacker.sandbox import bwrap, frames, zygote
from rollpacker.sandbox.cgroup import Group
from rollpacker.sandbox.sandbox import Limits, Profile
from rollpacker.workers.child import Child, state
from rollpacker.workers.child import children as child_pids

GRACE_S = 0.5
"""Seconds after a run's limit within which the worker must end the run and reply."""
LOOK_S = 0.05
"""Seconds between two checks of a worker during a run."""
START_LIMIT_S = 60.0
"""Most seconds that a new worker may take until it reports that it is ready."""


class WorkerError(Exception):
    """A worker failed, for which no program is to blame."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the zygote (process that forks the runs) reports of a run: how it ended (`ENDED...` in
    `zygote.py`), seconds, memory and output. Output beyond its limit is cut one byte after it."""

    how: bytes
    exit_code: int
    signal: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    stdout: bytes
    stderr: bytes
    short_of_memory: bool = False
    """Whether the kernel killed processes of the run for memory."""
    waited_share: float = 0.0
    """Share of the run's time in which it was ready but had no processor. Known only where a run is
    a single process; otherwise 0."""


class Worker:
    """One zygote (process that forks the runs). Started once, it must be closed in any case."""

    def __init__(self, name: str, profile: Profile, group: Group | None) -> None:
        self.name = name
        self.profile = profile
        self.num_runs = 0
        self.started_at = self.idle_since = asyncio.get_running_loop().time()
        self.group = group
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        self._child: Child | None = None
        """The process of bubblewrap. Once the zygote inside it has started, its `pid` is the
        zygote's, as numbered outside of the sandbox. None: not started yet."""
        self._writer: asyncio.StreamWriter | None = None
        self._impatient: asyncio.TimerHandle | None = None
        self._asked = False
        """Whether the present run's request was sent to the zygote."""
        self._waited_share = 0.0

    async def start(self, program: str, call_filter: bytes) -> None:
        """Start the zygote, and wait until it is ready. `program`: path of bwrap; `call_filter`:
        bytes of the system call filter for the runs. Raises `WorkerError`."""
        try:
            await self._spawn(program)
            assert self._writer is not None
            self._writer.write(zygote.START.pack(zygote.MAGIC, len(call_filter)) + call_filter)
            reported = asyncio.ensure_future(self._reader.readexactly(zygote.REPLY.size))
            trouble = await self._watch(reported, START_LIMIT_S)
            if not reported.done():
                reported.cancel()
                await asyncio.wait({reported})
                raise WorkerError(trouble or f"{self} did not report itself")
            reported.result()
            self._find_zygote()
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            raise WorkerError(f"{self} did not start: {self.last_words() or error!r}") from error

    async def _spawn(self, program: str) -> None:
        ours, theirs = socket.socketpair()
        entrances = self.group.entrances if self.group else ()
        with theirs:
            process = bwrap.start(
                program,
                self.profile,
                theirs,
                self._errors,
                entrances,
                tasks_are_counted=self.group is not None and self.group.counts_tasks,
            )
        self._child = Child(process, self.name)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)

    def _find_zygote(self) -> None:
        """Note the zygote's process id. Raises `OSError` while there is no zygote."""
        assert self._child is not None
        if self.pid == self._child.process.pid:
            self._child.pid = _only_grandchild(self.pid)

    @property
    def pid(self) -> int:
        return 0 if self._child is None else self._child.pid

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def trouble(self) -> str:
        """What is wrong with the worker, as seen without asking it, in words. Empty: nothing."""
        assert self._child is not None
        if self._child.how_ended() is not None or self._reader.at_eof():
            return f"{self} died: {self.last_words() or 'nobody knows why'}"
        with contextlib.suppress(OSError):
            self._find_zygote()
        if self._child.is_stopped():
            return f"{self} was stopped by a signal"
        return f"{self} died" if state(self.pid) in ("", "Z", "X") else ""

    async def run(self, request: bytes, limits: Limits) -> Reply:
        """Run one program and return the reply. `request` is the payload. Raises `WorkerError`."""
        self.num_runs += 1
        self._asked = False
        self._waited_share = 0.0
        try:
            return await self._run_in_group(request, limits)
        finally:
            if self._impatient is not None:
                self._impatient.cancel()
                self._impatient = None

    async def _run_in_group(self, request: bytes, limits: Limits) -> Reply:
        if self.group is None:
            reply = await self._run(request, limits)
            return replace(reply, waited_share=self._waited_share)
        try:
            await self.group.settle()
            self.group.begin(limits.memory_bytes)
        except OSError as error:
            raise WorkerError(f"{self}: its memory cannot be limited: {error}") from None
        reply = await self._run(request, limits)
        short_of_memory, peak = self.group.end()
        return replace(reply, short_of_memory=short_of_memory, peak_bytes=peak or reply.peak_bytes)

    async def _run(self, request: bytes, limits: Limits) -> Reply:
        exchange = asyncio.ensure_future(self._exchange(request, limits))
        trouble = await self._watch(exchange, limits.wall_s + GRACE_S)
        if not exchange.done():
            exchange.cancel()
            await asyncio.wait({exchange})
            raise WorkerError(trouble or f"{self} did not answer within its limit")
        try:
            return exchange.result()
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerError(f"{self} died: {self.last_words() or error!r}") from None

    async def _watch(self, exchange: asyncio.Future[Any], limit_s: float) -> str:
        """Wait until `exchange` (sending a request and reading its reply) is done, `limit_s`
        seconds have passed, or something is wrong with the worker. Returns what is wrong, or ""."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        until = began + limit_s
        while not exchange.done() and (left := until - loop.time()) > 0:
            await asyncio.wait({exchange}, timeout=min(left, LOOK_S))
            if self.group is None and not exchange.done():
                self._waited_share = _waited_s(self.pid) / (loop.time() - began)
            if not exchange.done() and (trouble := self.trouble()):
                # Its last reply may have come just now.
                await asyncio.wait({exchange}, timeout=0.01)
                return trouble
        if not exchange.done() and loop.time() > until + 0.1:
            # This loop was busy with something else: what it did not look at may be there by now.
            await asyncio.wait({exchange}, timeout=GRACE_S)
        return ""

    async def _exchange(self, request: bytes, limits: Limits) -> Reply:
        assert self._writer is not None
        self._writer.write(frames.header(b"r", self.num_runs, limits, len(request)))
        self._writer.write(request)
        self._asked = True
        if self._impatient is not None:  # cancelled before it was asked for
            self._ask_to_cancel()
        await self._writer.drain()
        return await self._reply(self.num_runs, limits.output_bytes)

    def cancel_run(self) -> None:
        """Make the worker end its present run. It then replies as usual; if not, it is killed."""
        assert self._child is not None
        self._impatient = asyncio.get_running_loop().call_later(GRACE_S, self._child.kill)
        if self._asked:
            self._ask_to_cancel()

    def _ask_to_cancel(self) -> None:
        """Ask the worker to end its run. Send this only after the run's request: the worker ignores
        it while it has no run."""
        assert self._writer is not None
        self._writer.write(frames.header(b"c", self.num_runs, Limits(), 0))

    async def _reply(self, run_id: int, cap: int) -> Reply:
        header = await self._reader.readexactly(zygote.REPLY.size)
        magic, how, got_id, *numbers, out, err = zygote.REPLY.unpack(header)
        exit_code, signal, wall_s, cpu_s, peak_bytes = numbers
        if magic != zygote.MAGIC or got_id != run_id or max(out, err) > cap + 1:
            raise WorkerError(f"{self} sent something that is no reply")
        return Reply(
            how=how,
            exit_code=exit_code,
            signal=signal,
            wall_s=wall_s,
            cpu_s=cpu_s,
            peak_bytes=peak_bytes,
            stdout=await self._reader.readexactly(out),
            stderr=await self._reader.readexactly(err),
        )

    def last_words(self) -> str:
        """The last line that the worker wrote to its standard error."""
        with contextlib.suppress(OSError):
            return last_line(os.pread(self._errors, 1 << 16, 0))
        return ""

    async def close(self) -> None:
        """End the worker at once, with all processes of its runs."""
        if self._child is not None:
            self._child.kill()
            await self._child.gone()
            self._child.close()
        if self._writer is not None:
            self._writer.close()
        os.close(self._errors)


def last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]


def _only_grandchild(pid: int) -> int:
    """Process id of the program that bubblewrap starts: the child of bubblewrap's own child, which
    is process 1 of the namespace. Raises `OSError` if it has ended."""
    for _ in range(2):
        children = child_pids(pid)
        if len(children) != 1:
            raise OSError(f"process {pid} has {len(children)} children")
        (pid,) = children
    return pid


def _waited_s(parent: int) -> float:
    """Seconds in which the first thread of process `parent`'s youngest child was ready to run but
    had no processor. 0 if the kernel does not say."""
    try:
        child = max(child_pids(parent), default=0)
        return int(Path(f"/proc/{child}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
