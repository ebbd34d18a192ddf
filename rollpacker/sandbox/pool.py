"""The backend "bwrap": a pool of workers, each with a zygote (a process that forks its runs).

A run gets an idle worker of its profile (or a new one), sends it one request and waits for the
reply. The worker ends the run at its limit. A worker that was stopped, that died, that does not
reply within `GRACE_S` after the limit, or that sends anything but a reply is killed, named in the
log and replaced, and its run is a `sandbox_error`. Waiting for a worker is not counted as time of
the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.sandbox import bwrap, cgroup, frames, seccomp, zygote
from rollpacker.sandbox.program import OUT_OF_MEMORY_SIGNAL
from rollpacker.sandbox.sandbox import (
    PYTHON,
    Capabilities,
    Limits,
    Profile,
    RunResult,
    SandboxUnavailable,
    Status,
    profile_of,
)
from rollpacker.sandbox.zygote_process import Reply, Worker, WorkerError, last_line

MAX_RUNS, MAX_AGE_S = 1000, 600.0
"""Number of runs and seconds of age after which a worker is replaced."""
IDLE_S = 60.0
"""Seconds after which an idle worker is ended, if there is another idle one of its profile."""

STARVED = 0.8
"""A run that exceeds its wall limit is a `timeout` only if it waited for a processor in at most
this share of its time. Else it is a `sandbox_error`: other programs may be to blame."""

_NOT_BEGUN = "the program had not begun when its run ended"

_log = logging.getLogger(__name__)
_STATUS = {
    zygote.TIMED_OUT: Status.TIMEOUT,
    zygote.FLOODED: Status.OUTPUT,
    zygote.CANCELLED: Status.KILLED,
}


@dataclass(slots=True)
class _Call:
    """A run of a program that a caller of `Pool.run` has asked for and that has not ended."""

    result: asyncio.Future[RunResult]
    """Future that gets the run's result, before the worker is ready for another run."""
    worker: Worker | None = None
    cancelled: bool = False


