"""Crashes, odd programs, and tricks with the interpreter that runs them."""

from __future__ import annotations

from rollpacker.sandbox.sandbox import Limits, Status
from tests.sandbox.attacks.record import (
    ANY_END,
    LIMITS,
    MIB,
    REFUSED,
    SHORT,
    Attack,
    sections,
)

_BOX = "the box, not the program, is at fault, or no longer works"
_HIJACK = "print('hijacked', flush=True)"


def _crash(name: str, program: str) -> Attack:
    return Attack(
        name=f"crash: {name}",
        escape=_BOX,
        program=program,
        statuses=REFUSED,
        limits=Limits(wall_s=2.0, memory_bytes=512 * MIB),
    )


def _ends(name: str, program: str) -> Attack:
    """Ends early, in whatever way; only the box matters."""
    return Attack(
        name=f"end: {name}", escape=_BOX, program=program, statuses=ANY_END, limits=SHORT,
        raises=True,
    )  # fmt: skip


def _source(name: str, program: str) -> Attack:
    """A program that may be none."""
    return Attack(
        name=f"program: {name}", escape=_BOX, program=program, statuses=ANY_END, raw=True,
        limits=Limits(wall_s=3.0, memory_bytes=512 * MIB),
    )  # fmt: skip


def _shadow(*files: str) -> Attack:
    """Files of the run's folder that a trusted part could import before the program begins."""
    return Attack(
        name=f"folder: {files[0]}",
        escape="code of the folder ran although the program does not import it",
        program="print('ran')",
        files=dict.fromkeys(files, _HIJACK),
        never=(b"hijacked",),
        prints=b"ran",
        raw=True,
    )


_CRASH_PROGRAMS = r"""
## null pointer
ctypes.string_at(0)

## abort
os.abort()

## stack of C
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self):
        return repr(self)
repr(A())
f = lambda: f()
f()
os.abort()

## stack of Python
sys.setrecursionlimit(10**9)
def f(n):
    return f(n + 1) + 1
f(0)

## freed twice
libc.free(id(bait))
libc.free(id(bait))
os.abort()

## memory overwritten
ctypes.memset(id(0), 0xff, 4096)
print(1 + 1, [0] * 10)
os.abort()

## heap overwritten
libc.sbrk.restype = ctypes.c_void_p
ctypes.memset(libc.sbrk(0) - (1 << 17), 0xff, 1 << 17)
{}.copy()
object()
os.abort()

## illegal instruction
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b'\x0f\x0b\0\0' * 8)
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
ctypes.CFUNCTYPE(None)(address)()
os.abort()

## unknown call number
libc.syscall(ctypes.c_long(-1))
os.abort()

## the highest signals
for number in range(34, 65):
    attempt(os.kill, os.getpid(), number)
os.abort()
"""

_SIGNALS = "KILL SEGV BUS FPE QUIT SYS INT TERM HUP PIPE USR1 ALRM XCPU XFSZ"

_CRASHES = (
    *(_crash(name, program) for name, program in sections(_CRASH_PROGRAMS)),
    *(
        _crash(f"SIG{name}", f"import signal\nos.kill(os.getpid(), signal.SIG{name})\nos.abort()")
        for name in _SIGNALS.split()
    ),
)

