"""The self-test: attacks on a sandbox, which take about a second, before it is trusted with
programs.

Every attack is judged by what it changed outside (a file, a listener, a bystander process, the
process table), or, where that is not possible, by its output. It counts as contained only if its
program also shows that it ran: an attack that never started proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollpacker.sandbox import canaries
from rollpacker.sandbox.sandbox import Limits, RunResult, Sandbox, Status

_LIMITS = Limits(wall_s=5.0, memory_bytes=128 << 20, disk_bytes=8 << 20, output_bytes=64 << 10)
_SHARED_BYTES = 16 << 20
"""Allowance in bytes beyond a run's memory limit: forked processes share about this much with their
interpreter, and it is measured with them."""
_HARMLESS = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "HOME", "PWD", "TERM", "TMPDIR", "SHLVL", "_")
"""Environment variables that programs may see though they exist here: a sandbox may set its own."""


@dataclass(frozen=True, slots=True)
class _Bait:
    """What this machine offers to the attacks, which must not read, change or reach it: files,
    sockets and a process."""

    folder: Path
    secret: str
    bystander: subprocess.Popen[bytes]
    tcp: socket.socket
    abstract: socket.socket
    path: socket.socket
    local: bool
    """Whether the programs run on this machine, so that its process table shows them."""
    mark: str = field(default_factory=lambda: "rp" + secrets.token_hex(5))
    """The name that programs give their processes. The kernel keeps at most 15 characters."""

    @property
    def secret_file(self) -> Path:
        return self.folder / "secret.txt"

    def program(self, body: str) -> str:
        """The program `body` with a line before it that sets the variable `bait`."""
        bait = {
            "folder": str(self.folder),
            "secret_file": str(self.secret_file),
            "home": str(Path.home()),
            "bystander": self.bystander.pid,
            "port": self.tcp.getsockname()[1],
            "abstract": self.abstract.getsockname().decode("latin-1"),
            "path": self.path.getsockname(),
            "mark": self.mark,
        }
        return f"bait = {bait!r}\n{body}"

    def marked(self) -> list[int]:
        """Ids of the processes on this machine whose name is `mark`."""
        found = []
        for comm in (process / "comm" for process in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if comm.read_text().strip() == self.mark:
                    found.append(int(comm.parent.name))
        return found


@contextlib.contextmanager
def _bait(*, local: bool) -> Iterator[_Bait]:
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="rp-"))
        secret = secrets.token_hex(16)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(_listener(f"\0rollpacker-{secret[:8]}"))
        path = stack.enter_context(_listener(f"{name}/socket"))
        for listener in (tcp, abstract, path):
            listener.setblocking(False)
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        bystander = subprocess.Popen(sleep, stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(bystander.wait)
        stack.callback(bystander.kill)
        bait = _Bait(Path(name), secret, bystander, tcp, abstract, path, local)
        bait.secret_file.write_text(secret)
        yield bait


def _listener(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(8)
    return listener


async def self_test(box: Sandbox, *, backend: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run all attacks. Returns the names of those that were contained, and of those that were not.
    `backend`: with "http" the programs run elsewhere, so this machine's process table does not show
    them. Nothing that a sandbox does wrong raises an error."""
    passed: list[str] = []
    failed: list[str] = []
    with _bait(local=backend != "http") as bait:
        for name, canary in _CANARIES.items():
            try:
                contained = await canary(box, bait)
            except Exception:  # whatever a broken backend raises: it has not contained this
                contained = False
            (passed if contained else failed).append(name)
            if name == "runs" and not contained:
                return (), tuple(_CANARIES)
    return tuple(passed), tuple(failed)


async def _run(box: Sandbox, bait: _Bait, body: str, limits: Limits = _LIMITS) -> RunResult:
    """Run the program `body`; up to three times if the sandbox itself fails, as it may on a busy
    machine. Raises `RuntimeError` if it fails each time."""
    for _ in range(3):
        result = await box.run(bait.program(body), files={"own.txt": "own file"}, limits=limits)
        if result.status is not Status.SANDBOX_ERROR:
            return result
    raise RuntimeError(result.detail)


