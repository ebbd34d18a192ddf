"""What one run does to the next in the same box, and to the interpreter that both come from."""

from __future__ import annotations

from rollpacker.sandbox.sandbox import Limits, Status
from tests.sandbox.attacks.record import ANY_END, LIMITS, MIB, REFUSED, SHORT, Attack

_NEXT = "the next run sees something of it"


def _poison(name: str, program: str, then: str) -> Attack:
    """`then` prints `clean` unless something is left of `program`."""
    return Attack(
        name=f"later: {name}",
        escape=_NEXT,
        program=program,
        statuses=ANY_END,
        limits=LIMITS,
        then=then,
    )


_SCAN = r"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
page, residency = 4096, ctypes.create_string_buffer(1)
backwards = b"@BACKWARDS@"
wanted = bytearray(len(backwards))
for i, byte in enumerate(backwards):  # in place: no second copy is made
    wanted[-1 - i] = byte
own = ctypes.addressof((ctypes.c_char * len(wanted)).from_buffer(wanted))
pipe = os.pipe()

def mapped(at):
    return libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(page), residency) == 0

def contents(at):
    "Through a pipe, which fails where reading would end the program."
    if libc.write(pipe[1], ctypes.c_void_p(at), ctypes.c_size_t(page)) == page:
        return os.read(pipe[0], page)
    return b""

def scan(at, step):
    "Pages from an address on, over small gaps."
    gap = seen = 0
    while gap < 256 and seen < 20000:
        seen += 1
        gap = 0 if mapped(at) else gap + 1
        if not gap and not at - page < own < at + 2 * page and wanted in contents(at):
            return True
        at += step * page
    return False

near = (libc.sbrk(0), id(object()), id([]), id(os), ctypes.addressof(residency), id(scan))
found = any(scan(at & ~(page - 1), step) for at in near for step in (-1, 1))
# Last, for it makes copies of what it reads.
control = wanted in contents(own & ~(page - 1)) + contents((own & ~(page - 1)) + page)
print("clean" if control and not found else f"found {found}, control {control}")
"""


def scanning(secret: str) -> str:
    """A program that looks through its memory for a text that an earlier run had. It knows it only
    backwards; its own copy does not count."""
    return _SCAN.replace("@BACKWARDS@", secret[::-1])


_MARK = "the-secret-of-run-one-7f3a"

ATTACKS = (
    _poison(
        "builtins",
        """
import builtins
builtins.print = builtins.sum = builtins.isinstance = lambda *a, **k: True
builtins.len = lambda it: 10**6
builtins.__import__ = lambda *a, **k: 1 / 0
builtins.open = None
""",
        "print('clean' if len([1]) == 1 and sum([1, 2]) == 3 else 'poisoned')",
    ),
    _poison(
        "json and math",
        """
import json, math
json.dumps = json.loads = lambda *a, **k: "poisoned"
math.isclose = lambda *a, **k: True
sys.modules["math"] = json
""",
        "import json, math\nok = json.loads('[1]') == [1] and not math.isclose(1, 2)\n"
        "print('clean' if ok else 'poisoned')",
    ),
    _poison(
        "import system",
        """
class Finder:
    def find_spec(self, *a):
        os._exit(0)
sys.meta_path.insert(0, Finder())
sys.path[:] = ["/nowhere"]
sys.path_hooks.clear()
sys.path_importer_cache.clear()
""",
        "import colorsys, sys\nprint('clean' if '/nowhere' not in sys.path else 'poisoned')",
    ),
    _poison(
        "files everywhere",
        """
for folder in [".", "/tmp", "/var/tmp", "/dev/shm", "/run", "/home", "/dev/mqueue",
               os.path.expanduser("~"), "..", *sys.path]:
    for name in ("poison.txt", "poison.py", ".poison"):
        attempt(lambda: open(os.path.join(folder, name), "w").write("x"))
    attempt(os.mkdir, os.path.join(folder, "poisoned"))
""",
        """
import os, sys
folders = [".", "/tmp", "/var/tmp", "/dev/shm", "/run", "/home", "..", os.path.expanduser("~")]
names = [n for f in [*folders, *sys.path] if os.path.isdir(f) for n in os.listdir(f)]
print("clean" if not [n for n in names if "poison" in n] else "poisoned")
""",
    ),
    _poison(
        "environment, folder, umask, limits",
        """
import resource
os.environ["POISON"] = os.environ["PATH"] = os.environ["PYTHONPATH"] = "/poison"
libc.setenv(b"POISON", b"1", 1)
attempt(os.mkdir, "sub")
os.chdir("/")
os.umask(0o777)
resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))
""",
        """