_END_PROGRAMS = r"""
## status 0 at once
os._exit(0)

## status 255
os._exit(255)

## a status that is no number
sys.exit({'a': 1})

## an enormous status
raise SystemExit(2**70)

## a status that lies
class Int(int):
    def __and__(self, other):
        raise OSError('no')
    __rand__ = __index__ = __int__ = __and__
sys.exit(Int(3))

## an exception whose text raises
class E(Exception):
    def __str__(self):
        raise E()
    __repr__ = __str__
raise E()

## an exception whose class lies
class M(type):
    def __getattribute__(c, n):
        os._exit(0)
class E(Exception, metaclass=M):
    pass
raise E()

## an exception that catches itself
e = Exception()
e.__context__ = Exception()
e.__context__.__context__ = e
raise e

## an excepthook
sys.excepthook = lambda *a: os._exit(0)
1 / 0

## an excepthook that raises
sys.excepthook = lambda *a: 1 / 0
1 / 0

## memory error of its own
raise MemoryError('not really')

## streams gone
del sys.stdout, sys.stderr, sys.stdin
print('x')

## streams that raise
class S:
    def __getattr__(self, name):
        raise OSError
sys.stdout = sys.stderr = S()

## streams closed
sys.stdout.close()
sys.stderr.close()
sys.stdin.close()

## modules gone
sys.modules.clear()

## modules replaced
for name in list(sys.modules):
    sys.modules[name] = None

## builtins gone
import builtins
for name in dir(builtins):
    attempt(delattr, builtins, name)

## os functions replaced
for name in dir(os):
    if callable(getattr(os, name)):
        setattr(os, name, lambda *a, **k: 0)

## harness functions replaced
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    for name, value in list(frame.f_globals.items()):
        if callable(value):
            frame.f_globals[name] = lambda *a, **k: 0

## return into the harness
import gc
for it in gc.get_objects():
    if getattr(it, '__name__', '') in ('serve', 'Run', 'Kernel', '_main', 'watch'):
        attempt(it)
        attempt(it, None, None)

## its own code run again
frame = sys._getframe(1)
attempt(exec, frame.f_code, frame.f_globals)

## thread hooks
import threading
threading._shutdown = lambda: 1 / 0
threading.excepthook = lambda *a: os._exit(3)

## profiling and audit
sys.setprofile(lambda *a: 1 / 0)

## audit hook
def hook(event, args):
    raise RuntimeError(event)
sys.addaudithook(hook)
open('x')

## all descriptors closed
os.closerange(0, 1 << 16)

## finalizers at the end
class D:
    def __del__(self):
        os._exit(0)
sys.keep = D()
"""

_ENDS = tuple(_ends(name, program) for name, program in sections(_END_PROGRAMS))

_SOURCES = (
    _source("empty", ""),
    _source("only comments", "# nothing\n\n# at all"),
    _source("NUL inside", "print(1)\0print(2)"),
    _source("byte order mark", "\ufeffprint('marked')"),
    _source("rot13", "# coding: rot13\ncevag('uryyb')"),
    _source("a coding that there is not", "# coding: none-such\nprint(1)"),
    _source("surrogates", "print('\ud800')"),
    _source("100,000 brackets", "(" * 100_000),
    _source("100,000 brackets closed", "[" * 100_000 + "]" * 100_000),
    _source("deep expression", "x = " + "-" * 50_000 + "1"),
    _source("long sum", "x = " + "+".join(["1"] * 50_000)),
    _source("a line of 10 MB", "x = '" + "a" * 10_000_000 + "'"),
    _source("200,000 lines", "pass\n" * 200_000),
    _source(
        "constant folding", "x = ((1 << 100000) * 1000, 'a' * 10**9, (0,) * 10**8)\ny = 9**9**7"
    ),
    _source("tabs and blanks", "if 1:\n\tx = 1\n        y = 2"),
    _source("Python 2", "print 'hello'\nexec 'x = 1'"),
    _source("assignment to __debug__", "__debug__ = 1"),
    _source("await outside", "await something()"),
    _source("return outside", "return 1"),
    _source("from the future", "from __future__ import braces"),
    _source("bidirectional marks", "x = '\u202e'  # \u2066 return \u2069"),
    _source("names that look alike", "\u0430 = 1\na = 2\nprint(\u0430)"),
)

