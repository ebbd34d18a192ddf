"""More memory or time than a run may have."""

from __future__ import annotations

import dataclasses

from rollpacker.sandbox.sandbox import Limits, Status
from tests.sandbox.attacks.record import (
    ANY_END,
    LIMITS,
    MIB,
    REFUSED,
    STOPPED,
    Attack,
    sections,
)

_MEMORY = Limits(wall_s=1.0, memory_bytes=128 * MIB, disk_bytes=8 * MIB, output_bytes=64 << 10)
_CPU = Limits(wall_s=0.2, memory_bytes=128 * MIB)


def _memory(name: str, program: str) -> Attack:
    """Its processes together stay within the limit, and it does not get what it asks for."""
    return Attack(
        name=f"memory: {name}",
        escape="more resident memory than the limit and a tenth",
        program=program + "\nescaped('had it all')",
        statuses=REFUSED,
        limits=_MEMORY,
        memory=True,
    )


def _held(name: str, program: str) -> Attack:
    """Memory that is not the process's own. It may end well, if what it held was little."""
    return Attack(
        name=f"memory: {name}",
        escape="more memory than the limit and a tenth",
        program=program,
        statuses=ANY_END,
        limits=_MEMORY,
        memory=True,
    )


def _endless(name: str, program: str) -> Attack:
    return Attack(
        name=f"time: {name}",
        escape="it runs on after its limit",
        program=program,
        statuses=STOPPED | {Status.NONZERO, Status.KILLED, Status.MEMORY},
        limits=_CPU,
    )


_GREEDY_PROGRAMS = r"""
## bytes
it = b'x' * 10**10

## bytes, touched
it = bytearray(b'x') * (600 << 20)

## doubling
it = 'x'
while len(it) < 1 << 30:
    it += it

## a list
it = []
while len(it) < 10**8:
    it.append(object())

## many small blocks
it = []
for _ in range(4000):
    it.append(bytearray(b'x') * 100000)

## private mapping
import mmap
it = mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(it), 4096):
    it[at] = 1

## shared mapping
import mmap
it = mmap.mmap(-1, 600 << 20)
for at in range(0, len(it), 4096):
    it[at] = 1

## C library
libc.malloc.restype = ctypes.c_void_p
for _ in range(600):
    block = libc.malloc(ctypes.c_size_t(1 << 20))
    if not block:
        raise MemoryError
    ctypes.memset(block, 1, 1 << 20)

## an integer
it = 1 << 8 * 10**9
print(it.bit_length())

## factorials
it = [1 << 8_000_000 for _ in range(600)]

## a dictionary
it = {}
for i in range(10**8):
    it[i] = str(i)

## nested lists
it = []
for _ in range(10**8):
    it = [it]

## decompression
import zlib
it = zlib.decompress(zlib.compress(bytes(1 << 20)) * 1)
big = zlib.compressobj()
parts = [big.compress(bytes(1 << 20)) for _ in range(600)] + [big.flush()]
it = zlib.decompress(b''.join(parts))
it += it

## threads
import threading
def take():
    mine.append(bytearray(b"x") * (100 << 20))
mine = []
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if len(mine) < 6:
    raise MemoryError

## 40 children
import time
for _ in range(40):
    if os.fork() == 0:
        block = bytearray(b"x") * (100 << 20)
        time.sleep(1)
        os._exit(0)
time.sleep(1)

## caught again and again
it = []
while True:
    try:
        it.append(bytearray(b"x") * (1 << 20))
    except MemoryError:
        try:
            it.append(bytearray(4096))
        except MemoryError:
            pass

## a regular expression
import re
re.compile('(' + '|'.join(map(str, range(10**7))))
"""