import os, resource
mask = os.umask(0)
ok = "POISON" not in os.environ and "/poison" not in os.environ.get("PATH", "")
ok = ok and mask != 0o777 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 16
open("can write", "w").close()
print("clean" if ok and not os.path.exists("sub") else "poisoned")
""",
    ),
    _poison(
        "signals",
        """
import signal
for number in range(1, 65):
    attempt(signal.signal, number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
signal.setitimer(signal.ITIMER_REAL, 0.01)
""",
        """
import signal
ok = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not signal.pthread_sigmask(0, [])
print("clean" if ok and signal.getitimer(signal.ITIMER_REAL)[0] == 0 else "poisoned")
""",
    ),
    _poison(
        "threads and children",
        """
import threading, time
for _ in range(5):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    if attempt(os.fork) == 0:
        time.sleep(5)
os._exit(0)
""",
        """
import os, threading
try:
    os.waitpid(-1, os.WNOHANG)
    children = True
except OSError:
    children = False
print("clean" if threading.active_count() == 1 and not children else "poisoned")
""",
    ),
    _poison(
        "memory of the interpreter",
        """
ctypes.c_long.from_address(id(7) + 24).value = 8
attempt(ctypes.memset, id(type(None)), 0, 8)
os._exit(0)
""",
        "print('clean' if 3 + 4 == 7 and str(7) == '7' and None is None else 'poisoned')",
    ),
    _poison(
        "tracing, hooks and warnings",
        """
import warnings
sys.excepthook = sys.displayhook = sys.unraisablehook = lambda *a: os._exit(0)
sys.setrecursionlimit(50)
sys.set_int_max_str_digits(640)
warnings.simplefilter("error")
sys.setswitchinterval(100)
sys.stdout.reconfigure(encoding="utf-16")
""",
        """
import sys, warnings
warnings.warn("harmless", stacklevel=1)
ok = sys.getrecursionlimit() >= 500 and sys.getswitchinterval() < 1 and sys.gettrace() is None
print("clean" if ok and sys.excepthook is sys.__excepthook__ else "poisoned")
""",
    ),
    _poison(
        "standard streams",
        "os.dup2(os.open('/dev/null', os.O_RDWR), 1)\nos.close(2)\nsys.stdin.close()\nos._exit(0)",
        "import sys\nprint('clean' if sys.stdin.read() == '' else 'poisoned')",
    ),
    _poison(
        "named shared memory",
        """
from multiprocessing import shared_memory
attempt(lambda: shared_memory.SharedMemory("poison", create=True, size=4096))
os._exit(0)
""",
        """
from multiprocessing import shared_memory
try:
    shared_memory.SharedMemory("poison")
    print("poisoned")
except (OSError, ImportError):
    print("clean")
""",
    ),
    _poison(
        "a lock on a shared file",
        """
import fcntl
for name in (os.__file__, sys.executable, "/", "/usr/lib", "/tmp"):
    fd = attempt(os.open, name, os.O_RDONLY)
    attempt(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
os._exit(0)
""",
        """
import fcntl, os, sys
for name in (os.__file__, sys.executable):
    if os.path.exists(name):
        fcntl.flock(os.open(name, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
print("clean")
""",
    ),
    Attack(
        name="later: memory of the program before",
        escape="its text is found in the memory of the next run",
        program=f"it = {_MARK!r}\nprint(it)\n" + f"# {_MARK}\n" * 100,
        then=scanning(_MARK),
    ),
    Attack(
        name="later: memory of the input before",
        escape="it is found in the memory of the next run",
        program="print(len(sys.stdin.read()))",
        stdin=_MARK + "-stdin " * 10,
        files={"data.txt": _MARK + "-file"},
        then=scanning(_MARK),
    ),
    Attack(
        name="later: memory of the output before",
        escape="it is found in the memory of the next run",
        program="print(('7f3a-' + 'eno-nur-fo-terces-eht'[::-1]) * 200)",
        then=scanning("7f3a-the-secret-of-run-one"),
    ),
    Attack(
        name="later: memory and folder full",
        escape="what it held is still counted when the next run needs it",
        program="""
try:
    file = open("fill", "wb", buffering=0)
    while True:
        file.write(bytes(1 << 20))
except OSError:
    pass
it = [bytearray(b"x") * (1 << 20) for _ in range(200)]
""",
        statuses=REFUSED,
        limits=Limits(wall_s=3.0, memory_bytes=128 * MIB, disk_bytes=64 * MIB),
        then="it = bytearray(b'x') * (80 << 20)\nprint('clean')",
    ),
    Attack(
        name="later: stopped in the middle",
        escape=_NEXT,
        program="import time\nopen('half', 'w').write('x')\nprint('half', flush=True)\n"
        "time.sleep(9)",
        statuses=frozenset({Status.TIMEOUT}),
        limits=SHORT,
        then="import os\nprint('clean' if not os.path.exists('half') else 'half')",
    ),
)
