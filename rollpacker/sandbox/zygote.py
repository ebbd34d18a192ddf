"""The zygote: a process INSIDE bubblewrap that forks one interpreter per run. Imports only the
standard library and ctypes.

This module is given into the sandbox compiled, with the modules that it imports (`MODULES`). The
zygote talks to the pool over one socket in frames of known length: a `START` with the system call
filter, then per run one `REQUEST`, whose payload only the run itself reads, and one `REPLY`.

    zygote -- clone --> init: pid 1 of the run's own process namespace, sleeps; killing it ends
       |                      everything that the run has started
       +------ fork --> run: waits with its own mounts for the next request, gives up every right,
                             executes the program; or, for a cold profile, becomes a new
                             interpreter that does

The process for the next run is forked in advance, before its request has come.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no stub of it
import mmap
import os
import select
import struct
import sys
import time

from rollpacker.sandbox.kernel import CLONE_NEWIPC, CLONE_NEWNS, CLONE_NEWPID, Kernel
from rollpacker.sandbox.program import add_exit, run_program

MAGIC = b"rp1"
START = struct.Struct("<3sI")
"""First message to a zygote: magic bytes, and the size of the system call filter that follows."""
REQUEST = struct.Struct("<3scQddQQQQQ")
"""A request: magic bytes, b"r" (run) or b"c" (cancel), id of the run, wall_s, cpu_s, memory, output
and disk bytes, number of files, number of bytes of the payload that follows."""
REPLY = struct.Struct("<3scQiiddQII")
"""A reply: magic bytes, one of `ENDED...`, id of the run, exit code, signal, wall_s, cpu_s, peak
memory, numbers of bytes of stdout and of stderr that follow."""
LENGTH = struct.Struct("<Q")
READY = b"k"
ENDED, TIMED_OUT, FLOODED, CANCELLED, BROKEN = b"e", b"t", b"f", b"c", b"b"
TEMP, WORK, SITE, OWN = "/tmp", "/tmp/work", "/site", "/sandbox"
"""Folders inside the sandbox: the only writable one, a run's working folder in it, a profile's
packages, and our own files."""
MODULES = ("kernel", "program", "zygote")
"""Modules of this package that run inside bubblewrap, where they lie in the folder `OWN`."""
PROGRAM = f"{OWN}/rollpacker/sandbox/program.pyc"
FLAGS = ("-ISB", "-X", "utf8")
"""Command-line flags of every interpreter in the sandbox."""
START_CODE = (
    f"import sys; sys.path.append({OWN!r}); from rollpacker.sandbox.zygote import main; main()"
)
"""Code that starts the zygote. Its arguments: the profile's name, "cold" or "warm" (start an
interpreter for each run, or fork one), the modules to import, separated by commas, the descriptor
of the socket, and those through which runs enter their control groups."""
MAX_TASKS = 128
_CHUNK, _LARGE = 1 << 16, 1 << 20

_COLD_ADDRESS_SPACE = 40 << 20
"""Bytes of address space that a new interpreter has mapped, with some reserve."""
_STACK = 64 << 20
"""Most bytes of the first thread's stack."""

_SIGINT, _SIGKILL, _SIGXCPU = 2, 9, 24


