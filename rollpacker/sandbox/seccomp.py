"""The system call filter of sandboxed programs, as classic BPF. Needs no library.

It is an allow-list of the calls that CPython with its standard library, threads and scientific
packages uses. All else fails with EPERM: sockets (but for a stream pair, which asyncio needs),
namespaces, mounts, ptrace, io_uring, keys, BPF, perf, userfaultfd, System V and POSIX IPC, memory
files, further filters. A call through another architecture's table (32 bit) ends the program.

Some calls are refused for the sake of limits, not of the kernel: System V IPC, message queues,
memory files and larger pipe buffers hold memory that no process limit counts; inotify instances
are counted per user of the host.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.sandbox.syscalls import ABSENT, CHECKED, FORK, HIGHEST, PLAIN, SESSION

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_EPERM = _ERRNO | errno.EPERM
_ENOSYS = _ERRNO | errno.ENOSYS

_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
"""Byte offsets of fields in the kernel's `struct seccomp_data`."""
_LOAD, _EQUAL, _GREATER, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
"""Codes of the filter's instructions, from `linux/bpf_common.h`."""

_CLONE_THREAD = 0x00010000
_CLONE_REFUSED = 0x7E02_A000
"""Flags of clone that are refused: all namespaces, CLONE_PARENT (which makes a child of the
sandbox's own process), CLONE_PTRACE."""


@dataclass(frozen=True, slots=True)
class _Check:
    """A condition on a system call's argument: 32 bits of it, masked, are one of `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    high: bool = False
    """True: the argument's upper 32 bits are checked. The kernel ignores these if it is an int."""

    def code(self) -> list[bytes]:
        """The filter's instructions for this check. If the condition does not hold they return
        EPERM; otherwise the next instruction follows."""
        code = [_instruction(_LOAD, _ARGUMENTS_AT + 8 * self.argument + 4 * self.high)]
        if self.mask != 0xFFFFFFFF:
            code.append(_instruction(_AND, self.mask))
        for i, value in enumerate(self.values):
            code.append(_instruction(_EQUAL, value, if_true=len(self.values) - i))
        code.append(_instruction(_RETURN, _EPERM))
        return code


def _without_bits(argument: int, mask: int) -> _Check:
    return _Check(argument, (0,), mask)


_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Commands of fcntl that are allowed: duplicate, flags, locks, size of a pipe. Not: owner and
signal, leases, larger pipes."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Requests of ioctl that are allowed: TCGETS and TIOCGWINSZ (is it a terminal?), FIONREAD, FIONBIO,
FIONCLEX, FIOCLEX. Not: TIOCSTI."""
_PRCTL = (2, 3, 7, 15, 16, 21, 23, 27, 29, 30, 39, 0x53564D41)
"""Options of prctl that are allowed: queries, thread name, timer slack, names of memory areas."""
_ARCH_PRCTL = (0x1002, 0x1003, 0x3001)
"""Options of arch_prctl that are allowed: set and get the thread's base register, state of shadow
stacks."""

_CHECKS: Mapping[str, tuple[_Check, ...]] = {
    "arch_prctl": (_Check(0, _ARCH_PRCTL),),
    "clone": (_without_bits(0, _CLONE_REFUSED),),
    "fcntl": (_Check(1, _FCNTL),),
    "ioctl": (_Check(1, _IOCTL),),
    # Named pipes only, no devices.
    "mknod": (_Check(1, (0o010000,), 0o170000),),
    "mknodat": (_Check(2, (0o010000,), 0o170000),),
    "personality": (_Check(0, (0xFFFFFFFF,)),),  # the query
    "prctl": (_Check(0, _PRCTL),),
    "prlimit64": (_Check(0, (0,)),),  # of the caller itself
    # AF_UNIX, SOCK_STREAM: it has two ends and can reach nothing else.
    "socketpair": (_Check(0, (1,)), _Check(1, (1,), 0xF)),
    # Connected, and without out-of-band data, whose handling in the kernel had exploitable bugs.
    "recvfrom": (_without_bits(3, 0x1),),
    "sendto": (_without_bits(3, 0x1), _Check(4, (0,)), _Check(4, (0,), high=True)),
}


def program(*, fork: bool, sessions: bool = True, architecture: str | None = None) -> bytes:
    """Return the system call filter as an array of `struct sock_filter`, for `bwrap --seccomp` or
    prctl.

    `fork`: whether processes can be started (threads always can). `sessions`: whether a process can
    leave its session. `architecture`: x86_64 or aarch64; None: this machine's. Raises `ValueError`
    for other architectures.
    """
    architecture = architecture or platform.machine()
    if architecture not in _AUDIT_ARCH:
        known = ", ".join(_AUDIT_ARCH)
        raise ValueError(f"no system call filter for {architecture}; there is one for {known}")
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, _AUDIT_ARCH[architecture], if_true=1),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER_AT),
        # Among these are x86_64's x32 calls, which start at 0x40000000.
        _instruction(_GREATER, HIGHEST, if_false=1),
        _instruction(_RETURN, _ENOSYS),
    ]
    for name, number in CHECKED[architecture].items():
        checks = _CHECKS[name]
        if name == "clone" and not fork:
            checks = (*checks, _Check(0, (_CLONE_THREAD,), _CLONE_THREAD))
        verdict = [_instruction(_RETURN, _ALLOW)]
        code += _if_call(number, [part for check in checks for part in check.code()] + verdict)
    for number in ABSENT[architecture].values():
        code += _if_call(number, [_instruction(_RETURN, _ENOSYS)])
    tables = [PLAIN, *([FORK] if fork else []), *([SESSION] if sessions else [])]
    for number in sorted(number for table in tables for number in table[architecture].values()):
        code += _if_call(number, [_instruction(_RETURN, _ALLOW)])
    code.append(_instruction(_RETURN, _EPERM))
    return b"".join(code)


def _if_call(number: int, body: list[bytes]) -> list[bytes]:
    """Return instructions that execute `body` for the system call with this number; `body` must end
    with a verdict. Other calls go on after `body`, their number still loaded."""
    return [_instruction(_EQUAL, number, if_false=len(body)), *body]


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter` as bytes; both architectures are little endian. `if_true` and
    `if_false`: numbers of instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
