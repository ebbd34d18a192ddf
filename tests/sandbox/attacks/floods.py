"""More output or more files than a run may have, or in other places."""

from __future__ import annotations

from rollpacker.sandbox.sandbox import Limits, Status
from tests.sandbox.attacks.record import ANY_END, MIB, Attack, sections

_FLOOD = Limits(wall_s=2.0, memory_bytes=128 * MIB, output_bytes=64 << 10)
_DISK = Limits(wall_s=2.0, memory_bytes=256 * MIB, disk_bytes=8 * MIB, max_files=256)
TOO_MUCH = frozenset({Status.OUTPUT})


def _flood(name: str, program: str, *, raw: bool = False) -> Attack:
    return Attack(
        name=f"output: {name}",
        escape="more is kept than may be, or it is not ended",
        program=program,
        statuses=TOO_MUCH,
        limits=_FLOOD,
        raw=raw,
    )


def _disk(name: str, program: str) -> Attack:
    """Prints `held N`, the bytes that it could keep; see also what the folder says from outside."""
    return Attack(
        name=f"disk: {name}",
        escape="more bytes or files than the limits and a tenth",
        program="held = files = 0\n" + program + "\nprint('held', held, 'files', files)\n"
        f"if held > {_DISK.disk_bytes} * 1.1 or files > {_DISK.max_files} * 1.1 + 16:\n"
        "    escaped(f'{held} bytes, {files} files')",
        limits=_DISK,
        memory=True,
    )


_FOLDERS = "for folder in ('.', '/tmp', '/var/tmp', '/dev/shm', '/run', '/dev/mqueue', '/'):\n    "

_FLOOD_PROGRAMS = r"""
## print
while True:
    print('x' * 100)

## one line
while True:
    os.write(1, b'x' * 65536)

## errors
while True:
    os.write(2, b'x' * 65536)

## both
while True:
    os.write(1, b'x' * 1000)
    os.write(2, b'y' * 1000)

## 5 GB at once
while True:
    os.write(1, bytes(16 << 20))

## tiny writes
for _ in range(10**6):
    os.write(1, b'x')

## zeros
while True:
    os.write(1, bytes(4096))

## just one byte more
os.write(1, b'x' * (65536 + 1))
os._exit(0)

## in the end
import atexit
atexit.register(os.write, 1, bytes(65536))

## threads
import threading
def flood():
    while True:
        os.write(1, b"x" * 1000)
for _ in range(4):
    attempt(threading.Thread(target=flood).start)
flood()

## through /dev/stdout
file = attempt(open, '/proc/self/fd/1', 'wb', 0) or os.fdopen(os.dup(1), 'wb', 0)
while True:
    file.write(b'x' * 4096)

## an exception's text
raise Exception('x' * 10**7)

## an exit message
sys.exit('x' * 10**7)

## a deep traceback
def f(n):
    return g(n)
def g(n):
    return f(n)
sys.setrecursionlimit(5000)
sys.tracebacklimit = 5000
f(0)

## warnings
import warnings
warnings.simplefilter('always')
while True:
    warnings.warn('x' * 100)
"""