def receive_exactly(fd: int, size: int) -> bytes:
    """Read exactly `size` bytes from the descriptor `fd`. Raises `EOFError` if it ends before."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, min(size - len(parts), _LARGE))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def send_all(fd: int, data: bytes | memoryview) -> None:
    view, sent = memoryview(data), 0
    while sent < len(view):
        with view[sent:] as rest:
            sent += os.write(fd, rest)
    view.release()


class Kept:
    """A buffer for bytes of a run that pass through the zygote. It is a memory mapping of its own,
    as the next run is forked from this process, whose memory must keep nothing of this run."""

    def __init__(self, most: int) -> None:
        self._size = 0
        self._mapping = mmap.mmap(-1, most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __len__(self) -> int:
        return self._size

    def add(self, fd: int, most: int) -> int:
        """Read once from `fd`, at most `most` bytes. Returns the number of bytes read."""
        with memoryview(self._mapping) as whole, whole[self._size : self._size + most] as free:
            size = os.readv(fd, [free])
        self._size += size
        return size

    def send(self, fd: int, size: int) -> None:
        with memoryview(self._mapping) as whole, whole[:size] as part:
            send_all(fd, part)

    def clear(self) -> None:
        self._size = 0

    def close(self) -> None:
        self._mapping.close()


class PreparedRun:
    """One run: a process made in advance, given its program, and watched until it ends."""

    def __init__(self, kernel: Kernel, own_pidfd: int) -> None:
        """Forks. In the child `is_child` is True; `request` and `ready` are its ends of the pipes.
        `own_pidfd`: descriptor of this process, to return to its namespace."""
        child_request, self.request = os.pipe()
        self.ready, child_ready = os.pipe()
        self._stdout, child_stdout = os.pipe()
        self._stderr, child_stderr = os.pipe()
        self.pid = self._fork_into_namespace(kernel, own_pidfd)
        self.is_child = self.pid == 0
        if self.is_child:
            os.close(self.request)
            self.request, self.ready = child_request, child_ready
            os.dup2(child_stdout, 1)
            os.dup2(child_stderr, 2)
            return
        for fd in (child_request, child_ready, child_stdout, child_stderr):
            os.close(fd)
        self._pidfd = os.pidfd_open(self.pid)
        for fd in (self.ready, self._stdout, self._stderr):
            os.set_blocking(fd, False)

    def _fork_into_namespace(self, kernel: Kernel, own_pidfd: int) -> int:
        self.init = kernel.sleeping_init()
        pidfd = os.pidfd_open(self.init)
        kernel.call("setns", pidfd, CLONE_NEWPID)
        pid = os.fork()
        if pid:
            kernel.call("setns", own_pidfd, CLONE_NEWPID)
            os.close(pidfd)
        return pid

    def watch(self, control: int, wall_s: float, cpu_s: float, cap: int) -> bytes:
        """Wait until the run ends or must be ended: by a message on `control`, one of its limits in
        seconds, or output of over `cap` bytes. Returns how it ended (`ENDED...`); exit code, times
        and output are in fields of this object."""
        began = time.monotonic()
        self.output = {fd: Kept(cap + _CHUNK) for fd in (self._stdout, self._stderr)}
        how = self._follow(control, began + wall_s, cap)
        if how is not ENDED:
            self._end_everything()
        _, status, usage = os.wait4(self.pid, 0)
        self.wall_s = time.monotonic() - began
        if how is ENDED and not self._drain(cap):
            self._end_everything()
            self._drain(cap)
        if how is ENDED and any(len(kept) > cap for kept in self.output.values()):
            how = FLOODED
        self.exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        self.signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.peak_bytes = usage.ru_maxrss << 10
        used_up = self.signal == _SIGKILL and self.cpu_s > 0.9 * cpu_s
        if how is ENDED and (used_up or self.signal == _SIGXCPU):
            how = TIMED_OUT
        return how if how is CANCELLED or self._was_ready() else BROKEN

    def _follow(self, control: int, until: float, cap: int) -> bytes:
        poll = select.poll()
        for fd in (self._pidfd, control, *self.output):
            poll.register(fd, select.POLLIN)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return TIMED_OUT
            for fd, _ in poll.poll(left * 1000 + 1):
                if fd == self._pidfd:
                    return ENDED
                if fd == control:
                    return CANCELLED
                if not self._read(fd):
                    poll.unregister(fd)
                elif len(self.output[fd]) > cap:
                    return FLOODED

    def _read(self, fd: int) -> bool:
        """Read one chunk of the program's output from `fd`. Returns whether there may be more."""
        return self.output[fd].add(fd, _CHUNK) > 0

    def _drain(self, cap: int) -> bool:
        """Read output to its end, or beyond `cap` bytes. Returns whether both pipes are closed."""
        closed = 0
        for fd, kept in self.output.items():
            try:
                while len(kept) <= cap and self._read(fd):
                    pass
            except BlockingIOError:
                continue
            closed += 1
        return closed == len(self.output)

    def _was_ready(self) -> bool:
        try:
            return os.read(self.ready, 1) == READY
        except BlockingIOError:
            return False

    def has_ended(self) -> bool:
        """Whether the run has ended while it waited for its request."""
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def _end_everything(self) -> None:
        os.kill(self.init, _SIGKILL)

    def reply(self, control: int, how: bytes, run_id: int, cap: int) -> None:
        sizes = [min(len(kept), cap + 1) for kept in self.output.values()]
        header = REPLY.pack(
            MAGIC,
            how,
            run_id,
            self.exit_code,
            self.signal,
            self.wall_s,
            self.cpu_s,
            self.peak_bytes,
            *sizes,
        )
        send_all(control, header)
        for kept, size in zip(self.output.values(), sizes, strict=True):
            kept.send(control, size)
            kept.close()

    def close(self) -> None:
        self._end_everything()
        os.waitpid(self.init, 0)
        for fd in (self._pidfd, self.request, self.ready, self._stdout, self._stderr):
            os.close(fd)