async def _runs(box: Sandbox, bait: _Bait) -> bool:
    result = await _run(box, bait, "print(6 * 7)")
    return result.status is Status.OK and result.stdout == b"42\n"


async def _environment(box: Sandbox, bait: _Bait) -> bool:
    out = (await _run(box, bait, canaries.ENVIRONMENT)).stdout
    ours = [
        os.fsencode(f"{name}={value}")
        for name, value in os.environ.items()
        if name not in _HARMLESS and not name.startswith("PYTHON")
    ]
    return b"looked" in out and not any(entry in out for entry in ours)


async def _host_files(box: Sandbox, bait: _Bait) -> bool:
    out = (await _run(box, bait, canaries.HOST_FILES)).stdout
    passwords = Path("/etc/passwd")
    host = passwords.read_bytes() if passwords.exists() else b""
    leaked = bait.secret.encode() in out or (len(host) > 100 and host in out)
    return b"own file" in out and not leaked


async def _writes(box: Sandbox, bait: _Bait) -> bool:
    before = sorted(bait.folder.iterdir())
    out = (await _run(box, bait, canaries.WRITES)).stdout
    elsewhere = [Path(folder, bait.mark) for folder in ("/", "/tmp", "/usr", Path.home())]
    unchanged = sorted(bait.folder.iterdir()) == before
    return (
        b"wrote its own" in out
        and unchanged
        and bait.secret_file.read_text() == bait.secret
        and not any(path.exists() for path in elsewhere)
    )


async def _network(box: Sandbox, bait: _Bait) -> bool:
    with socket.create_connection(bait.tcp.getsockname()):  # the listener does see connections
        await asyncio.sleep(0)
    if not _was_reached(bait.tcp):
        return False
    out = (await _run(box, bait, canaries.NETWORK)).stdout
    reached = [_was_reached(listener) for listener in (bait.tcp, bait.abstract, bait.path)]
    return b"tried" in out and not any(reached) and b"REACHED" not in out


