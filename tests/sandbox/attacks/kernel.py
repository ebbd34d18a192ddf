"""Calls into parts of the kernel that a program has no need of. What the kernel answered can only
be seen by the program; the probe must come to its end (`finished`) for that to count."""

from __future__ import annotations

from rollpacker.sandbox.sandbox import Status
from tests.sandbox.attacks.record import ANY_END, Attack, sections

_ANSWERED = "the kernel did it, or failed for another reason than that it may not"

_PROGRAMS = r"""
## new namespaces by unshare
for flag in (0x10000000, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x20000000, 0x40000000,
             0x80, 0x7E020000):
    refuse("unshare", flag)

## new namespaces by clone
for flag in (0x10000000, 0x20000, 0x02000000, 0x04000000, 0x08000000, 0x20000000, 0x40000000):
    result, error = call("clone", flag | 17, 0, 0, 0, 0)
    if result == 0:
        os._exit(0)
    if result != -1 or error != 1:
        escaped(f"clone {flag:x}: {result}")

## clone3
arguments = ctypes.create_string_buffer(88)
result, error = call("clone3", arguments, 88)
if result == 0:
    os._exit(0)
if (result, error) != (-1, 38):
    escaped(f"{result} {error}")

## a sibling by CLONE_PARENT
refuse('clone', 0x8000 | 17, 0, 0, 0, 0)

## nested user namespace by a program
import subprocess
for command in (["unshare", "-Ur", "true"], ["bwrap", "--bind", "/", "/", "true"]):
    done = attempt(subprocess.run, command, capture_output=True, timeout=2)
    if done and done.returncode == 0:
        escaped(command)

## join a namespace
for pid in (1, os.getppid(), bait["host_pid"]):
    for kind in ("user", "mnt", "net", "pid", "ipc"):
        fd = attempt(os.open, f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        if fd:
            refuse("setns", fd, 0)
refuse("setns", 0, 0)

## mount
os.mkdir("m")
for source, kind in ((b"tmpfs", b"tmpfs"), (b"proc", b"proc"), (b"/", None), (b"none", b"overlay")):
    refuse("mount", source, b"m", kind, 4096 if kind is None else 0, None)
refuse("mount", b"none", b"/", None, 32, None)
refuse("umount2", b"/", 2)
refuse("umount2", b"/tmp", 2)

## mount by the newer calls
refuse("open_tree", -100, b"/", 1)
refuse("fsopen", b"tmpfs", 0)
refuse("fsconfig", 0, 6, None, None, 0)
refuse("fsmount", 0, 0, 0)
refuse("fspick", -100, b"/", 0)
refuse("move_mount", -100, b"/", -100, b"/tmp", 0)
refuse("mount_setattr", -100, b"/", 0, ctypes.create_string_buffer(32), 32)

## change the root
refuse("chroot", b"/")
refuse("chroot", b".")
refuse("pivot_root", b".", b".")

## leave a root by chroot and ..
os.mkdir("jail")
if attempt(os.chroot, "jail"):
    for _ in range(40):
        attempt(os.chdir, "..")
    attempt(os.chroot, ".")
    show(bait["secret_file"])
    escaped("chroot")

## ptrace
refuse("ptrace", 0, 0, 0, 0)
for pid in (1, os.getppid(), bait["host_pid"], bait["bystander"]):
    refuse("ptrace", 16, pid, 0, 0)
    refuse("ptrace", 0x4206, pid, 0, 0)

## memory of others by call
buffer = ctypes.create_string_buffer(64)
for pid in (1, os.getppid(), os.getpid(), bait["host_pid"]):
    refuse("process_vm_readv", pid, buffer, 1, buffer, 1, 0)
    refuse("process_vm_writev", pid, buffer, 1, buffer, 1, 0)
refuse("process_madvise", 0, buffer, 1, 21, 0)

## descriptors of others by call
for pid in (1, os.getppid(), bait["host_pid"]):
    refuse("pidfd_open", pid, 0)
    refuse("kcmp", os.getpid(), pid, 0, 0, 0)
refuse("pidfd_getfd", 0, 0, 0)
refuse("pidfd_send_signal", 0, 9, 0, 0)

## io_uring
refuse("io_uring_setup", 8, ctypes.create_string_buffer(120))
refuse("io_uring_enter", 0, 1, 1, 0, 0)
refuse("io_uring_register", 0, 0, 0, 0)
refuse("io_setup", 8, ctypes.byref(ctypes.c_long()))

## keys
for operation in range(33):
    refuse("keyctl", operation, -3, 0, 0, 0)
refuse("add_key", b"user", b"name", b"value", 5, -3)
refuse("request_key", b"user", b"name", b"", -3)

## BPF
for command in (0, 5, 18, 36):
    refuse("bpf", command, ctypes.create_string_buffer(128), 128)

## performance events
refuse('perf_event_open', bytes(128), 0, -1, -1, 0)

## page faults in user space
refuse('userfaultfd', 1)
refuse('userfaultfd', 0)

## memory files
refuse("memfd_create", b"x", 0)
refuse("memfd_secret", 0)
if hasattr(os, "memfd_create") and attempt(os.memfd_create, "x"):
    escaped("os.memfd_create")

## personality
for value in (0x0040000, 0x0400000, 8, 0x0020000):
    refuse("personality", value)

## modules and another kernel
refuse("init_module", 0, 0, b"")
refuse("finit_module", 0, b"", 0)
refuse("delete_module", b"none", 0)
refuse("kexec_load", 0, 0, 0, 0)
refuse("kexec_file_load", 0, 0, 0, b"", 0)

## turn off the machine
refuse("reboot", 0, 0, 0, 0)
refuse("vhangup")
refuse("swapon", b"none", 0)
refuse("swapoff", b"none")
refuse("acct", b"none")
refuse("syslog", 3, ctypes.create_string_buffer(64), 64)
refuse("syslog", 10, 0, 0)

## quotas and file handles
refuse("quotactl", 0x800007 << 8, b"/", 0, 0)
refuse("quotactl_fd", 0, 0, 0, 0)
handle = ctypes.create_string_buffer(b"\x80" + bytes(200))
refuse("name_to_handle_at", -100, b"/", handle, ctypes.byref(ctypes.c_int()), 0)
refuse("open_by_handle_at", -100, handle, 0)
refuse("fanotify_init", 0, 0)
refuse("inotify_init1", 0)
refuse("lookup_dcookie", 0, 0, 0)

## clock
refuse("settimeofday", bytes(16), 0)
refuse("clock_settime", 0, bytes(16))
refuse("adjtimex", ctypes.create_string_buffer(208))
refuse("clock_adjtime", 0, ctypes.create_string_buffer(208))
refuse("timer_create", 0, 0, ctypes.byref(ctypes.c_int()))

## names of the machine
refuse('sethostname', b'owned', 5)
refuse('setdomainname', b'owned', 5)

## users and groups
refuse("setuid", 0)
refuse("setgid", 0)
refuse("setresuid", 0, 0, 0)
refuse("setresgid", 0, 0, 0)
refuse("setreuid", 0, 0)
refuse("setgroups", 0, 0)
refuse("setfsuid", 0)

## capabilities
import struct
header = struct.pack("<Ii", 0x20080522, 0)
refuse("capset", header, b"\xff" * 24)
sets = ctypes.create_string_buffer(24)
call("capget", ctypes.create_string_buffer(header), sets)
if any(sets.raw):
    escaped(sets.raw.hex())
if libc.prctl(47, 2, 21, 0, 0) == 0:
    escaped("ambient capability")

## set-user-id programs
import glob, stat, subprocess
for name in [*glob.glob("/usr/bin/*"), *glob.glob("/bin/*"), *glob.glob("/usr/lib/*/*")]:
    info = attempt(os.stat, name)
    if info and info.st_mode & (stat.S_ISUID | stat.S_ISGID) and stat.S_ISREG(info.st_mode):
        done = attempt(subprocess.run, [name, "--version"], capture_output=True, timeout=1)
        status = attempt(lambda: open("/proc/self/status").read())
        if status and "NoNewPrivs:\t1" not in status:
            escaped(name)
if libc.prctl(39, 0, 0, 0, 0) != 1:
    escaped("new privileges can be had")

## the filter itself
program = ctypes.create_string_buffer(bytes.fromhex("06000000 0000ff7f"))
import struct
described = struct.pack("@HP", 1, ctypes.addressof(program))
refuse("seccomp", 1, 0, described)
refuse("seccomp", 2, 0, ctypes.byref(ctypes.c_uint(0)))
refuse("prctl", 22, 2, described, 0, 0)
if libc.prctl(21) != 2:
    escaped("no filter")
refuse("landlock_create_ruleset", 0, 0, 1)
refuse("landlock_restrict_self", 0, 0)

## settings of the own process
for option, value in ((1, 0), (4, 1), (8, 1), (24, 0), (28, 0), (35, 1), (36, 1), (38, 1), (47, 1),
                      (0x59616D61, -1), (51, 0), (52, 1), (53, 1), (62, 1)):
    refuse("prctl", option, value, 0, 0, 0)

## priority and processors
refuse("sched_setscheduler", 0, 1, ctypes.byref(ctypes.c_int(50)))
refuse("sched_setscheduler", 0, 2, ctypes.byref(ctypes.c_int(50)))
refuse("sched_setattr", 0, bytes(48), 0)
refuse("sched_setparam", 0, ctypes.byref(ctypes.c_int(0)))
refuse("sched_setaffinity", 0, 8, bytes([1] + [0] * 7))
refuse("setpriority", 0, 0, -20)
refuse("ioprio_set", 1, 0, 1 << 13)

## raise own limits
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE,
              resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK):
    soft, hard = resource.getrlimit(which)
    higher = -1 if hard == -1 else hard + 1
    if hard == -1:
        escaped(f"limit {which} is infinite")
    elif attempt(resource.setrlimit, which, (soft, higher)):
        escaped(f"limit {which} raised")

## limits of other processes
limits = ctypes.create_string_buffer(16)
for pid in (1, os.getppid() or 1, bait["host_pid"]):
    for which in (4, 7, 9):
        refuse("prlimit64", pid, which, limits, limits)

## place and lock memory
refuse("mlockall", 3)
refuse("mlock", id(bait) & ~4095, 4096)
refuse("mbind", 0, 0, 0, 0, 0, 0)
refuse("set_mempolicy", 0, 0, 0)
refuse("migrate_pages", 0, 0, 0, 0)
refuse("move_pages", 0, 0, 0, 0, 0, 0)
refuse("remap_file_pages", 0, 0, 0, 0, 0)
refuse("pkey_alloc", 0, 0)

## splice
one, two = os.pipe()
refuse("splice", one, 0, two, 0, 1, 0)
refuse("tee", one, two, 1, 0)
refuse("vmsplice", two, bytes(16), 1, 0)

## terminals
for option in (0x5412, 0x541C, 0x540E, 0x5414, 0x5402, 0x5423, 0x4B46, 0x5609):
    refuse("ioctl", 0, option, ctypes.create_string_buffer(64))

## other devices by ioctl
for option in (0x8912, 0x8913, 0xAE00, 0x1269, 0x5331, 0x40049409, 0xC0045877, 0x40086602, 0x8905):
    for fd in (0, 1, 2):
        refuse("ioctl", fd, option, ctypes.create_string_buffer(256))

## signals by descriptor
one, two = os.pipe()
for command, value in ((8, 1), (10, 9), (1024, 1), (1026, 1), (1031, 1 << 20), (15, 0)):
    refuse("fcntl", one, command, value)

## ports and segments
refuse("iopl", 3)
refuse("ioperm", 0, 1, 1)
refuse("modify_ldt", 0, ctypes.create_string_buffer(16), 16)
refuse("arch_prctl", 0x1011, 0)
refuse("arch_prctl", 0x5001, 0)

## System V objects
refuse("shmget", bait["key"] + 1, 4096, 0o1666)
refuse("msgget", bait["key"] + 1, 0o1666)
refuse("semget", bait["key"] + 1, 1, 0o1666)
refuse("shmat", 0, 0, 0)
refuse("shmctl", 0, 13, ctypes.create_string_buffer(256))
refuse("mq_open", b"x", 0o102, 0o666, 0)

## extended attributes and owners
refuse("setxattr", b".", b"user.x", b"value", 5, 0)
refuse("fchown", 1, 0, 0)
refuse("fchownat", -100, b".", 0, 0, 0)
refuse("sync")
refuse("syncfs", 0)
refuse("execveat", -100, b"/bin/true", 0, 0, 0)

## every other call
probes = {335, 336} if os.uname().machine == "x86_64" else set()  # of a tracer's: SIGILL
for number in set(range(480)) - probes - set(bait["allowed_calls"]):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    if result != -1 or ctypes.get_errno() not in (1, 38):
        escaped(f"call {number}: {result}, errno {ctypes.get_errno()}")
call("getpid")

## calls of x32
for number in (0, 39, 57, 59, 101, 512, 520, 521, 537, 545):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(0x40000000 + number), *[ctypes.c_long(-1)] * 6)
    if result != -1 or ctypes.get_errno() != 38:
        escaped(f"x32 call {number}: {result}")
call("getpid")
"""

_BARE = (
    "nested user namespace by a program",
    "keys",
    "memory files",
    "users and groups",
    "set-user-id programs",
    "the filter itself",
    "priority and processors",
    "raise own limits",
)
"""May run without a sandbox."""

ATTACKS = (
    *(
        Attack(name=name, escape=_ANSWERED, program=program, bare=name in _BARE)
        for name, program in sections(_PROGRAMS)
    ),
    Attack(
        name="calls of 32-bit programs",
        escape="a call through the table of i386, which the filter's numbers do not describe",
        program="""
import mmap, platform
if platform.machine() == "x86_64":
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid():
        escaped("getpid of i386")
else:
    os.abort()
""",
        statuses=ANY_END - {Status.OK},
    ),
)
