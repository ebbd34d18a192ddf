"""Reading what is none of a program's business."""

from __future__ import annotations

import dataclasses

from tests.sandbox.attacks.record import LIMITS, MIB, Attack

_MUCH = dataclasses.replace(LIMITS, output_bytes=16 * MIB)
"""For probes that print all that they find."""

ATTACKS = (
    Attack(
        name="own environment",
        escape="the secret variable of the process that opened the box",
        program="print(dict(os.environ)); show('/proc/self/environ')",
        bare=True,
    ),
    Attack(
        name="environment of pid 1",
        escape="the secret variable, which bubblewrap's own helper process could carry",
        program="show('/proc/1/environ'); show(f'/proc/{os.getppid()}/environ')",
    ),
    Attack(
        name="every environment",
        escape="the secret variable in any process of any number",
        program="""
for pid in range(1, 5000):
    show(f"/proc/{pid}/environ")
for pid in (bait["host_pid"], bait["bystander"]):
    show(f"/proc/{pid}/environ")
""",
        bare=True,
    ),
    Attack(
        name="environment through the C library",
        escape="the secret variable",
        program="""
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
i = 0
while environ and environ[i]:
    print(environ[i])
    i += 1
libc.getenv.restype = ctypes.c_char_p
print(libc.getenv(bait["variable"].encode()))
""",
        bare=True,
    ),
    Attack(
        name="stack above main",
        escape="the secret variable where the kernel puts the environment of a new process",
        program="""
environ = ctypes.c_void_p.in_dll(libc, "environ").value
page = 4096
residency = ctypes.create_string_buffer(1)
at = (environ or id(environ)) & ~(page - 1)
for i in range(64):
    if libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(page), residency):
        break
    os.write(1, ctypes.string_at(at, page).replace(b"\\0", b" ").strip())
    at += page
""",
        limits=_MUCH,
    ),
    Attack(
        name="command lines",
        escape="the secret argument of a bystander",
        program="""
for pid in [*range(1, 5000), bait["bystander"], bait["host_pid"]]:
    show(f"/proc/{pid}/cmdline")
""",
        bare=True,
    ),
    Attack(
        name="secret file",
        escape="its contents",
        program="show(bait['secret_file'])",
        bare=True,
    ),
    Attack(
        name="secret file by ../",
        escape="its contents",
        program="""
for depth in range(20):
    show("../" * depth + bait["secret_file"].lstrip("/"))
""",
        bare=True,
    ),
    Attack(
        name="secret file through /proc",
        escape="its contents",
        program="""
for pid in ["self", "thread-self", 1, 2, os.getppid(), bait["bystander"], bait["host_pid"]]:
    for way in ("root", "cwd", "cwd/../../../../../..", "task/1/root"):
        show(f"/proc/{pid}/{way}{bait['secret_file']}")
""",
        bare=True,
    ),
    Attack(
        name="secret file through a symlink",
        escape="its contents",
        program="""
os.symlink(bait["secret_file"], "link")
os.symlink("/", "top")
show("link")
show("top" + bait["secret_file"])
""",
        bare=True,
    ),
    Attack(
        name="secret file through a hard link",
        escape="its contents",
        program="""
attempt(os.link, bait["secret_file"], "hard")
attempt(os.link, bait["secret_file"], bait["mark"], src_dir_fd=attempt(os.open, "/", 0))
show("hard")
""",
    ),
    Attack(
        name="secret file as code",
        escape="its contents in an error message or as a value",
        program="""
import importlib.util, linecache, tokenize
print(linecache.getlines(bait["secret_file"]))
attempt(lambda: print(list(tokenize.tokenize(open(bait["secret_file"], "rb").readline))))
spec = importlib.util.spec_from_file_location("secret", bait["source"])
attempt(lambda: print(spec.loader.get_source("secret")))
""",
        bare=True,
    ),
    Attack(
        name="home folders",
        escape="a file of the home folder of whoever opened the box",
        program="""
import itertools
for top in (bait["home"], os.path.expanduser("~"), "/root", "/home"):
    for folder, folders, names in itertools.islice(os.walk(top), 200):
        folders[:] = [name for name in folders if name != ".pyenv"]
        for name in names[:50]:
            show(os.path.join(folder, name), 400)
""",
        limits=_MUCH,
        bare=True,
    ),
    Attack(
        name="whole file system",
        escape="a file with the bait's name anywhere",
        program="""
import itertools
skip = {"proc", "sys", "usr", "lib", "lib64"}
tops = ["/" + name for name in os.listdir("/") if name not in skip]
for folder, _, names in itertools.chain(*map(os.walk, tops)):
    for name in names:
        if "secret" in name and "bait" in name:
            show(os.path.join(folder, name))
""",
    ),
    Attack(
        name="users and passwords",
        escape="the host's own lists",
        program="""
for name in ("passwd", "shadow", "group", "gshadow", "sudoers", "hosts", "resolv.conf", "hostname"):
    show("/etc/" + name)
""",
        never=(b"root:x:0:0", b"root:*:", b"root:!"),
        bare=True,
    ),
    Attack(
        name="inherited descriptor",
        escape="the secret through a file that was left open across exec",
        program="""
for fd in range(3, 1024):
    try:
        os.write(1, os.pread(fd, 4096, 0))
    except OSError:
        pass
""",
        bare=True,
    ),
    Attack(
        name="any descriptor",
        escape="something is open beside the three standard ones: a pipe or socket of the box",
        program="""
for fd in range(3, 1 << 16):
    try:
        escaped(f"{fd}: mode {oct(os.fstat(fd).st_mode)}")
    except OSError:
        pass
""",
        bare=True,
    ),
    Attack(
        name="descriptors of others",
        escape="the secret through /proc/PID/fd",
        program="""
for pid in [*range(1, 2000), bait["host_pid"], bait["bystander"]]:
    for fd in attempt(os.listdir, f"/proc/{pid}/fd") or []:
        if not (pid == os.getpid() and int(fd) < 3):
            show(f"/proc/{pid}/fd/{fd}")
""",
    ),
    Attack(
        name="standard input of the box",
        escape="standard input is more than what was given",
        program="""
import fcntl
print("stdin:", sys.stdin.read())
attempt(os.lseek, 0, 0, 0)
print(attempt(os.read, 0, 100))
attempt(os.write, 0, b"x")
attempt(os.ftruncate, 0, 1 << 30)
""",
        stdin="given",
        prints=b"stdin: given\n",
    ),
    Attack(
        name="memory of other processes",
        escape="the secret, or that it could be opened at all",
        program="""
for pid in (1, os.getppid(), bait["host_pid"], bait["bystander"]):
    for flags in (os.O_RDONLY, os.O_RDWR):
        if attempt(os.open, f"/proc/{pid}/mem", flags):
            escaped(f"/proc/{pid}/mem")
""",
    ),
    Attack(
        name="kernel memory",
        escape="it could be opened",
        program="""
for name in ("/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/proc/kmsg",
             "/proc/kallsyms", "/proc/keys", "/proc/sched_debug", "/sys/kernel/debug"):
    if attempt(os.open, name, os.O_RDONLY) and name != "/proc/kallsyms":
        escaped(name)
""",
    ),
    Attack(
        name="POSIX shared memory of the host",
        escape="the secret in /dev/shm",
        program="""
from multiprocessing import shared_memory
it = attempt(shared_memory.SharedMemory, bait["shm"])
if it:
    os.write(1, bytes(it.buf))
show("/dev/shm/" + bait["shm"])
for name in attempt(os.listdir, "/dev/shm") or []:
    show("/dev/shm/" + name)
""",
        bare=True,
    ),
    Attack(
        name="System V shared memory of the host",
        escape="the secret in a segment that anybody may attach",
        program="""
segment = libc.shmget(bait["key"], 0, 0)
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(segment, None, 0o10000) if segment != -1 else None
if address and address != ctypes.c_void_p(-1).value:
    os.write(1, ctypes.string_at(address, 64))
show("/proc/sysvipc/shm")
""",
        bare=True,
    ),
    Attack(
        name="sockets of the host in /proc/net",
        escape="the name of a listener outside",
        program="""
for name in ("unix", "tcp", "tcp6", "udp", "arp", "route", "fib_trie"):
    show("/proc/net/" + name, 200000)
    show("/proc/1/net/" + name, 200000)
""",
        never=(b"rp-bait-abstract",),
        bare=True,
    ),
    Attack(
        name="mount table",
        escape="a writable mount of anything but memory, or the bait's folder",
        program="""
memory = {"tmpfs", "proc", "devpts", "mqueue", "ramfs"}
for line in attempt(lambda: open("/proc/self/mountinfo").readlines()) or []:
    head, _, tail = line.partition(" - ")
    options, kind = head.split()[5].split(","), tail.split()[0]
    devices = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}
    if "rw" in options and kind not in memory and head.split()[4] not in devices:
        escaped(line)
""",
        bare=True,
    ),
    Attack(
        name="frames and objects of the harness",
        escape="the secret in a frame below or in any object that the collector knows",
        program="""
import gc
frame = sys._getframe()
while frame:
    for value in [*frame.f_globals.values(), *frame.f_locals.values()]:
        if value is not bait:
            sys.stdout.write(str(attempt(repr, value))[:2000])
    frame = frame.f_back
for it in gc.get_objects()[:20000]:
    if isinstance(it, (dict, list, tuple)) and it is not bait and "home" not in it:
        sys.stdout.write(str(attempt(repr, it))[:3])
""",
    ),
    Attack(
        name="modules of the trainer",
        escape="rollpacker itself can be imported: the box shows more than an interpreter",
        program="""
for name in ("rollpacker", "torch", "transformers", "openai", "tests"):
    if attempt(__import__, name):
        escaped(name)
""",
        bare=True,
    ),
    Attack(
        name="graphics devices",
        escape="one could be opened",
        program="""
import glob
for name in ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd", "/dev/kvm",
             "/dev/fuse", "/dev/net/tun", "/dev/vhost-net", "/dev/vsock", "/dev/loop-control",
             *glob.glob("/dev/dri/*"), *glob.glob("/dev/nvidia*")]:
    for flags in (os.O_RDONLY, os.O_RDWR):
        if attempt(os.open, name, flags):
            escaped(name)
""",
    ),
    Attack(
        name="devices",
        escape="a device beside the harmless ones could be opened",
        program="""
harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console", "stdin",
            "stdout", "stderr", "fd", "shm", "pts", "core"}
for name in set(attempt(os.listdir, "/dev") or []) - harmless:
    if attempt(os.open, "/dev/" + name, os.O_RDONLY | os.O_NONBLOCK):
        escaped(name)
""",
        bare=True,
    ),
    Attack(
        name="network interfaces",
        escape="an interface beside the loopback",
        program="""
import socket
names = {name for _, name in attempt(socket.if_nameindex) or []}
names.update(attempt(os.listdir, "/sys/class/net") or [])
for name in names - {"lo"}:
    escaped(name)
""",
    ),
)