class Pool:
    """The sandbox of the backend "bwrap". Meets the protocol `Sandbox`. Belongs to the event loop
    and the thread that opened it."""

    def __init__(self, *, workers: int, defaults: Limits, allow_fork: bool = True) -> None:
        """`workers`: most runs at a time. `defaults`: limits of runs that bring none. `allow_fork`:
        programs may start processes, if a control group limits their memory. Raises
        `SandboxUnavailable`."""
        self._defaults = defaults
        self._bwrap = bwrap.find_bwrap()
        self._groups = cgroup.find_place()
        # Without a bound on tasks beside that on memory, only the user's own limit would stop a
        # fork bomb, and it does not hold for root.
        bounded = self._groups is not None and (self._groups.tasks is not None or os.getuid() != 0)
        can_fork = allow_fork and bounded
        try:
            # Where the processors are shared out by session, nobody may have a second one.
            shared_out = self._groups is not None and self._groups.cpu is not None
            self._filter = seccomp.program(fork=can_fork, sessions=shared_out)
        except ValueError as error:
            raise SandboxUnavailable(bwrap.why_unavailable(str(error))) from None
        self._slots = asyncio.Semaphore(workers)
        self._idle: dict[Profile, list[Worker]] = {}
        self._free_groups: list[cgroup.Group] = []
        self._calls: dict[asyncio.Task[None], _Call] = {}
        self._names = itertools.count(1)
        self._closing = asyncio.Event()
        self._retiring: asyncio.Task[None] | None = None
        self.capabilities = Capabilities(
            backend="bwrap",
            memory=f"cgroup v{self._groups.version}" if self._groups else "no fork",
            can_fork=can_fork,
        )

    async def open(self) -> None:
        """Start the first worker. Raises SandboxUnavailable if it does not start."""
        if self._groups is not None:
            cgroup.sweep(self._groups)
        try:
            self._put_back(await self._started(PYTHON))
        except (WorkerError, OSError) as error:
            raise SandboxUnavailable(bwrap.why_unavailable(str(error))) from error
        self._retiring = asyncio.create_task(self._retire_idle())

    async def run(
        self,
        program: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        profile: Profile | str = "python",
    ) -> RunResult:
        profile = profile_of(profile)
        if profile not in self._idle and (missing := bwrap.lacks(profile)):
            raise ValueError(missing)
        limits = limits or self._defaults
        request = frames.payload(program, stdin, files or {}, limits)
        await self._slots.acquire()
        if self._closing.is_set():
            self._slots.release()
            raise RuntimeError("this sandbox is closed")
        call = _Call(asyncio.get_running_loop().create_future())
        task = asyncio.create_task(self._run(call, request, limits, profile))
        self._calls[task] = call
        task.add_done_callback(self._on_done)
        try:
            return await call.result
        except asyncio.CancelledError:
            _cancel(call)
            raise

    async def lacks(self, profile: Profile) -> str:
        return bwrap.lacks(profile)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        call = self._calls.pop(task)
        self._slots.release()
        if call.result.done():
            return
        if task.cancelled():
            call.result.cancel()
        elif error := task.exception():
            call.result.set_exception(error)

    async def _run(self, call: _Call, request: bytes, limits: Limits, profile: Profile) -> None:
        worker = None
        try:
            worker = call.worker = await self._take(profile)
            if call.cancelled:
                await self._give_back(worker)
                return
            try:
                reply = await worker.run(request, limits)
            finally:
                call.worker = None  # from here on there is nothing to cancel
            if reply.how == zygote.BROKEN and not reply.short_of_memory:
                raise WorkerError(f"{worker}: {last_line(reply.stderr) or _NOT_BEGUN}")
        except (WorkerError, OSError) as error:
            _log.warning("sandbox worker failed and is replaced: %s", error)
            _finish(call, RunResult(status=Status.SANDBOX_ERROR, detail=str(error)))
            if worker is not None:
                await self._replace(worker)
            return
        _finish(call, result_of(reply, limits))
        await self._give_back(worker)

    async def _take(self, profile: Profile) -> Worker:
        idle = self._idle.get(profile, [])
        while idle:
            worker = idle.pop()
            trouble = worker.trouble()
            if not trouble:
                return worker
            _log.warning("sandbox worker failed while idle and is replaced: %s", trouble)
            await self._end(worker)
        return await self._started(profile)

    async def _replace(self, worker: Worker) -> None:
        """End the worker and start another one at once, so that no run need wait for it."""
        await self._end(worker)
        if self._closing.is_set():
            return
        try:
            self._put_back(await self._started(worker.profile))
        except (WorkerError, OSError) as error:
            _log.warning("sandbox worker cannot be replaced: %s", error)

    async def _started(self, profile: Profile) -> Worker:
        name = f"{profile.name}-{next(self._names)}"
        worker = Worker(name, profile, self._group(name))
        try:
            await worker.start(self._bwrap, self._filter)
        except BaseException:
            await self._end(worker)
            raise
        return worker

    def _group(self, name: str) -> cgroup.Group | None:
        if self._groups is None:
            return None
        if self._free_groups:
            return self._free_groups.pop()
        return cgroup.Group(self._groups, name, zygote.MAX_TASKS)

    async def _end(self, worker: Worker) -> None:
        await worker.close()
        if worker.group is not None:
            self._free_groups.append(worker.group)

    async def _give_back(self, worker: Worker) -> None:
        age_s = asyncio.get_running_loop().time() - worker.started_at
        worn = worker.num_runs >= MAX_RUNS or age_s > MAX_AGE_S
        if worn or self._closing.is_set():
            await self._end(worker)
        else:
            self._put_back(worker)

    def _put_back(self, worker: Worker) -> None:
        worker.idle_since = asyncio.get_running_loop().time()
        self._idle.setdefault(worker.profile, []).append(worker)

    async def _retire_idle(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), IDLE_S / 4)
            oldest = asyncio.get_running_loop().time() - IDLE_S
            for idle in self._idle.values():
                while len(idle) > 1 and idle[0].idle_since < oldest:
                    await self._end(idle.pop(0))

    async def close(self) -> None:
        self._closing.set()
        if self._retiring is not None:
            await self._retiring
        for call in self._calls.values():
            _cancel(call)
        if self._calls:
            await asyncio.wait(set(self._calls))
        for idle in self._idle.values():
            while idle:
                await self._end(idle.pop())
        for group in self._free_groups:
            await group.close()


def _finish(call: _Call, result: RunResult) -> None:
    if not call.result.done():
        call.result.set_result(result)


def _cancel(call: _Call) -> None:
    call.cancelled = True
    if call.worker is not None:
        call.worker.cancel_run()


def result_of(reply: Reply, limits: Limits) -> RunResult:
    """Turn a worker's reply into the result of the run, in the form that all backends have."""
    cap = limits.output_bytes
    status = _status(reply)
    own_cpu_s = reply.cpu_s / reply.wall_s if reply.wall_s else 0.0
    if status is Status.TIMEOUT and reply.waited_share > STARVED and own_cpu_s < 1 - STARVED:
        why = f"it had no processor for {reply.waited_share:.0%} of its time"
        return RunResult(status=Status.SANDBOX_ERROR, detail=why, wall_s=reply.wall_s)
    return RunResult(
        status=status,
        exit_code=reply.exit_code if status in (Status.OK, Status.NONZERO) else None,
        stdout=reply.stdout[:cap],
        stderr=reply.stderr[:cap],
        truncated=max(len(reply.stdout), len(reply.stderr)) > cap,
        wall_s=reply.wall_s,
        cpu_s=reply.cpu_s,
        peak_memory_bytes=reply.peak_bytes,
    )


def _status(reply: Reply) -> Status:
    if reply.how in _STATUS:
        return _STATUS[reply.how]
    # Before the exit status: what is left of a program whose children were ended can choose that.
    if reply.short_of_memory or reply.signal == OUT_OF_MEMORY_SIGNAL:
        return Status.MEMORY
    if reply.signal == 0 and reply.exit_code == 0:
        return Status.OK
    return Status.KILLED if reply.signal else Status.NONZERO
