"""The attacking programs of the self-test (`selftest.py`), which run inside the sandbox. Their
variable `bait` holds what they attack: paths, ports, processes."""

from __future__ import annotations

import platform

ENVIRONMENT = """
import glob, os, sys
found = [b"\\0".join(b"=".join(pair) for pair in os.environb.items())]
for name in glob.glob("/proc/[0-9]*/environ"):
    try:
        found.append(open(name, "rb").read())
    except OSError:
        pass
sys.stdout.buffer.write(b"\\0".join(found)[:60000] + b" looked")
"""

HOST_FILES = """
import os
home = [os.path.join(bait["home"], name) for name in (".ssh/id_rsa", ".netrc", ".bashrc")]
secret = bait["secret_file"]
for name in ["own.txt", secret, "/proc/1/root" + secret, "../" * 20 + secret, "/etc/passwd",
             "/etc/shadow", *home]:
    try:
        print(open(name).read(), flush=True)
    except OSError:
        pass
"""

WRITES = """
import os
open("new.txt", "w").write("x")
print("wrote its own" if open("new.txt").read() == "x" else "")
for folder in (bait["folder"], bait["home"], "/", "/usr", "/proc/1/root" + bait["folder"]):
    try:
        open(os.path.join(folder, bait["mark"]), "w").close()
    except OSError:
        pass
for attempt in (lambda: open(bait["secret_file"], "w").write("changed"),
                lambda: os.unlink(bait["secret_file"])):
    try:
        attempt()
    except OSError:
        pass
"""

NETWORK = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", bait["port"])),
                        (socket.AF_UNIX, bait["abstract"]), (socket.AF_UNIX, bait["path"])):
    try:
        with socket.socket(family) as it:
            it.settimeout(0.2)
            it.connect(address)
            print("REACHED", address)
    except OSError:
        pass
print("tried")
"""

SIGNALS = """
import os, signal
print("tried", flush=True)
for send in (lambda: os.kill(bait["bystander"], signal.SIGSTOP),
             lambda: os.killpg(bait["bystander"], signal.SIGKILL),
             lambda: os.kill(os.getppid(), signal.SIGSTOP) if os.getppid() > 1 else None,
             lambda: os.kill(0, signal.SIGSTOP)):
    try:
        send()
    except OSError:
        pass
"""

DAEMONS = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, bait["mark"].encode())  # the name of this process and its children
for _ in range(20):
    try:
        if os.fork() == 0:
            try:
                os.setsid()
            except OSError:
                pass
            time.sleep(30)
            os._exit(0)
    except OSError:
        break
print("tried", flush=True)
"""
"""A program that starts daemons. The self-test adds a line that keeps it alive for some time."""

MEMORY = """
small = bytearray(8 << 20)
print("small one", flush=True)
large = bytearray(b"x") * (192 << 20)
print("large one", flush=True)
"""

CHILDREN = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, bait["mark"].encode())
print("tried", flush=True)
try:
    for _ in range(6):
        if os.fork() == 0:
            block = bytearray(b"x") * (48 << 20)
            time.sleep(0.2)
            os._exit(0)
    time.sleep(0.2)
except OSError:
    pass
"""

DISK = """
import os
total = 0
for folder in (".", os.environ.get("TMPDIR", "/tmp"), "/tmp", "/dev/shm", "/var/tmp", "/run"):
    for i in range(4):
        try:
            with open(os.path.join(folder, f"fill{i}"), "ab", buffering=0) as file:
                for _ in range(16):
                    total += file.write(b"x" * (1 << 20))
        except OSError:
            pass
print("wrote", total)
"""

OUTPUT = """
import os
while True:
    os.write(1, b"x" * 65536)
"""

ENDLESS = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
"""

DESCRIPTORS = """
import os
for number in range(3, 1024):
    try:
        print("OPEN", number, oct(os.fstat(number).st_mode))
    except OSError:
        pass
print("looked")
"""

_CALLS = {
    "x86_64": {
        "getpid": 39, "ptrace": 101, "unshare": 272, "mount": 165, "chroot": 161, "bpf": 321,
        "keyctl": 250, "io_uring_setup": 425, "userfaultfd": 323, "perf_event_open": 298,
        "setns": 308, "pivot_root": 155, "seccomp": 317, "memfd_secret": 447,
    },
    "aarch64": {
        "getpid": 172, "ptrace": 117, "unshare": 97, "mount": 40, "chroot": 51, "bpf": 280,
        "keyctl": 219, "io_uring_setup": 425, "userfaultfd": 282, "perf_event_open": 241,
        "setns": 268, "pivot_root": 41, "seccomp": 277, "memfd_secret": 447,
    },
}  # fmt: skip

KERNEL = f"""
import ctypes, os, struct
calls = {_CALLS.get(platform.machine(), {})}
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(calls["getpid"]) == os.getpid():
    print("getpid works")
here = ctypes.c_char_p(b"/")
arguments = {{"unshare": (0x10000000,), "chroot": (here,), "io_uring_setup": (1, bytes(120))}}
for name, number in calls.items():
    ctypes.set_errno(0)
    if name != "getpid" and (libc.syscall(number, *arguments.get(name, (0,) * 5)) != -1
                             or ctypes.get_errno() not in (1, 38)):  # EPERM, ENOSYS
        print("ALLOWED", name, ctypes.get_errno())
if libc.prctl(39, 0, 0, 0, 0) != 1 or libc.prctl(21) != 2:
    print("ALLOWED new privileges or system calls")
header, sets = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
if libc.capget(header, sets) or any(sets.raw):
    print("ALLOWED capabilities", sets.raw)
print("looked")
"""

POISON = """
import builtins, json, os, sys
json.dumps = lambda *a, **k: "poisoned"
builtins.sum = builtins.len = lambda *a: 10**6
sys.modules["math"] = json
for folder in {".", "/tmp", "/dev/shm", os.path.expanduser("~"), *sys.path}:
    try:
        open(os.path.join(folder, bait["mark"] + ".txt"), "w").write("poisoned")
    except OSError:
        pass
os.environ["POISONED"] = "1"
"""

AFTER_POISON = """
import json, math, os, sys
folders = {".", "/tmp", "/dev/shm", os.path.expanduser("~"), *sys.path}
names = [name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]
clean = not any(bait["mark"] in name for name in names)
clean = clean and math.sqrt(4) == 2 and "POISONED" not in os.environ
print(json.dumps({"sum": sum([1, 2, 3])}), "clean" if clean else "poisoned")
"""