_OUTPUT_ATTACKS = (
    *(_flood(name, program) for name, program in sections(_FLOOD_PROGRAMS)),
    Attack(
        name="output: on descriptors 3 to 63",
        escape="a trusted process reads it",
        program="""
for fd in range(3, 64):
    attempt(os.write, fd, b'{"status": "ok", "exit_code": 0, "stdout": "forged"}\\n' * 1000)
    attempt(os.write, fd, b"rp1e" + bytes(200))
    attempt(os.close, fd)
""",
        never=(b"forged",),
    ),
    Attack(
        name="output: with 1 closed",
        escape="the box fails or waits",
        program="os.close(1)\nos.close(2)\nos.close(0)\nos._exit(0)",
        statuses=ANY_END,
    ),
    Attack(
        name="output: 1 is another file",
        escape="the box fails or waits",
        program="os.dup2(os.open('f', os.O_WRONLY | os.O_CREAT), 1)\nos._exit(0)",
        statuses=ANY_END,
    ),
    Attack(
        name="output: settings of the pipe",
        escape="the box waits for ever, or is signalled",
        program="""
import fcntl
for fd in (0, 1, 2):
    for command, value in ((4, os.O_NONBLOCK | os.O_ASYNC), (8, bait["host_pid"]), (1031, 4096),
                           (10, 9), (4, os.O_APPEND), (4, os.O_DIRECT)):
        attempt(fcntl.fcntl, fd, command, value)
for fd in (0, 1, 2):
    attempt(os.set_blocking, fd, True)
""",
    ),
    Attack(
        name="output: read it back",
        escape="the program reads what the box was to read",
        program="""
os.set_blocking(1, False)
for fd in (1, 2):
    if attempt(os.read, fd, 10):
        escaped("read")
    for name in (f"/proc/self/fd/{fd}", f"/dev/fd/{fd}"):
        other = attempt(os.open, name, os.O_RDONLY | os.O_NONBLOCK)
        if other and attempt(os.read, other, 10):
            escaped("read")
os.set_blocking(1, True)
""",
    ),
    Attack(
        name="output: to terminals",
        escape="text on somebody's terminal",
        program="""
import glob
for name in ["/dev/tty", "/dev/console", "/dev/tty0", "/dev/ptmx", *glob.glob("/dev/pts/*")]:
    if attempt(lambda: os.write(os.open(name, os.O_WRONLY | os.O_NONBLOCK), b"owned")):
        escaped(name)
""",
    ),
    Attack(
        name="output: bytes that are no text",
        escape="the box fails on them",
        program=r"""
os.write(1, b"\xff\xfe\xc3\x28\x00\x1b]0;owned\x07\x1b[2J\xe2\x80\xae\xed\xa0\x80\r\x08")
os.write(2, bytes(range(256)))
""",
        prints=b"\xff\xfe\xc3\x28\x00",
    ),
    Attack(
        name="output: surrogates",
        escape="the box fails on them",
        program=r"""
try:
    print("\ud800\udfff")
except UnicodeEncodeError:
    pass
sys.stdout.reconfigure(errors="surrogatepass")
print("\ud800", flush=True)
""",
    ),
    Attack(
        name="output: exactly as much as may be",
        escape="it is ended although it may",
        program=f"import os\nos.write(1, b'x' * {_FLOOD.output_bytes})",
        limits=_FLOOD,
        raw=True,
        prints=b"x" * _FLOOD.output_bytes,
    ),
)

_DISK_ATTACKS = (
    _disk(
        "fill",
        _FOLDERS
        + """try:
        with open(os.path.join(folder, "fill"), "ab", buffering=0) as file:
            for _ in range(32):
                held += file.write(bytes(1 << 20))
    except OSError:
        pass
""",
    ),
    _disk(
        "many files",
        _FOLDERS
        + """try:
        for i in range(20000):
            with open(os.path.join(folder, str(i)), "xb") as file:
                held += file.write(b"x")
            files += 1
    except OSError:
        pass
""",
    ),
    _disk(
        "a sparse file",
        """
file = open("sparse", "wb", buffering=0)
attempt(file.truncate, 1 << 40)
attempt(os.posix_fallocate, file.fileno(), 0, 1 << 30)
attempt(os.pwrite, file.fileno(), b"x", 1 << 40)
held = os.fstat(file.fileno()).st_blocks * 512
""",
    ),
    _disk(
        "deep folders",
        """
try:
    for files in range(100000):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
except OSError:
    pass
""",
    ),
    _disk(
        "links",
        """
open("one", "w").close()
try:
    for i in range(100000):
        os.symlink("x" * 200, f"s{i}")
        files += 1
except OSError:
    pass
""",
    ),
    _disk(
        "hard links",
        """
open("one", "w").close()
try:
    for files in range(20000):
        os.link("one", f"l{files}")
except OSError:
    pass
""",
    ),
    _disk(
        "long names",
        """
try:
    for files in range(100000):
        open(f"{files:0255}", "w").close()
except OSError:
    pass
""",
    ),
    _disk(
        "extended attributes",
        """
open("one", "w").close()
for i in range(2000):
    if attempt(os.setxattr, "one", f"user.{i}", bytes(60000)):
        held += 60000
""",
    ),
)

ATTACKS = (*_OUTPUT_ATTACKS, *_DISK_ATTACKS)
