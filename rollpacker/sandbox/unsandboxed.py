"""The backend "none": programs run as plain processes of this user, with limits but without
isolation.

It is used only with the user's explicit consent. A program can read and change whatever this user
can.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rollpacker.sandbox import bwrap
from rollpacker.sandbox.frames import as_bytes, checked_files, cpu_limit_s
from rollpacker.sandbox.sandbox import Capabilities, Limits, Profile, RunResult, Status, profile_of

_LOOK_S = 0.02
_LAUNCH = """
import resource, runpy, sys
cpu, memory, disk = map(int, sys.argv[1:4])
for which, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu),
                     (resource.RLIMIT_FSIZE, disk), (resource.RLIMIT_CORE, 0)):
    try:
        resource.setrlimit(which, (value, value + 1))
    except (OSError, ValueError):
        pass
sys.path.insert(0, "")
sys.argv = ["main.py"]
runpy.run_path("main.py", run_name="__main__")
"""


class Unsandboxed:
    """Runs programs as plain processes. Meets the protocol `Sandbox`, but isolates nothing."""

    def __init__(self, *, workers: int, defaults: Limits) -> None:
        self._defaults = defaults
        self._slots = asyncio.Semaphore(workers)
        self._running: set[asyncio.subprocess.Process] = set()
        self.capabilities = Capabilities(
            backend="none", memory="of each process alone", can_fork=True
        )

    async def run(
        self,
        program: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        profile: Profile | str = "python",
    ) -> RunResult:
        profile_of(profile)
        limits = limits or self._defaults
        contents = {**checked_files(files or {}, limits), "main.py": as_bytes(program)}
        async with self._slots:
            with tempfile.TemporaryDirectory(
                prefix="rollpacker-", ignore_cleanup_errors=True
            ) as at:
                _write(Path(at), contents)
                return await self._run(at, as_bytes(stdin), limits)

    async def lacks(self, profile: Profile) -> str:
        return bwrap.lacks(profile)

    async def _run(self, folder: str, stdin: bytes, limits: Limits) -> RunResult:
        # Files, not pipes: nobody has to empty them, and no survivor can hold them open.
        with contextlib.ExitStack() as stack:
            given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write(stdin)
            given.seek(0)
            began = asyncio.get_running_loop().time()
            status, code = await self._follow(folder, (given, out, err), limits)
            wall_s = asyncio.get_running_loop().time() - began
            kept = [_start_of(file, limits.output_bytes + 1) for file in (out, err)]
        truncated = max(map(len, kept)) > limits.output_bytes
        if truncated:
            status = Status.OUTPUT
        return RunResult(
            status=status,
            exit_code=code if status in (Status.OK, Status.NONZERO) else None,
            stdout=kept[0][: limits.output_bytes],
            stderr=kept[1][: limits.output_bytes],
            truncated=truncated,
            wall_s=wall_s,
        )

    async def _follow(
        self, folder: str, standard: tuple[IO[bytes], IO[bytes], IO[bytes]], limits: Limits
    ) -> tuple[Status, int]:
        """Run the program until it exits or reaches one of the `limits`. `standard`: files for
        stdin, stdout and stderr. Returns the status and exit code."""
        numbers = (math.ceil(cpu_limit_s(limits)), limits.memory_bytes, limits.disk_bytes)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-s",
            "-X",
            "utf8",
            "-c",
            _LAUNCH,
            *map(str, numbers),
            stdin=standard[0],
            stdout=standard[1],
            stderr=standard[2],
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PATH": os.defpath},
            start_new_session=True,
        )
        self._running.add(process)
        exited = asyncio.ensure_future(process.wait())
        try:
            await _exit_or_limit(exited, standard[1:], limits)
            timed_out = not exited.done()
        finally:
            _kill_group(process)
            code = await exited
            self._running.discard(process)
        if timed_out or code == -signal.SIGXCPU:
            return Status.TIMEOUT, code
        return (Status.KILLED if code < 0 else Status.NONZERO if code else Status.OK), code

    async def close(self) -> None:
        for process in list(self._running):
            _kill_group(process)


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, data in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


async def _exit_or_limit(
    exited: asyncio.Future[int], outputs: Sequence[IO[bytes]], limits: Limits
) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + limits.wall_s
    while not exited.done() and loop.time() < until:
        if any(os.fstat(file.fileno()).st_size > limits.output_bytes for file in outputs):
            return
        await asyncio.wait({exited}, timeout=max(0.0, min(_LOOK_S, until - loop.time())))


def _start_of(file: IO[bytes], size: int) -> bytes:
    file.seek(0)
    return file.read(size)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
