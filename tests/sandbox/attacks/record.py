"""What an attack is, and the lines that stand before its program."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.sandbox.sandbox import Limits, Status
from tests.sandbox.attacks.numbers import NUMBERS

MIB = 1 << 20
LIMITS = Limits(wall_s=3.0, memory_bytes=160 * MIB, output_bytes=128 << 10, disk_bytes=8 * MIB)
SHORT = Limits(wall_s=0.2, memory_bytes=160 * MIB, output_bytes=128 << 10, disk_bytes=8 * MIB)

OK = frozenset({Status.OK})
STOPPED = frozenset({Status.TIMEOUT})
ANY_END = frozenset(Status) - {Status.SANDBOX_ERROR}
"""However it ended, it was the program that ended."""
REFUSED = ANY_END - {Status.OK}


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One program that tries something. Unless it says otherwise, it must end by itself, normally,
    having come to its last line; and whatever it does, nothing of the bait may change or leak, no
    process may be left, and an honest program must then work in the same box."""

    name: str
    escape: str
    """What would count as one, beside the above."""
    program: str
    statuses: frozenset[Status] = OK
    stdin: str | bytes = b""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    limits: Limits = LIMITS
    prints: bytes | None = None
    """Must be in its output: the probe came as far as this."""
    never: tuple[bytes, ...] = ()
    """Must not be in its output."""
    then: str | None = None
    """A program for the same box afterwards; it must print `then_prints` and nothing else."""
    then_prints: bytes = b"clean\n"
    raw: bool = False
    """The program as it stands, with nothing before and after."""
    refused: bool = False
    """The box must refuse it (`ValueError`) before anything runs."""
    raises: bool = False
    """A NameError or the like is meant. Otherwise it shows that the probe is broken."""
    memory: bool = False
    """Watch its memory from outside."""
    bare: bool = False
    """Harmless enough to be run without any sandbox, where it must be seen to escape."""

    def text(self, bait: Mapping[str, object]) -> str:
        if self.raw:
            return self.program
        last = '\nprint("finished", flush=True)\n' if self.statuses == OK else ""
        return prelude(self.program, bait) + self.program + last


def prelude(program: str, bait: Mapping[str, object]) -> str:
    """Bait and functions for the program; those for system calls only if it makes any."""
    text = f"bait = {dict(bait)!r}\n{_BASE}"
    if "call(" in program or "refuse(" in program:
        text += f"numbers = {NUMBERS.get(platform.machine(), {})!r}\n{_CALLS}"
    return text


def sections(text: str) -> list[tuple[str, str]]:
    """Names and programs of a text in which `## name` stands above each program."""
    parts = ("\n" + text).split("\n## ")[1:]
    return [(name, program) for name, _, program in (part.partition("\n") for part in parts)]


_BASE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(15, bait["mark"].encode())  # the name of this process and its children
print("started", flush=True)

def attempt(function, *arguments, **more):
    "Its result (True for None), or None if it failed."
    try:
        result = function(*arguments, **more)
        return True if result is None else result
    except Exception:
        return None

def escaped(what):
    print("ESCAPED", what, flush=True)

def show(path, size=65536):
    "Print what can be read of a file."
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return
    try:
        os.write(1, os.read(fd, size))
    except OSError:
        pass
    os.close(fd)
"""

_CALLS = """
def call(name, *arguments):
    "A system call by name: its result and errno."
    ctypes.set_errno(0)
    libc.syscall.restype = ctypes.c_long
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return libc.syscall(ctypes.c_long(numbers[name]), *plain), ctypes.get_errno()

assert call("getpid")[0] == os.getpid()

def refuse(name, *arguments):
    "It must fail with EPERM or ENOSYS: not because of its arguments, but as such."
    if name not in numbers:
        return print("this architecture has no", name)
    result, error = call(name, *arguments)
    if result != -1 or error not in (1, 38):
        escaped(f"{name}: result {result}, errno {error}")
"""
