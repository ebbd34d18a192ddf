"""The filter's verdict on every call of both architectures, by a small interpreter of its code; its
numbers against the kernel's headers and libseccomp. What a kernel makes of it: test_attacks.py."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from rollpacker.sandbox.seccomp import program
from rollpacker.sandbox.syscalls import (
    ABSENT,
    ARCHITECTURES,
    CHECKED,
    FORK,
    HIGHEST,
    PLAIN,
    SESSION,
)

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
HEADERS = (
    ("x86_64", Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")),
    ("x86_64", Path("/usr/include/asm/unistd_64.h")),
    ("aarch64", Path("/usr/include/asm-generic/unistd.h")),
)


def verdict(filter_code: bytes, number: int, *arguments: int, audit: int) -> int:
    """What the kernel would answer. Fails on an instruction that the filter should not need."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, audit, 0, *padded)
    code = list(struct.iter_unpack("<HBBI", filter_code))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, k = code[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif operation == 0x54:
            accumulator &= k
        elif operation == 0x06:
            return k
        else:
            holds = {0x15: accumulator == k, 0x25: accumulator > k}[operation]
            at += if_true if holds else if_false


def answers(architecture: str, *, fork: bool, sessions: bool = True):
    code = program(fork=fork, sessions=sessions, architecture=architecture)
    return lambda number, *arguments: verdict(code, number, *arguments, audit=AUDIT[architecture])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("sessions", [False, True])
def test_only_named_calls_get_through(architecture: str, fork: bool, sessions: bool) -> None:
    ask = answers(architecture, fork=fork, sessions=sessions)
    allowed = set(PLAIN[architecture].values()) | set(FORK[architecture].values() if fork else ())
    allowed |= set(SESSION[architecture].values() if sessions else ())
    checked = set(CHECKED[architecture].values())
    for number in range(HIGHEST + 1):
        if number in allowed:
            assert ask(number) == ALLOW, number
        elif number in ABSENT[architecture].values():
            assert ask(number) == ENOSYS, number
        elif number not in checked:
            assert ask(number) == EPERM, number
    # Calls of a later kernel; x32's; the number of a call that a tracer skipped.
    for number in (HIGHEST + 1, 0x40000000, 0x40000000 + 59, 0x7FFFFFFF, -1):
        assert ask(number) == ENOSYS, number


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_architecture_ends_the_program(architecture: str) -> None:
    code = program(fork=True, architecture=architecture)
    others = {0x40000003, 0x40000028, *AUDIT.values()} - {AUDIT[architecture]}  # i386, arm
    for audit in others:
        for number in (0, 1, 59, 231):
            assert verdict(code, number, audit=audit) == KILL


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("fork", [False, True])
def test_arguments(architecture: str, fork: bool) -> None:
    ask = answers(architecture, fork=fork)
    call = CHECKED[architecture]
    thread = 0x3D0F00  # what the C library starts threads with
    assert ask(call["clone"], thread) == ALLOW
    for plain_fork in (17, 0x01200011, 0x4111):  # SIGCHLD; fork(); posix_spawn
        assert ask(call["clone"], plain_fork) == (ALLOW if fork else EPERM)
    for bit in (17, 25, 26, 27, 28, 29, 30, 15, 13):  # namespaces, CLONE_PARENT, CLONE_PTRACE
        assert ask(call["clone"], thread | 1 << bit) == EPERM
        assert ask(call["clone"], 17 | 1 << bit) == EPERM

    for option in (0x5401, 0x5413, 0x5421):
        assert ask(call["ioctl"], 0, option) == ALLOW
    # TIOCSTI, TIOCLINUX, TIOCSCTTY, SIOCGIFCONF, FIONBIO with bits that the kernel cuts off
    for option in (0x5412, 0x541C, 0x540E, 0x8912):
        assert ask(call["ioctl"], 0, option) == EPERM
        assert ask(call["ioctl"], 0, option | 1 << 32) == EPERM
    assert ask(call["fcntl"], 0, 1030) == ALLOW  # F_DUPFD_CLOEXEC
    for command in (8, 10, 1024, 1026, 1031, 1033):  # owner, signal, lease, notify, pipe, seals
        assert ask(call["fcntl"], 0, command) == EPERM

    assert ask(call["prctl"], 15) == ALLOW  # name
    for option in (1, 4, 8, 22, 24, 28, 35, 47, 0x59616D61):  # PDEATHSIG ... SECCOMP ... PTRACER
        assert ask(call["prctl"], option) == EPERM
    assert ask(call["prlimit64"], 0, 7) == ALLOW
    assert ask(call["prlimit64"], 1, 7) == EPERM
    assert ask(call["personality"], 0xFFFFFFFF) == ALLOW
    assert ask(call["personality"], 0x0040000) == EPERM  # ADDR_NO_RANDOMIZE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sockets_and_devices(architecture: str) -> None:
    ask = answers(architecture, fork=True)
    call = CHECKED[architecture]
    flags = 0o2004000  # SOCK_CLOEXEC | SOCK_NONBLOCK
    assert ask(call["socketpair"], 1, 1) == ALLOW
    assert ask(call["socketpair"], 1, 1 | flags) == ALLOW
    for family, kind in ((1, 2), (1, 5), (1, 2 | flags), (2, 1), (16, 3), (40, 1)):
        assert ask(call["socketpair"], family, kind) == EPERM
    assert ask(call["sendto"], 3, 4, 5, 0x4000) == ALLOW
    assert ask(call["sendto"], 3, 4, 5, 0x4001) == EPERM  # out of band
    for address in (1, 1 << 32, 0x7FFF12345678):
        assert ask(call["sendto"], 3, 4, 5, 0, address) == EPERM
    assert ask(call["recvfrom"], 3, 4, 5, 0x40) == ALLOW
    assert ask(call["recvfrom"], 3, 4, 5, 0x41) == EPERM
    assert ask(call["mknodat"], 0, 0, 0o010644) == ALLOW
    for device in (0o020644, 0o060644, 0o140644, 0o100644, 0):
        assert ask(call["mknodat"], 0, 0, device) == EPERM
    if "mknod" in call:
        assert ask(call["mknod"], 0, 0o010644) == ALLOW
        assert ask(call["mknod"], 0, 0o020644) == EPERM
        assert ask(call["arch_prctl"], 0x1002) == ALLOW
        assert ask(call["arch_prctl"], 0x5001) == EPERM


_REFUSED = """
    socket connect bind listen accept accept4 sendmsg sendmmsg recvmsg recvmmsg setsockopt
    ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd pidfd_open kcmp
    io_uring_setup io_uring_enter io_uring_register io_setup io_submit keyctl add_key request_key
    bpf perf_event_open userfaultfd memfd_create memfd_secret mount umount2 pivot_root chroot
    move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr setns unshare seccomp
    kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff
    quotactl acct syslog settimeofday clock_settime clock_adjtime adjtimex sethostname
    setdomainname open_by_handle_at name_to_handle_at fanotify_init inotify_init1 vhangup
    shmget shmat msgget msgsnd semget semop mq_open mlock mlockall splice tee vmsplice sync
    sched_setaffinity sched_setscheduler sched_setattr setpriority ioprio_set capset setuid
    setgid setgroups setresuid setresgid setreuid setxattr fchown fchownat migrate_pages
    move_pages mbind set_mempolicy timer_create remap_file_pages pkey_alloc landlock_restrict_self
"""
MUST_BE_REFUSED = _REFUSED.split()


def test_what_must_be_refused_is_not_in_the_tables() -> None:
    for architecture in ARCHITECTURES:
        tables = (PLAIN, CHECKED, FORK, SESSION)
        named = {name for table in tables for name in table[architecture]}
        assert not named.intersection(MUST_BE_REFUSED)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_calls_named_dangerous_are_refused(architecture: str) -> None:
    """By the number that libseccomp knows: a wrong number in our table could let one through."""
    seccomp = pytest.importorskip("pyseccomp", exc_type=Exception)
    ask = answers(architecture, fork=True)
    its = {"x86_64": seccomp.Arch.X86_64, "aarch64": seccomp.Arch.AARCH64}[architecture]
    known = 0
    for name in MUST_BE_REFUSED:
        number = seccomp.resolve_syscall(its, name)
        if number >= 0:
            known += 1
            assert ask(number) == EPERM, name
    assert known > 100


def test_numbers_are_the_headers() -> None:
    compared = 0
    for architecture, header in HEADERS:
        if not header.exists():
            continue
        found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", header.read_text())
        numbers = {name: int(number) for name, number in found}
        numbers["newfstatat"] = numbers.get("newfstatat", numbers.get("fstatat"))
        for table in (PLAIN, CHECKED, FORK, SESSION, ABSENT):
            for name, number in table[architecture].items():
                if name in numbers:  # headers may be older than the newest call
                    assert numbers[name] == number, name
                    compared += 1
    if not compared:
        pytest.skip("no kernel headers here (linux-libc-dev)")
    assert compared > 100


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_numbers_are_libseccomps(architecture: str) -> None:
    seccomp = pytest.importorskip("pyseccomp", exc_type=Exception)
    its = {"x86_64": seccomp.Arch.X86_64, "aarch64": seccomp.Arch.AARCH64}[architecture]
    compared = 0
    for table in (PLAIN, CHECKED, FORK, SESSION, ABSENT):
        for name, number in table[architecture].items():
            theirs = seccomp.resolve_syscall(its, name)
            if theirs != -1:  # newer than the library
                assert theirs == number, name
                compared += 1
    assert compared > 140


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        program(fork=False, architecture="riscv64")


def test_it_fits_the_kernel() -> None:
    for architecture in ARCHITECTURES:
        code = program(fork=True, architecture=architecture)
        assert len(code) % 8 == 0
        assert len(code) // 8 <= 4096
