"""Numbers of the system calls that sandboxed programs may use, on x86_64 and aarch64.

The numbers are the kernel's; a test compares them with its headers and with libseccomp. Calls that
are not in these tables are refused (`seccomp.py`).
"""

from __future__ import annotations

ARCHITECTURES = ("x86_64", "aarch64")

_PLAIN_TABLE = """
# files
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; preadv 295 69;
pwritev 296 70; preadv2 327 286; pwritev2 328 287; lseek 8 62; open 2 -; openat 257 56;
creat 85 -; close 3 57; close_range 436 436; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79;
statx 332 291; access 21 -; faccessat 269 48; faccessat2 439 439; getdents 78 -;
getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50; mkdir 83 -; mkdirat 258 34;
rmdir 84 -; unlink 87 -; unlinkat 263 35; rename 82 -; renameat 264 38; renameat2 316 276;
link 86 -; linkat 265 37; symlink 88 -; symlinkat 266 36; readlink 89 -; readlinkat 267 78;
chmod 90 -; fchmod 91 52; fchmodat 268 53; fchmodat2 452 452; umask 95 166; truncate 76 45;
ftruncate 77 46; fallocate 285 47; fsync 74 82; fdatasync 75 83; fadvise64 221 223; utime 132 -;
utimes 235 -; futimesat 261 -; utimensat 280 88; statfs 137 43; fstatfs 138 44; flock 73 32;
dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -; pipe2 293 59; sendfile 40 71;
copy_file_range 326 285; getxattr 191 8; lgetxattr 192 9; fgetxattr 193 10; listxattr 194 11;
llistxattr 195 12; flistxattr 196 13;
# waiting
poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create 213 -; epoll_create1 291 20;
epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -;
eventfd2 290 19; timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87;
signalfd 282 -; signalfd4 289 74;
# socket pairs
getsockname 51 204; getpeername 52 205; getsockopt 55 209; shutdown 48 210;
# memory
mmap 9 222; munmap 11 215; mremap 25 216; mprotect 10 226; brk 12 214; madvise 28 233;
msync 26 227; mincore 27 232; membarrier 324 283;
# threads
futex 202 98; set_robust_list 273 99; get_robust_list 274 100; set_tid_address 218 96;
rseq 334 293; sched_yield 24 124; sched_getaffinity 204 123; sched_getparam 143 121;
sched_getscheduler 145 120; sched_get_priority_max 146 125; sched_get_priority_min 147 126;
sched_rr_get_interval 148 127; getpriority 140 141; getcpu 309 168;
# processes
execve 59 221; exit 60 93; exit_group 231 94; wait4 61 260; waitid 247 95; getpid 39 172;
getppid 110 173; gettid 186 178; getpgid 121 155; getpgrp 111 -; getsid 124 156;
setpgid 109 154; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177;
getresuid 118 148; getresgid 120 150; getgroups 115 158; capget 125 90;
# signals
kill 62 129; tkill 200 130; tgkill 234 131; rt_sigaction 13 134; rt_sigprocmask 14 135;
rt_sigreturn 15 139; rt_sigsuspend 130 133; rt_sigtimedwait 128 137; rt_sigpending 127 136;
sigaltstack 131 132; pause 34 -; restart_syscall 219 128;
# time
clock_gettime 228 113; clock_getres 229 114; clock_nanosleep 230 115; nanosleep 35 101;
gettimeofday 96 169; time 201 -; times 100 153; alarm 37 -; getitimer 36 102; setitimer 38 103;
# this system
uname 63 160; sysinfo 99 179; getrandom 318 278; getrusage 98 165; getrlimit 97 163;
setrlimit 160 164;
"""

_CHECKED_TABLE = """
arch_prctl 158 -; clone 56 220; fcntl 72 25; ioctl 16 29; mknod 133 -; mknodat 259 33;
personality 135 92; prctl 157 167; prlimit64 302 261; recvfrom 45 207; sendto 44 206;
socketpair 53 199;
"""

_FORK_TABLE = """
fork 57 -; vfork 58 -;
"""

_SESSION_TABLE = """
setsid 112 157;
"""

_ABSENT_TABLE = """
clone3 435 435;
"""


def _numbers(table: str) -> dict[str, dict[str, int]]:
    """Numbers of system calls by architecture and name, read from a table. Its entries are `name
    x86_64 aarch64;`, with - for a call that an architecture lacks."""
    numbers: dict[str, dict[str, int]] = {architecture: {} for architecture in ARCHITECTURES}
    lines = (line for line in table.splitlines() if not line.startswith("#"))
    for entry in " ".join(lines).rstrip("; ").split(";"):
        name, *columns = entry.split()
        for architecture, number in zip(ARCHITECTURES, columns, strict=True):
            if number != "-":
                numbers[architecture][name] = int(number)
    return numbers


PLAIN = _numbers(_PLAIN_TABLE)
"""Numbers of the system calls that are allowed with any arguments."""
CHECKED = _numbers(_CHECKED_TABLE)
"""Numbers of the system calls that are allowed with some arguments (`seccomp.py` defines which)."""
FORK = _numbers(_FORK_TABLE)
"""Numbers of the system calls that start a process, beside `clone`."""
SESSION = _numbers(_SESSION_TABLE)
"""Numbers of the system calls that begin a session. Where no control group divides the processors,
the kernel divides them by session (autogroups), and a program with a hundred sessions would get a
hundred shares."""
ABSENT = _numbers(_ABSENT_TABLE)
"""Numbers of the system calls that fail as if the kernel did not have them, so that the C library
uses older calls whose flags can be checked."""
HIGHEST = 462
"""Highest number of a call when these tables were made. Calls above it also fail as if the kernel
did not have them, so that a newer C library falls back to older calls."""