_MEMORY_ATTACKS = (
    *(_memory(name, program) for name, program in sections(_GREEDY_PROGRAMS)),
    _held(
        "pipes",
        """
ends = []
try:
    while True:
        one, two = os.pipe()
        ends.append((one, two))
        os.set_blocking(two, False)
        attempt(os.write, two, bytes(1 << 20))
except OSError:
    print(len(ends), "pipes")
if len(ends) > 2000:
    escaped(f"{len(ends)} pipes")
""",
    ),
    _held(
        "socket pairs",
        """
import socket
pairs, held = [], 0
try:
    while True:
        one, two = socket.socketpair()
        pairs.append((one, two))
        for end in (one, two):
            end.setblocking(False)
            attempt(end.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            while sent := attempt(end.send, bytes(1 << 16)):
                held += sent
except OSError:
    print(len(pairs), "pairs", held, "bytes")
if held > 256 << 20:
    escaped(f"{held} bytes in {len(pairs)} socket pairs")
""",
    ),
    _held(
        "shared memory",
        """
from multiprocessing import shared_memory
it = []
while len(it) < 100:
    block = shared_memory.SharedMemory(create=True, size=10 << 20)
    block.buf[:] = bytes(10 << 20)
    it.append(block)
escaped("1 GB of shared memory")
""",
    ),
    _held(
        "open files that have no name",
        """
it = []
for i in range(200):
    try:
        file = open(f"f{i}", "wb", buffering=0)
        os.unlink(f"f{i}")
        it.append(file)
        for _ in range(10):
            file.write(bytes(1 << 20))
    except OSError:
        pass
held = sum(os.fstat(file.fileno()).st_size for file in it)
if held > 20 << 20:
    escaped(f"{held} bytes")
""",
    ),
    _held(
        "mappings of a file in memory",
        """
import mmap
file = open("f", "w+b")
file.truncate(1 << 30)
it = mmap.mmap(file.fileno(), 64 << 20)
for at in range(0, len(it), 4096):
    it[at] = 1
escaped("64 MB of a folder of 8 MB")
""",
    ),
    _held(
        "descriptors",
        """
fds = []
try:
    while True:
        fds.append(os.open(".", os.O_RDONLY))
except OSError:
    pass
if len(fds) > 5000:
    escaped(f"{len(fds)} descriptors")
""",
    ),
    _held(
        "file locks",
        """
import fcntl, time
file = open("f", "w+b")
until = time.monotonic() + 0.5
for i in range(0, 10**7, 2):
    fcntl.lockf(file, fcntl.LOCK_EX, 1, i)
    if time.monotonic() > until:
        break
""",
    ),
)

_ENDLESS_PROGRAMS = r"""
## a loop
while True:
    pass

## a power
pow(7, 10**9)

## a sum
sum(range(10**12))

## a regular expression
import re
re.match(r'(a+)+$', 'a' * 64 + 'b')

## a search in text
('a' * 10**6 + 'b').join(['x'] * 3).count('a' * 10**5 + 'c' * 2)
while True:
    list(range(10**6))

## digits of an integer
sys.set_int_max_str_digits(0)
str(7 ** (10**7))

## sorting
sorted(range(10**6), key=lambda n: [n] * 3)
while True:
    sorted('ab')

## decimals
import decimal
decimal.getcontext().prec = 10**7
print(decimal.Decimal(2).sqrt() ** 3)

## sleep
import time
time.sleep(1000)

## a lock
import threading
it = threading.Lock()
it.acquire()
it.acquire()

## a pipe
one, two = os.pipe()
os.read(one, 1)

## a named pipe
os.mkfifo('p')
open('p').read()

## select
import select
select.select([], [], [])

## pause in C
while True:
    libc.pause()

## signals ignored
import signal
for number in range(1, 65):
    attempt(signal.signal, number, signal.SIG_IGN)
while True:
    pass

## signals blocked
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    pass

## processor limit handled
import resource, signal
signal.signal(signal.SIGXCPU, lambda *_: None)
attempt(resource.setrlimit, resource.RLIMIT_CPU, (-1, -1))
while True:
    pass

## exceptions caught
while True:
    try:
        while True:
            pass
    except BaseException:
        pass

## alarms and timers turned off
import signal, threading, time
signal.alarm(0)
signal.setitimer(signal.ITIMER_REAL, 0)
threading.main_thread().join = lambda *a: None
time.monotonic = time.time = time.perf_counter = lambda: 0.0
while True:
    pass

## threads
import threading
def burn():
    while True:
        pass
for _ in range(4):
    attempt(threading.Thread(target=burn).start)
burn()

## an exception's text
class E(Exception):
    def __str__(self):
        while True:
            pass
raise E()

## tracing
sys.settrace(lambda *a: sys._getframe())
while True:
    len('x')
"""

_TIME_ATTACKS = (
    *(_endless(name, program) for name, program in sections(_ENDLESS_PROGRAMS)),
    Attack(
        name="time: just before the limit",
        escape="it is stopped although it was in time, or its time is misread",
        program="import time\ntime.sleep(0.2)",
        limits=dataclasses.replace(LIMITS, wall_s=2.0),
    ),
    Attack(
        name="time: false clocks",
        escape="the time measured is not the time taken",
        program="""
import time
sleep = time.sleep
for name in ("time", "monotonic", "perf_counter", "process_time", "time_ns", "sleep"):
    setattr(time, name, lambda *_: 0.0)
sleep(0.25)
""",
        prints=b"finished",
    ),
    Attack(
        name="time: input at its end",
        escape="it waits for input for ever",
        program="""
for _ in range(3):
    try:
        input()
        escaped("input")
    except EOFError:
        pass
""",
    ),
)

ATTACKS = (*_MEMORY_ATTACKS, *_TIME_ATTACKS)
