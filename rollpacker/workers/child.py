"""Starts a child process, finds out whether it runs, is stopped or has ended, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollpacker.workers import guardian

_MAX_SIGNAL = 64
BY_SIGNAL = "was stopped by a signal"
"""Words for a process that a signal (SIGSTOP) holds, to follow its name in a sentence."""
END_S = 2.0
"""Seconds that a process which was told to end is given before it is killed."""


class Child:
    """A child process that this process has started. It ends when this object does, at the latest.

    The methods may be called from any thread.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, lifeline: int = -1) -> None:
        """Take over a started process. `lifeline`: if `process` is a guardian, which ends the child
        once a pipe from here is closed, this end of the pipe; otherwise -1."""
        self.name = name
        self.pid = process.pid
        """Id of the process that does the work: the started one, or a descendant that the owner has
        set."""
        self.process = process
        self._lifeline = lifeline
        self._close = weakref.finalize(self, _close, process, lifeline, os.getpid())

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        name: str,
        *,
        guarded: bool,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        output: int | None = None,
        error_output: int | None = None,
    ) -> Child:
        """Start `command` in a session of its own, so that a Ctrl-C is for this process alone.

        A guarded child gets a guardian process, which ends the child and all that it started when
        told to and when this process is gone; any other child must then end by itself. A child
        prints to the descriptor `output`, errors too unless `error_output` is given. Its
        environment is `env`, or this process's, without ray's variables such as a token. Raises
        `OSError`.
        """
        variables = os.environ if env is None else env
        theirs, ours = os.pipe() if guarded else (-1, -1)
        prefix = [sys.executable, "-ISB", guardian.__file__, str(theirs)] if guarded else []
        try:
            process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output if error_output is None else error_output,
                pass_fds=(*pass_fds, theirs) if guarded else pass_fds,
                start_new_session=True,
                env={name: v for name, v in variables.items() if not name.startswith("RAY_")},
                cwd=cwd,
            )
        except BaseException:
            _close_fd(ours)
            raise
        finally:
            _close_fd(theirs)
        return cls(process, name, ours)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP) holds the process, a debugger's excepted. False where
        the system does not show that."""
        return state(self.pid) == "T"

    def is_cut_off(self) -> bool:
        """Return False: this process's own host always answers."""
        return False

    def how_ended(self, wait_s: float = 0.0) -> str | None:
        """Return in words how the process ended; None if it still runs after `wait_s` seconds."""
        try:
            code = self.process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None
        if self._lifeline >= 0 and 128 < code <= 128 + _MAX_SIGNAL:
            code = 128 - code
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"signal {-code}, {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def went_with_host(self) -> bool:
        """Return False: the process cannot have ended with its host, which is this one."""
        return False

    def kill(self) -> None:
        """Kill the process; with a guardian, its descendants too. Does not wait for their end."""
        if self._close.alive:
            _kill(self.process, self._lifeline)

    async def gone(self) -> str | None:
        """Wait in an event loop for the process's end, and return in words how it ended. After
        `END_S` seconds the process is killed, and None is returned."""
        until = time.monotonic() + END_S
        while (how := self.how_ended()) is None and time.monotonic() < until:
            await asyncio.sleep(0.002)
        self.kill_by_force()
        return how

    def kill_by_force(self) -> None:
        """Kill the process and its group, since its guardian may be stopped or killed."""
        if self.pid != self.process.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        """End the process and wait up to `END_S` seconds for that. Further calls do nothing."""
        self._close()


def _close(process: subprocess.Popen[bytes], lifeline: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        if process.poll() is None:
            _kill(process, lifeline)
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _close_fd(lifeline)


def _kill(process: subprocess.Popen[bytes], lifeline: int) -> None:
    with contextlib.suppress(OSError):
        if lifeline >= 0:
            os.write(lifeline, b"x")
        else:
            process.kill()


def _close_fd(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def state(pid: int) -> str:
    """Return Linux's letter for the state of this process: R, S, D, T (stopped), t (traced), Z
    (ended); "" if there is no such process."""
    return (_stat(pid) or [""])[0]


def children(pid: int) -> list[int]:
    """Return the ids of the children of this process that still exist."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # gone, or a kernel without that file
        numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return sorted(number for number in numbers if _stat(number)[1:2] == [str(pid)])
    return [int(word) for word in text.split()]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process's name: state, parent's id ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
