"""Signals to others, processes without end, and processes that stay."""

from __future__ import annotations

from rollpacker.sandbox.sandbox import Limits, Status
from tests.sandbox.attacks.record import ANY_END, SHORT, STOPPED, Attack

_OTHERS = "a process outside ended, stopped, or the box no longer works"
_STAYS = "a process is left on the host"


def _signal(name: str, program: str, *, bare: bool = False) -> Attack:
    """It may well hit itself."""
    return Attack(
        name=name,
        escape=_OTHERS,
        program="import signal\n" + program,
        statuses=ANY_END,
        limits=SHORT,
        bare=bare,
    )


def _stays(name: str, program: str, *, bare: bool = False) -> Attack:
    return Attack(
        name=name,
        escape=_STAYS,
        program="import time\n" + program,
        statuses=ANY_END,
        limits=SHORT,
        memory=True,
        bare=bare,
    )


_OFTEN = "for _ in range(bait['often']):\n    "

ATTACKS = (
    _signal(
        "kill a bystander",
        "attempt(os.kill, bait['bystander'], signal.SIGKILL)",
        bare=True,
    ),
    _signal(
        "stop a bystander",
        "attempt(os.kill, bait['bystander'], signal.SIGSTOP)",
        bare=True,
    ),
    _signal(
        "kill the group of a bystander",
        "attempt(os.killpg, bait['bystander'], signal.SIGKILL)",
        bare=True,
    ),
    _signal("stop the parent", "attempt(os.kill, os.getppid() or 1, signal.SIGSTOP)"),
    _signal("kill the parent", "attempt(os.kill, os.getppid() or 1, signal.SIGKILL)"),
    _signal(
        "every signal to pid 1",
        """
for number in range(1, 65):
    attempt(os.kill, 1, number)
""",
    ),
    _signal(
        "interrupt pid 1",
        """
import time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
    attempt(os.kill, 1, number)
    time.sleep(0.01)
""",
    ),
    _signal(
        "every signal to the small process numbers",
        """
for pid in range(1, 40):
    if pid != os.getpid():
        for number in (signal.SIGINT, signal.SIGCONT, signal.SIGUSR1, signal.SIGTERM):
            attempt(os.kill, pid, number)
""",
    ),
    _signal("stop the own group", "os.kill(0, signal.SIGSTOP)"),
    _signal("kill the own group", "os.kill(0, signal.SIGKILL)"),
    _signal("stop all", "os.kill(-1, signal.SIGSTOP)"),
    _signal("kill all", "attempt(os.kill, -1, signal.SIGKILL)\nattempt(os.kill, -1, 15)"),
    _signal(
        "kill every group",
        """
for group in range(2, 300):
    attempt(os.killpg, group, signal.SIGKILL)
""",
    ),
    _signal(
        "join the group of another",
        """
for group in (1, os.getppid(), bait["host_pid"], bait["bystander"]):
    attempt(os.setpgid, 0, group)
os.killpg(0, signal.SIGSTOP)
""",
    ),
    _signal("stop itself", "os.kill(os.getpid(), signal.SIGSTOP)"),
    _signal(
        "stop itself as a thread",
        """
import threading
threading.Thread(target=signal.pthread_kill, args=(threading.get_ident(), signal.SIGSTOP)).start()
threading.Event().wait()
""",
    ),
    _signal("a signal to its tracer", "os.kill(os.getpid(), signal.SIGTRAP)"),
    _signal(
        "queue signals without end",
        """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN, signal.SIGUSR1})
for _ in range(200000):
    attempt(os.kill, os.getpid(), signal.SIGRTMIN)
""",
    ),
    _stays(
        "daemon",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(20)
    os._exit(0)
time.sleep(0.05)
""",
        bare=True,
    ),
    _stays(
        "daemon that ignores signals",
        """
import signal
if os.fork() == 0:
    os.setsid()
    for number in range(1, 65):
        attempt(signal.signal, number, signal.SIG_IGN)
    libc.prctl(1, 0, 0, 0, 0)
    time.sleep(20)
""",
        bare=True,
    ),
    _stays(
        "a child holds the output open",
        """
if os.fork() == 0:
    time.sleep(20)
os._exit(0)
""",
        bare=True,
    ),
    _stays(
        "a grandchild holds the output open",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            time.sleep(1)
    os._exit(0)
os._exit(0)
""",
    ),
    _stays(
        "a thread stays",
        """
import threading
threading.Thread(target=time.sleep, args=(20,)).start()
""",
    ),
    _stays(
        "a thread that nobody waits for",
        """
import threading
threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
""",
    ),
    _stays("the main thread ends alone", "libc.pthread_exit(None)"),
    _stays(
        "the main thread ends, another goes on",
        """
import threading
threading.Thread(target=lambda: [time.sleep(0.01) for _ in range(10**6)]).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
""",
    ),
    _stays(
        "run from process to process",
        _OFTEN
        + """if os.fork():
        os._exit(0)
time.sleep(20)
""",
    ),
    _stays(
        "fork bomb",
        """
for _ in range(bait["often"]):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(5)
""",
    ),
    _stays(
        "fork bomb, each in its own session",
        """
for _ in range(bait["often"]):
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
time.sleep(5)
""",
    ),
    _stays(
        "vfork by call",
        """
for name in ("vfork", "fork"):
    for _ in range(20):
        if numbers.get(name) and call(name)[0] == 0:
            os._exit(0)
""",
    ),
    _stays(
        "spawn",
        _OFTEN + "attempt(os.posix_spawn, '/bin/sleep', ['sleep', '5'], {})\ntime.sleep(5)",
    ),
    _stays(
        "subprocess and shell",
        """
import subprocess
children = [attempt(subprocess.Popen, "sleep 5 & sleep 5 & setsid sleep 5 &", shell=True)
            for _ in range(20)]
attempt(os.system, "sleep 5 &")
time.sleep(1)
""",
    ),
    _stays(
        "multiprocessing",
        """
import multiprocessing
for method in ("fork", "spawn", "forkserver"):
    context = multiprocessing.get_context(method)
    for _ in range(5):
        it = attempt(lambda: context.Process(target=time.sleep, args=(5,), daemon=False).start())
time.sleep(1)
""",
    ),
    _stays(
        "zombies",
        _OFTEN
        + """try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        pass
time.sleep(5)
""",
    ),
    _stays(
        "thread bomb",
        """
import threading
for _ in range(20000):
    try:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    except RuntimeError:
        break
time.sleep(5)
""",
    ),
    Attack(
        name="thread bomb with small stacks",
        escape="more threads than a machine with the usual 32,768 process numbers can spare",
        program="""
import threading, time
threading.stack_size(32768)
for count in range(1, 3000):
    try:
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    except (RuntimeError, MemoryError):
        break
    if count == 2000:
        escaped(f"{count} threads")
time.sleep(5)
""",
        statuses=ANY_END,
        limits=Limits(wall_s=1.5),
        memory=True,
    ),
    _stays(
        "become another program again and again",
        """
count = int(os.environ.get("COUNT", 0))
os.environ["COUNT"] = str(count + 1)
attempt(os.execv, sys.executable, [sys.executable, "-c", "import os; os.execv('/bin/sleep', "
        "['sleep', '20'])"])
for path in ("/bin/sleep", "/usr/bin/sleep", "/lib64/ld-linux-x86-64.so.2"):
    attempt(os.execv, path, [path, "20"])
time.sleep(20)
""",
    ),
    _stays(
        "exit functions without end",
        """
import atexit
atexit.register(lambda: [time.sleep(0.01) for _ in iter(int, 1)])
""",
    ),
    _stays(
        "destructors without end",
        """
class Clings:
    def __del__(self):
        while True:
            time.sleep(0.01)
it = Clings()
del it
""",
    ),
    _stays("wait for a child of nobody", "attempt(os.wait)\nlibc.pause()"),
    Attack(
        name="leave in the middle of a fork",
        escape=_STAYS,
        program="""
import threading, time
def fork():
    for _ in range(10):
        try:
            if os.fork() == 0:
                time.sleep(20)
        except OSError:
            pass
for _ in range(4):
    threading.Thread(target=fork).start()
os._exit(0)
""",
        statuses=frozenset({Status.OK}) | STOPPED,
    ),
)
