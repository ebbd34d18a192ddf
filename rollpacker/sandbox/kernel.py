"""System calls that Python has no function for, for `zygote.py`. Runs inside bubblewrap; uses only
the standard library and ctypes."""

from __future__ import annotations

import os
import struct

NOBODY = 65534
"""Number of the user and group of every program inside bubblewrap."""
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x08000000, 0x20000000

_CLONE_VM, _CLONE_FILES = 0x100, 0x400
_SIGKILL, _SIGCHLD = 9, 17
_MS_NOSUID, _MS_NODEV = 2, 4
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 22, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_CAP_SETGID, _CAP_SETUID, _CAP_SETPCAP, _CAP_SYS_ADMIN = 6, 7, 8, 21


class Kernel:
    """Makes system calls that Python has no function for. Its methods raise OSError."""

    def __init__(self) -> None:
        import ctypes

        self._ctypes = ctypes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._init_stack = ctypes.create_string_buffer(1 << 16)

    def call(self, name: str, *arguments: object) -> int:
        result = int(getattr(self._libc, name)(*arguments))
        if result < 0:
            number = self._ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
        return result

    def prctl(self, *arguments: int) -> None:
        full = [self._ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:5]]
        self.call("prctl", *full)

    def sleeping_init(self) -> int:
        """Start process 1 of a new process namespace, and return its process id as this process
        sees it. The new process shares this one's memory and only sleeps, so it costs no copy."""
        ctypes = self._ctypes
        pause = ctypes.cast(self._libc.pause, ctypes.c_void_p)
        top = ctypes.addressof(self._init_stack) + len(self._init_stack)
        flags = _CLONE_VM | _CLONE_FILES | CLONE_NEWPID | _SIGCHLD
        return self.call("clone", pause, ctypes.c_void_p(top & ~15), flags, None)

    def mount_tmpfs(self, where: str, size: int, max_files: int) -> None:
        # Mode and owner: this process is the only one who will ever see it.
        owner = f"uid={NOBODY},gid={NOBODY}"
        options = f"size={size},nr_inodes={max_files + 8},mode=700,{owner}"
        self.call(
            "mount",
            b"tmpfs",
            where.encode(),
            b"tmpfs",
            self._ctypes.c_ulong(_MS_NOSUID | _MS_NODEV),
            options.encode(),
        )

    def give_up_rights(self) -> None:
        """Drop all capabilities, so that none can be regained."""
        for capability in (_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN, _CAP_SETPCAP):
            self.prctl(_PR_CAPBSET_DROP, capability)
        if os.getuid() != NOBODY:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        self.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        self.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        header = struct.pack("<Ii", 0x20080522, 0)  # version 3, this process
        self.call("capset", header, bytes(24))
        self.prctl(_PR_SET_NO_NEW_PRIVS, 1)

    def filter_system_calls(self, program: bytes) -> None:
        buffer = self._ctypes.create_string_buffer(program, len(program))
        address = self._ctypes.addressof(buffer)
        described = struct.pack("@HP", len(program) // 8, address)
        self.call(
            "prctl",
            _PR_SET_SECCOMP,
            self._ctypes.c_ulong(2),
            described,
            self._ctypes.c_ulong(0),
            self._ctypes.c_ulong(0),
        )