_FOLDER = (
    _shadow("sitecustomize.py"),
    _shadow("usercustomize.py"),
    _shadow("json.py", "os.py", "types.py", "threading.py", "atexit.py", "traceback.py"),
    _shadow("encodings/__init__.py", "codecs.py", "linecache.py", "io.py", "abc.py", "site.py"),
    _shadow("__main__.py", "__init__.py", "__pycache__/x.pyc"),
    Attack(
        name="folder: .pth file",
        escape="a line of it ran",
        program="print('ran')",
        files={"evil.pth": f"import os; {_HIJACK}\n", "pyvenv.cfg": "home = /tmp\n",
               "python311._pth": "import site\n"},
        never=(b"hijacked",),
        prints=b"ran",
        raw=True,
    ),
    Attack(
        name="folder: conftest and configuration",
        escape="somebody reads it",
        program="print('ran')",
        files={"conftest.py": _HIJACK, "pytest.ini": "[pytest]\n", "setup.cfg": "x",
               ".pdbrc": _HIJACK, ".pythonrc.py": _HIJACK, ".netrc": "machine x"},
        never=(b"hijacked",),
        prints=b"ran",
        raw=True,
    ),
    Attack(
        name="folder: the program's own name",
        escape="the file runs in place of the program, or the box fails",
        program="print('ran')",
        files=dict.fromkeys(("main.py", "program.py", "solution.py", "stdin"), _HIJACK),
        never=(b"hijacked",),
        prints=b"ran",
        raw=True,
    ),
)  # fmt: skip

_INPUTS = (
    Attack(
        name="input: 20 MB that nobody reads",
        escape=_BOX,
        program="print('ran')",
        stdin=b"x" * (20 * MIB),
        prints=b"ran",
    ),
    Attack(
        name="input: bytes that are no text",
        escape=_BOX,
        program="print(len(sys.stdin.buffer.read()))",
        stdin=bytes(range(256)) * 4,
        prints=b"1024",
    ),
    Attack(
        name="input: surrogates",
        escape=_BOX,
        program="print(len(sys.stdin.buffer.read()) > 0)",
        stdin="\ud800\udfff\0",
        statuses=ANY_END,
    ),
    Attack(
        name="input: written to",
        escape=_BOX,
        program="""
attempt(os.write, 0, b"x" * 100)
attempt(os.ftruncate, 0, 1 << 40)
import mmap
attempt(mmap.mmap, 0, 100)
attempt(os.fchmod, 0, 0o777)
print(sys.stdin.read() == "abc")
""",
        stdin="abc",
        prints=b"True",
    ),
    Attack(
        name="forged reply of the zygote",
        escape="the box takes it for its own",
        program="""
import struct
for fd in range(0, 64):
    for frame in (struct.pack("<3scQiiddQII", b"rp1", b"e", 1, 0, 0, 0.0, 0.0, 0, 6, 0) + b"forged",
                  b"k" * 64, bytes(64), b"\\xff" * 64, b'{"exit_code": 0}\\n'):
        if fd not in (1, 2):
            attempt(os.write, fd, frame)
sys.exit(7)
""",
        statuses=frozenset({Status.NONZERO}),
        never=(b"forged",),
    ),
    Attack(
        name="forged reply on standard output",
        escape="the box takes it for its own",
        program="""
import struct
frame = struct.pack("<3scQiiddQII", b"rp1", b"e", 1, 0, 0, 0.0, 0.0, 0, 6, 0) + b"forged"
for fd in (1, 2):
    for _ in range(20):
        os.write(fd, frame)
sys.exit(7)
""",
        statuses=frozenset({Status.NONZERO}),
    ),
    Attack(
        name="pickle and eval of what it prints",
        escape="somebody runs it",
        program=r"""
mark = bait["folder"] + "/" + bait["mark"]
print(f"__import__('os').system('touch {mark}')")
os.write(1, b"cos\nsystem\n(S'touch " + mark.encode() + b"'\ntR.")
os.write(2, f"{{{{().__class__}}}} ${{{mark}}} $(touch {mark}) `touch {mark}`".encode())
""",
        limits=LIMITS,
    ),
)

ATTACKS = (*_CRASHES, *_ENDS, *_SOURCES, *_FOLDER, *_INPUTS)