def serve(kernel: Kernel, control: int) -> tuple[PreparedRun, bytes] | None:
    """Serve the requests on the socket `control` until it closes, then return None. Every run is a
    fork of this process, in which the call returns its `PreparedRun` and the system call filter."""
    magic, size = START.unpack(receive_exactly(control, START.size))
    assert magic == MAGIC
    program = receive_exactly(control, size)
    own_pidfd = os.pidfd_open(os.getpid())
    send_all(control, REPLY.pack(MAGIC, ENDED, 0, 0, 0, 0.0, 0.0, 0, 0, 0))
    while True:
        run = PreparedRun(kernel, own_pidfd)
        if run.is_child:
            return run, program
        header = _next_request(control)
        while header and run.has_ended():  # for memory that was still counted for the one before
            run.close()
            run = PreparedRun(kernel, own_pidfd)
            if run.is_child:
                return run, program
        if not header or not _serve_one(run, control, header):
            return None
        run.close()


def _next_request(control: int) -> bytes:
    """The header of the next request; empty if the socket was closed."""
    while True:
        try:
            header = receive_exactly(control, REQUEST.size)
        except EOFError:
            return b""
        magic, kind, *_ = REQUEST.unpack(header)
        assert magic == MAGIC
        if kind == b"r":  # not: cancel a run that had ended by itself
            return header


def _serve_one(run: PreparedRun, control: int, header: bytes) -> bool:
    """Pass a request on to `run`, wait for its end and reply. False: `control` was closed."""
    _, _, run_id, wall_s, cpu_s, _, cap, *_, size = REQUEST.unpack(header)
    send_all(run.request, header)
    if not _hand_over(control, run.request, size):
        return False
    how = run.watch(control, wall_s, cpu_s, cap)
    run.reply(control, how, run_id, cap)
    return True


def _hand_over(source: int, target: int, size: int) -> bool:
    """Pass `size` bytes of a request on to a prepared run. Returns False if there are fewer."""
    passing = Kept(_LARGE)
    while size:
        part = passing.add(source, min(size, _LARGE))
        if not part:
            return False
        passing.send(target, part)
        passing.clear()
        size -= part
    passing.close()
    return True


class Request:
    """A request, as the process forked for a run reads it."""

    def __init__(self, source: int) -> None:
        header = REQUEST.unpack(receive_exactly(source, REQUEST.size))
        _, _, _, self.wall_s, self.cpu_s, self.memory, _, self.disk, self.max_files, _ = header
        self.program = self._field(source)
        self.stdin = self._field(source)
        (count,) = LENGTH.unpack(receive_exactly(source, LENGTH.size))
        self.files = [(self._field(source), self._field(source)) for _ in range(count)]

    @staticmethod
    def _field(source: int) -> bytes:
        (size,) = LENGTH.unpack(receive_exactly(source, LENGTH.size))
        return receive_exactly(source, size)