def _was_reached(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


async def _signals(box: Sandbox, bait: _Bait) -> bool:
    """Let a program send signals to processes outside, and return whether this had no effect. If
    the program was too slow to begin, the attack is repeated with a longer limit."""
    for wall_s in (0.2, 1.0, 4.0):
        result = await _run(box, bait, canaries.SIGNALS, Limits(wall_s=wall_s))
        state = Path(f"/proc/{bait.bystander.pid}/stat")
        stopped = state.exists() and state.read_text().rpartition(")")[2].split()[0] in "Tt"
        if stopped:
            bait.bystander.send_signal(signal.SIGCONT)
        if stopped or bait.bystander.poll() is not None:
            return False
        if b"tried" in result.stdout:
            return await _runs(box, bait)
    return False


async def _left_over(box: Sandbox, bait: _Bait) -> bool:
    """Let a program leave daemons behind; return whether they are gone after its run. The attack is
    repeated with a longer program until the daemons were seen in this machine's process table,
    since else nothing is proved."""
    for stays_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
        seen, contained = await _leave_daemons(box, bait, stays_s)
        if not contained or seen or not bait.local:
            return contained
    return False


async def _leave_daemons(box: Sandbox, bait: _Bait, stays_s: float) -> tuple[bool, bool]:
    """Run the attack of `_left_over` once, with a program that stays for `stays_s` seconds. Returns
    whether its processes were seen meanwhile, and whether all were gone afterwards."""
    body = f"{canaries.DAEMONS}time.sleep({stays_s})\n"
    limits = replace(_LIMITS, wall_s=_LIMITS.wall_s + stays_s)
    running = asyncio.ensure_future(_run(box, bait, body, limits))
    seen = False
    while not running.done():
        await asyncio.wait([running], timeout=0.02)
        seen = seen or bool(bait.marked())
    out = (await running).stdout
    gone_by = time.monotonic() + 2.0
    while (left := bait.marked()) and time.monotonic() < gone_by:
        await asyncio.sleep(0.02)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return seen, b"tried" in out and not left


async def _memory(box: Sandbox, bait: _Bait) -> bool:
    result = await _run(box, bait, canaries.MEMORY)
    small, large = b"small one" in result.stdout, b"large one" in result.stdout
    return small and not large and result.status is not Status.OK


async def _memory_of_children(box: Sandbox, bait: _Bait) -> bool:
    """Start processes that together use more memory than a run may. Returns whether the sandbox
    prevented that, by refusing to fork or by a limit on all of them together."""
    limits = Limits(wall_s=1.0, memory_bytes=128 << 20)
    running = asyncio.ensure_future(_run(box, bait, canaries.CHILDREN, limits))
    most = 0
    while not running.done():
        await asyncio.wait([running], timeout=0.02)
        most = max(most, sum(map(_private_bytes, bait.marked())))
    out = (await running).stdout
    return b"tried" in out and most <= 1.1 * limits.memory_bytes + _SHARED_BYTES


def _private_bytes(pid: int) -> int:
    """Resident memory of a process that does not belong to files, in bytes. Memory that processes
    share is divided between them."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        shares = [line.split() for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem"))]
        return sum(int(words[1]) << 10 for words in shares)
    return 0


async def _disk(box: Sandbox, bait: _Bait) -> bool:
    out = (await _run(box, bait, canaries.DISK)).stdout
    words = out.split()
    return words[:1] == [b"wrote"] and 0 < int(words[1]) <= 1.1 * _LIMITS.disk_bytes


async def _output(box: Sandbox, bait: _Bait) -> bool:
    result = await _run(box, bait, canaries.OUTPUT)
    kept = len(result.stdout)
    return result.status is Status.OUTPUT and 0 < kept <= _LIMITS.output_bytes


async def _endless(box: Sandbox, bait: _Bait) -> bool:
    for _ in range(3):  # a busy machine may be slow to begin
        began = time.monotonic()
        result = await _run(box, bait, canaries.ENDLESS, Limits(wall_s=0.2))
        if result.status is not Status.TIMEOUT:
            return False
        if time.monotonic() - began < 2.0:
            return True
    return False


async def _descriptors(box: Sandbox, bait: _Bait) -> bool:
    """Let a program look for open descriptors. Returns whether it found only the standard three."""
    out = (await _run(box, bait, canaries.DESCRIPTORS)).stdout
    return out == b"looked\n"


async def _kernel(box: Sandbox, bait: _Bait) -> bool:
    """Let a program make system calls that the filter refuses: new namespaces, ptrace and a dozen
    more. Returns whether all failed and the program had no capabilities."""
    out = (await _run(box, bait, canaries.KERNEL)).stdout
    return b"getpid works" in out and b"looked" in out and b"ALLOWED" not in out


async def _next_run(box: Sandbox, bait: _Bait) -> bool:
    """Let a program spoil its interpreter and folder. Returns whether the next is unaffected."""
    await _run(box, bait, canaries.POISON)
    result = await _run(box, bait, canaries.AFTER_POISON)
    return result.status is Status.OK and result.stdout == b'{"sum": 6} clean\n'


_Canary = Callable[[Sandbox, _Bait], Awaitable[bool]]
_CANARIES: dict[str, _Canary] = {
    "runs": _runs,
    "environment": _environment,
    "host files": _host_files,
    "writes": _writes,
    "network": _network,
    "signals": _signals,
    "left over": _left_over,
    "memory": _memory,
    "memory of children": _memory_of_children,
    "disk": _disk,
    "output": _output,
    "endless": _endless,
    "descriptors": _descriptors,
    "kernel": _kernel,
    "next run": _next_run,
}

ESSENTIAL = frozenset(_CANARIES)
"""Attacks that a sandbox on this machine must contain to be used, which are all of them."""