def prepare(
    kernel: Kernel,
    run: PreparedRun,
    entrances: list[int],
    program: bytes,
    base_bytes: int,
    *,
    cold: bool,
) -> bytes:
    """Take this process, forked for a run, into the run's control groups (`entrances`), limits and
    folder, and drop its rights. `base_bytes`: address space in use before. Returns the
    model-written program; `cold`: executes it in a new interpreter, and never returns."""
    os.setsid()
    for group in entrances:
        os.write(group, b"0")
    kernel.call("unshare", CLONE_NEWNS | CLONE_NEWIPC)
    request = Request(run.request)
    kernel.mount_tmpfs(TEMP, request.disk, request.max_files)
    kernel.give_up_rights()
    os.mkdir(WORK)
    os.chdir(WORK)
    for name, data in request.files:
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "xb") as file:
            file.write(data)
    _standard_input(request.stdin)
    os.dup2(run.ready, 3)
    os.set_inheritable(3, cold)
    os.closerange(4, 1 << 16)
    source = _program_file(request.program) if cold else -1
    _limit(request, base_bytes)
    kernel.filter_system_calls(program)
    if cold:
        arguments = [sys.executable, *FLAGS, PROGRAM, str(source), "3"]
        os.execve(sys.executable, arguments, {**os.environ, "MALLOC_ARENA_MAX": "1"})
    os.write(3, READY)
    os.close(3)
    return request.program


def _program_file(program: bytes) -> int:
    fd = os.memfd_create("program", 0)
    send_all(fd, program)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _standard_input(data: bytes) -> None:
    """Make these bytes the standard input, as a file in memory that cannot be changed."""
    if not data:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        return
    import fcntl

    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    send_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    every_seal = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, every_seal)
    os.dup2(fd, 0)


def _limit(request: Request, base_bytes: int) -> None:
    import math
    import resource

    cpu = math.ceil(request.cpu_s)
    stack = max(1 << 20, min(_STACK, request.memory))
    for which, soft, hard in (
        (resource.RLIMIT_AS, base_bytes + request.memory, base_bytes + request.memory),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, request.disk, request.disk),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_NPROC, MAX_TASKS, MAX_TASKS),
        (resource.RLIMIT_STACK, stack, stack),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(which, (soft, hard))


def address_space() -> int:
    """Bytes of address space that this process has mapped. With less it could map no more."""
    import mmap
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 34
    while high - low > _CHUNK:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except (OSError, MemoryError):
            low = middle
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return high


def main() -> None:
    """Serve requests until the socket closes. In a run's process, execute its program."""
    import gc

    _, _, kind, modules, control, *entrances = sys.argv
    os.environ.clear()
    os.environ.update(HOME=WORK, TMPDIR=TEMP, LANG="C.UTF-8", PATH="/usr/bin:/bin")
    # The sleeping first process of a run shares this one's memory: a handler that its program could
    # call in it, by a signal, would run on this process's state.
    _signal.signal(_SIGINT, _signal.SIG_DFL)
    kernel = Kernel()
    _forget_own_modules()
    add_exit()
    sys.path.append(SITE)
    for name in modules.split(","):
        __import__(name)
    cold = kind == "cold"
    base_bytes = _COLD_ADDRESS_SPACE if cold else address_space()
    gc.collect()
    gc.freeze()  # copies then touch fewer pages
    got = serve(kernel, int(control))
    if got is None:
        os._exit(0)  # what still runs ends with the sandbox's own process namespace
    run, call_filter = got
    groups = [int(number) for number in entrances]
    run_program(prepare(kernel, run, groups, call_filter, base_bytes, cold=cold))


def _forget_own_modules() -> None:
    """Remove our own modules: programs cannot import them, nor see that they were imported."""
    sys.path.remove(OWN)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollpacker"]:
        del sys.modules[name]
    for path in [path for path in sys.path_importer_cache if path.startswith(OWN)]:
        del sys.path_importer_cache[path]
