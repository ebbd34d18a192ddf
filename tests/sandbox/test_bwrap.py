"""The bubblewrap backend: how runs end, and what is left when they and their pool are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollpacker.sandbox import (
    I_ACCEPT,
    Limits,
    Profile,
    RunResult,
    Sandbox,
    SandboxUnavailable,
    Status,
    open_sandbox,
    zygote_process,
)
from rollpacker.sandbox.sandbox import PYTHON

HELLO = "print('hello')"
ENDLESS = "while True: pass"


def _cannot_run() -> str:
    if not sys.platform.startswith("linux"):
        return "not Linux"

    async def opened() -> None:
        async with open_sandbox("bwrap", workers=1):
            pass

    try:
        asyncio.run(opened())
    except SandboxUnavailable as error:
        return str(error)
    return ""


CANNOT = _cannot_run()
needs_bwrap = pytest.mark.skipif(bool(CANNOT), reason=f"NOT TESTED, no bubblewrap here: {CANNOT}")


def in_box(use: Callable[[Sandbox], Awaitable[None]], **options: object) -> None:
    """Run `use` with a sandbox in a loop of its own."""

    async def opened() -> None:
        async with open_sandbox("bwrap", **options) as box:
            await use(box)

    asyncio.run(opened())


def one(program: str, **options: object) -> RunResult:
    results = []

    async def use(box: Sandbox) -> None:
        results.append(await box.run(program, **options))

    in_box(use, workers=1)
    return results[0]


def descendants(pid: int) -> dict[int, str]:
    """Names of all processes below this one, zombies included."""
    parents, names = {}, {}
    for stat in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            before, _, after = stat.read_text().rpartition(")")
            names[int(stat.parent.name)] = before.partition("(")[2]
            parents[int(stat.parent.name)] = int(after.split()[1])
    found, level = {}, {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= {child: names[child] for child in level}
    return found


def interpreters(profile: str) -> list[int]:
    """Those below this process that serve a profile, or are about to."""
    found = []
    for pid, name in descendants(os.getpid()).items():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if name.startswith("python") and profile.encode() in command:
                found.append(pid)
    return found


async def zygotes(box: Sandbox) -> list[int]:
    """Warm interpreters of this box, once each has its next run (or its present one) ready."""
    idle = box._idle.get(PYTHON, [])
    busy = [call.worker for call in box._calls.values() if call.worker is not None]
    pids = [worker.pid for worker in (*idle, *busy) if worker.profile == PYTHON]
    async with asyncio.timeout(20.0):
        while not all(map(descendants, pids)):
            await asyncio.sleep(0.01)
    below = descendants(os.getpid())
    assert all(below[pid].startswith("python") for pid in pids)
    return pids


ENDINGS = [
    ("print(1)", Status.OK, 0),
    ("", Status.OK, 0),
    ("# nothing", Status.OK, 0),
    ("1/0", Status.NONZERO, 1),
    ("raise SystemExit", Status.OK, 0),
    ("exit(7)", Status.NONZERO, 7),
    ("import sys; sys.exit('bye')", Status.NONZERO, 1),
    ("import os; os._exit(9)", Status.NONZERO, 9),
    ("def f(:", Status.NONZERO, 1),
    ("print(1)\0", Status.NONZERO, 1),
    ("\ufeffprint(1)", Status.OK, 0),
    ("print('\ud800')", Status.NONZERO, 1),
    ("# coding: no-such\n", Status.NONZERO, 1),
    ("(" * 100_000, Status.NONZERO, 1),
    ("__debug__ = 1", Status.NONZERO, 1),
    ("input()", Status.NONZERO, 1),
    ("import os; os.kill(os.getpid(), 9)", Status.KILLED, None),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", Status.KILLED, None),
    ("import os; os.abort()", Status.KILLED, None),
    ("import ctypes; ctypes.string_at(0)", Status.KILLED, None),
    ("raise MemoryError", Status.MEMORY, None),
    ("x = b'x' * 10**10", Status.MEMORY, None),
    ("x = []\nwhile True: x.append(bytearray(1 << 22))", Status.MEMORY, None),
    ("while True: pass", Status.TIMEOUT, None),
    ("import time; time.sleep(60)", Status.TIMEOUT, None),
    ("import os\nwhile True: os.write(1, b'x' * 65536)", Status.OUTPUT, None),
    ("import os\nwhile True: os.write(2, b'x' * 999)", Status.OUTPUT, None),
]


@needs_bwrap
@pytest.mark.parametrize("profile", ["python", "cold"])
def test_how_runs_end(profile: str) -> None:
    ended = {}

    async def use(box: Sandbox) -> None:
        for program, status, _ in ENDINGS:
            # A busy machine starts slowly, and where it gives no processor there is no verdict.
            for wall_s in (0.7, 5.0, 20.0) if status is Status.TIMEOUT else (20.0,):
                limits = Limits(wall_s=wall_s, memory_bytes=128 << 20, output_bytes=1 << 18)
                result = await box.run(program, limits=limits, profile=profile)
                if result.status is not Status.SANDBOX_ERROR:
                    break
            ended[program[:60]] = (result.status, result.exit_code)

    in_box(use, workers=1)
    assert ended == {program[:60]: (status, code) for program, status, code in ENDINGS}


@needs_bwrap
def test_program_sees_stdin_its_files_and_nothing_else_to_write() -> None:
    program = """
import os, sys, helper, pathlib
print(sys.stdin.read(), helper.x, pathlib.Path("in/a b.txt").read_bytes(), sorted(os.listdir()))
open("new", "w").write("x")
for place in ("/", "/dev", "/usr", "/usr/lib", "/site", "/proc", sys.prefix):
    try:
        open(place + "/new", "w")
        print("wrote to", place)
    except OSError:
        pass
print(os.path.exists("/etc"), os.path.exists("/home"), sorted(os.environ))
"""
    files = {"helper.py": "x = 5", "in/a b.txt": b"\xff"}
    result = one(program, stdin="typed é", files=files)
    assert result.stderr == b""
    lines = result.stdout.decode().splitlines()
    assert lines[0] == "typed é 5 b'\\xff' ['helper.py', 'in']"
    assert lines[1].startswith("False False ['HOME', 'LANG'")
    assert not any(name in lines[1] for name in os.environ if name.startswith(("ROLL", "PYTEST")))


@needs_bwrap
def test_measures() -> None:
    result = one("x = bytearray(b'x') * (100 << 20)\nimport time\ntime.sleep(0.2)")
    assert result.status is Status.OK
    assert 100 << 20 <= result.peak_memory_bytes < 160 << 20
    assert 0.2 <= result.wall_s < 10.0  # its limit
    assert 0.0 < result.cpu_s < 5.0


@needs_bwrap
def test_processor_time_is_limited_on_its_own() -> None:
    result = one("while True: pass", limits=Limits(wall_s=120.0, cpu_s=1.0))
    assert result.status is Status.TIMEOUT
    assert result.cpu_s < 5.0


@needs_bwrap
def test_output_is_kept_up_to_the_limit() -> None:
    limits = Limits(output_bytes=1000)
    exact = one("print('x' * 999)", limits=limits)
    assert (exact.status, len(exact.stdout), exact.truncated) == (Status.OK, 1000, False)
    more = one("import sys\nprint('x' * 5000)\nprint('e', file=sys.stderr)", limits=limits)
    assert (more.status, len(more.stdout), more.truncated) == (Status.OUTPUT, 1000, True)


@needs_bwrap
def test_a_child_that_holds_the_output_open_delays_nothing() -> None:
    program = """
import os, time
try:
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
except PermissionError:
    pass
print("done", flush=True)
os._exit(0)
"""
    began = time.monotonic()
    result = one(program, limits=Limits(wall_s=50.0))
    assert (result.status, result.stdout) == (Status.OK, b"done\n")
    assert time.monotonic() - began < 40.0  # and not the 60 s of its child


@needs_bwrap
def test_a_run_changes_nothing_for_the_next() -> None:
    poison = """
import builtins, json, os, sys, signal
builtins.print = json.dumps = len = None
sys.modules["math"] = None
open("sitecustomize.py", "w").write("print('caught')")
open("json.py", "w").write("dumps = None")
os.environ["X"] = "1"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
    honest = "import json, os, math\nprint(json.dumps([1]), os.listdir(), 'X' in os.environ)"
    out = []

    async def use(box: Sandbox) -> None:
        await box.run(poison)
        out.append((await box.run(honest)).stdout)
        draws = [(await box.run("import random; print(random.random())")).stdout for _ in range(3)]
        assert len(set(draws)) == 3

    in_box(use, workers=1)
    assert out == [b"[1] [] False\n"]


@needs_bwrap
def test_a_profile_of_a_tenant_has_its_packages_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "whatever"
    folder.mkdir()
    (folder / "tool.py").write_text("ANSWER = 42\n")
    (folder / "ready.py").write_text("import tenant.deep.tool as tool\nasked = tool.ANSWER\n")
    profile = Profile(
        name="tenant",
        packages=("yaml",),
        folders=(("tenant.deep", str(folder)),),
        warm=("fcntl", "resource", "tenant.deep.ready"),
    )
    program = """
import os, sys
import yaml
print(yaml.safe_load("[1]"), sys.modules["tenant.deep.ready"].asked)
print(sorted(os.listdir("/site")), sorted(os.listdir("/site/tenant")))
for other in ("numpy", "rollpacker", "rollpacker.sandbox", "kernel"):
    try:
        __import__(other)
        print(other, "was found")
    except ImportError:
        pass
try:
    open("/site/tenant/deep/tool.py", "w")
except OSError:
    print("read-only")
"""
    result = one(program, profile=profile)
    assert result.stdout == b"[1] 42\n['tenant', 'yaml'] ['deep']\nread-only\n", result.stderr


@needs_bwrap
def test_a_profile_that_lacks_a_package_is_refused() -> None:
    profile = Profile(name="tenant", packages=("json", "no_such_package"))
    with pytest.raises(ValueError, match=r"'tenant' needs .* installed here: no_such_package"):
        one(HELLO, profile=profile)


@needs_bwrap
@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../b", "", ".", "x\0y", "x" * 256])
def test_file_names_that_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a file of a run"):
        one(HELLO, files={name: "x"})


@needs_bwrap
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x": bytes((64 << 20) + 1)}, "these need 67112960"),
        ({str(i): b"x" for i in range((64 << 20) // 4096 + 1)}, "1024 files and folders"),
        ({f"{i}/{i}": "" for i in range(513)}, "was given 1026"),
        ({"a": "", "a/b": ""}, "a folder as well: 'a'"),
        ({"/".join("x" * 600): ""}, "more than 1024 bytes"),
    ],
    ids=["size", "number", "folders", "both", "deep"],
)
def test_files_that_do_not_fit_are_refused(files: dict[str, str | bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one(HELLO, files=files)


@needs_bwrap
@pytest.mark.parametrize("profile", ["python", "cold"])
def test_files_that_just_fit_are_all_there(profile: str) -> None:
    limits = Limits(disk_bytes=16 * 4096, max_files=16)
    files = {f"{i}/{i}": "x" for i in range(8)} | {"big": b""}
    del files["7/7"]
    files["big"] = bytes(9 * 4096)
    program = "import os\nprint(sum(len(files) for _, _, files in os.walk('.')))"
    result = one(program, files=files, limits=limits, profile=profile)
    assert (result.status, result.stdout) == (Status.OK, b"8\n"), result


@needs_bwrap
@pytest.mark.parametrize("profile", ["python", "cold"])
def test_what_honest_programs_expect_of_an_interpreter(profile: str) -> None:
    program = """
import multiprocessing, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
print(__name__, os.path.basename(__file__), sys.argv, sorted(os.environ))
with ThreadPoolExecutor(16) as pool:
    print(sum(pool.map(lambda i: time.sleep(0.05) or i, range(16))))
lock = multiprocessing.Lock()
with lock:
    print("locked")
def deep(n):
    return n and 1 + deep(n - 1)
sys.setrecursionlimit(60_000)
print(deep(50_000))
"""
    result = one(program, profile=profile)
    assert result.stdout.decode().splitlines() == [
        "__main__ main.py ['main.py'] ['HOME', 'LANG', 'PATH', 'TMPDIR']",
        "120",
        "locked",
        "50000",
    ], result.stderr


@needs_bwrap
def test_a_cold_run_is_a_new_interpreter() -> None:
    program = "import os, sys\nprint('json' in sys.modules, hash('x'), os.getpid() > 1)"

    async def use(box: Sandbox) -> None:
        warm = [(await box.run(program)).stdout.split() for _ in range(2)]
        cold = [(await box.run(program, profile="cold")).stdout.split() for _ in range(3)]
        assert {words[0] for words in warm} == {b"True"}
        assert {words[0] for words in cold} == {b"False"}
        assert len({words[1] for words in cold}) == 3

    in_box(use, workers=1)


@needs_bwrap
def test_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="no sandbox profile 'pyhton'; there are python"):
        one(HELLO, profile="pyhton")


async def begun(box: Sandbox, count: int = 1) -> None:
    """Until so many workers have been given a program, and have had a moment to begin with it."""
    async with asyncio.timeout(30.0):
        while sum(call.worker is not None for call in box._calls.values()) < count:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)


@needs_bwrap
def test_cancelling_ends_the_run_and_the_worker_goes_on() -> None:
    async def use(box: Sandbox) -> None:
        await box.run(HELLO)
        before = await zygotes(box)
        running = asyncio.create_task(box.run("while True: pass", limits=Limits(wall_s=60.0)))
        await begun(box)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(40.0):
            assert (await box.run(HELLO)).stdout == b"hello\n"
        assert await zygotes(box) == before

    in_box(use, workers=1)


@needs_bwrap
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_failed_worker_is_named_and_replaced(
    how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(box: Sandbox) -> None:
        await box.run(HELLO)
        (victim,) = await zygotes(box)
        slow = asyncio.create_task(box.run(ENDLESS, limits=Limits(wall_s=60.0)))
        await begun(box)
        os.kill(victim, how)
        result = await slow
        assert result.status is Status.SANDBOX_ERROR
        assert f"python-1 (pid {victim})" in result.detail
        assert (await box.run(HELLO)).stdout == b"hello\n"
        assert victim not in descendants(os.getpid())
        victims.append(victim)

    victims: list[int] = []
    with caplog.at_level(logging.WARNING):
        in_box(use, workers=1)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert f"python-1 (pid {victims[0]})" in warnings[0]


@needs_bwrap
def test_a_stopped_worker_is_noticed_long_before_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(box: Sandbox) -> None:
        await box.run(HELLO)
        stuck = asyncio.create_task(box.run(ENDLESS, limits=Limits(wall_s=60.0)))
        await begun(box)
        (victim,) = await zygotes(box)
        os.kill(victim, signal.SIGSTOP)
        async with asyncio.timeout(40.0):
            result = await stuck
            assert (await box.run(HELLO)).stdout == b"hello\n"
        assert result.status is Status.SANDBOX_ERROR
        assert f"(pid {victim}) was stopped" in result.detail

    with caplog.at_level(logging.WARNING):
        in_box(use, workers=1)
    assert len(caplog.records) == 1


@needs_bwrap
def test_a_worker_that_is_stopped_while_it_starts_is_noticed() -> None:
    async def use(box: Sandbox) -> None:
        starting = asyncio.create_task(box.run(HELLO, profile="cold"))
        async with asyncio.timeout(30.0):
            while not (victims := interpreters("cold")) and not starting.done():
                await asyncio.sleep(0.001)
            with contextlib.suppress(IndexError, ProcessLookupError):  # it was quicker
                os.kill(victims[0], signal.SIGSTOP)
            result = await starting
            assert result.status in (Status.SANDBOX_ERROR, Status.OK)
            assert (await box.run(HELLO, profile="cold")).stdout == b"hello\n"

    in_box(use, workers=1)


@needs_bwrap
def test_a_failed_worker_is_replaced_before_anyone_asks() -> None:
    async def use(box: Sandbox) -> None:
        running = asyncio.create_task(box.run(ENDLESS, limits=Limits(wall_s=60.0)))
        await begun(box)
        (victim,) = await zygotes(box)
        os.kill(victim, signal.SIGKILL)
        assert (await running).status is Status.SANDBOX_ERROR
        async with asyncio.timeout(40.0):
            while not await zygotes(box):
                await asyncio.sleep(0.01)
        assert await zygotes(box) != [victim]

    in_box(use, workers=1)


@needs_bwrap
@pytest.mark.parametrize("profile", ["python", "cold"])
def test_a_program_that_stops_itself_is_no_stopped_worker(profile: str) -> None:
    program = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    assert one(program, limits=Limits(wall_s=0.5), profile=profile).status is Status.TIMEOUT


@needs_bwrap
def test_cancelling_at_any_moment_harms_no_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker that ends its run too slowly is ended itself, and on a busy machine all are slow.
    monkeypatch.setattr(zygote_process, "GRACE_S", 60.0)

    async def use(box: Sandbox) -> None:
        for i in range(30):
            running = asyncio.create_task(box.run("while True: pass"))
            await asyncio.sleep(i / 2000)
            running.cancel()
            await asyncio.wait({running})
        assert (await box.run(HELLO)).stdout == b"hello\n"

    with caplog.at_level(logging.WARNING):
        in_box(use, workers=2)
    assert caplog.records == []


@needs_bwrap
def test_cancelling_does_not_wait_for_a_stopped_worker() -> None:
    async def use(box: Sandbox) -> None:
        await box.run(HELLO)
        stuck = asyncio.create_task(box.run(ENDLESS, limits=Limits(wall_s=100.0)))
        await begun(box)
        (victim,) = await zygotes(box)
        os.kill(victim, signal.SIGSTOP)
        stuck.cancel()
        async with asyncio.timeout(20.0):
            assert (await box.run(HELLO)).stdout == b"hello\n"

    in_box(use, workers=1)


@needs_bwrap
def test_a_program_cannot_stop_or_end_what_watches_it() -> None:
    program = """
import os, time
for number in range(1, 65):
    for pid in range(1, os.getpid()):
        try:
            os.kill(pid, number)
        except OSError:
            pass
time.sleep(0.1)
print("alive")
"""

    async def use(box: Sandbox) -> None:
        await box.run(HELLO)
        (worker,) = await zygotes(box)
        for profile in ("python", "cold"):
            result = await box.run(program, limits=Limits(wall_s=5.0), profile=profile)
            assert (result.status, result.stdout) == (Status.OK, b"alive\n"), result
        assert (await box.run(HELLO)).stdout == b"hello\n"
        assert await zygotes(box) == [worker]

    in_box(use, workers=1)


@needs_bwrap
def test_a_worker_that_sends_no_reply_is_replaced() -> None:
    async def use(box: Sandbox) -> None:
        await box.run(HELLO)
        (victim,) = await zygotes(box)
        running = asyncio.create_task(box.run(ENDLESS, limits=Limits(wall_s=60.0)))
        await begun(box)
        (worker,) = [call.worker for call in box._calls.values()]
        worker._reader.feed_data(b"x" * 4096)
        result = await running
        assert result.status is Status.SANDBOX_ERROR
        assert "no reply" in result.detail
        assert (await box.run(HELLO)).stdout == b"hello\n"
        assert victim not in descendants(os.getpid())

    in_box(use, workers=1)


@needs_bwrap
def test_a_closed_sandbox_runs_nothing() -> None:
    async def use() -> None:
        async with open_sandbox("bwrap", workers=1) as box:
            running = [asyncio.ensure_future(box.run("while True: pass")) for _ in range(3)]
            await begun(box)
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert ends[0].status is Status.KILLED
        assert [type(end) for end in ends[1:]] == [RuntimeError, RuntimeError]

    asyncio.run(use())


@needs_bwrap
def test_a_stopped_worker_delays_nobody_else() -> None:
    async def use(box: Sandbox) -> None:
        both = [asyncio.create_task(box.run("import time; time.sleep(0.4)")) for _ in range(2)]
        await asyncio.gather(*both)
        stuck = asyncio.create_task(box.run(ENDLESS, limits=Limits(wall_s=60.0)))
        await begun(box)
        (call,) = box._calls.values()
        os.kill(call.worker.pid, signal.SIGSTOP)
        async with asyncio.timeout(50.0):
            for _ in range(20):
                assert (await box.run(HELLO)).stdout == b"hello\n"
        assert (await stuck).status is Status.SANDBOX_ERROR

    in_box(use, workers=2)


@needs_bwrap
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_an_idle_worker_that_failed_costs_no_run(how: signal.Signals) -> None:
    async def use(box: Sandbox) -> None:
        await box.run(HELLO)
        (victim,) = await zygotes(box)
        os.kill(victim, how)
        await asyncio.sleep(0.3)
        assert (await box.run(HELLO)).status is Status.OK

    in_box(use, workers=1)


@needs_bwrap
def test_more_runs_than_workers_wait_their_turn() -> None:
    async def use(box: Sandbox) -> None:
        results = await asyncio.gather(*(box.run(f"print({i})") for i in range(40)))
        assert [int(result.stdout) for result in results] == list(range(40))
        assert len(await zygotes(box)) <= 2

    in_box(use, workers=2)


def _open_files() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {os.readlink(entry)}")
    return {one for one in found if not one.endswith(f"/proc/{os.getpid()}/fd")}  # this look's own


def _cgroups() -> list[str]:
    return [path for path, *_ in os.walk("/sys/fs/cgroup") if f"-{os.getpid()}-" in path]


@needs_bwrap
def test_nothing_is_left_after_close() -> None:
    before = _open_files(), descendants(os.getpid())

    async def use(box: Sandbox) -> None:
        programs = [HELLO, "while True: pass", "import os; os.kill(os.getpid(), 9)"]
        limits = Limits(wall_s=0.2)
        await asyncio.gather(*(box.run(p, limits=limits) for p in programs * 3))
        for _ in range(2):
            await box.run(HELLO, profile="cold")
        forgotten = asyncio.ensure_future(box.run("while True: pass"))
        await asyncio.sleep(0.1)
        forgotten.cancel()

    in_box(use, workers=3)
    files, processes = before  # of those, some that earlier tests left may go meanwhile
    assert _open_files() <= files and descendants(os.getpid()).keys() <= processes.keys()
    assert _cgroups() == []


@needs_bwrap
def test_nothing_is_left_when_the_owner_is_killed() -> None:
    script = """
import asyncio, sys
from rollpacker.sandbox import open_sandbox
async def main():
    async with open_sandbox("bwrap") as box:
        runs = [asyncio.create_task(box.run("while True: pass")) for _ in range(2)]
        print("ready", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""

    async def kill_one() -> set[int]:
        owner = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
        )
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"ready\n"
        async with asyncio.timeout(30.0):
            while len(below := set(descendants(owner.pid))) < 6:
                await asyncio.sleep(0.01)
        owner.kill()
        await owner.wait()
        return below

    below = asyncio.run(kill_one())
    until = time.monotonic() + 30.0
    while (left := [pid for pid in below if os.path.exists(f"/proc/{pid}")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.05)
    assert left == []


@needs_bwrap
def test_loops_one_after_the_other() -> None:
    for _ in range(3):
        assert one(HELLO).stdout == b"hello\n"


@needs_bwrap
def test_memory_of_all_processes_together_is_bounded() -> None:
    program = """
import os, time
try:
    for _ in range(8):
        if os.fork() == 0:
            block = bytearray(b"x") * (40 << 20)
            time.sleep(1)
            os._exit(0)
    while True:
        os.wait()
except OSError:
    pass
"""

    async def use(box: Sandbox) -> None:
        if not box.capabilities.can_fork:
            pytest.skip(f"NOT TESTED, no control groups here: memory {box.capabilities.memory}")
        result = await box.run(program, limits=Limits(memory_bytes=100 << 20))
        assert result.peak_memory_bytes <= 110 << 20

    in_box(use, workers=1)


@needs_bwrap
def test_self_test_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []

    async def use(box: Sandbox) -> None:
        seen.append(box.capabilities)

    in_box(use, workers=1)
    (kept,) = (tmp_path / "rollpacker").iterdir()
    assert len(seen[0].passed) >= 10
    in_box(use, workers=1)
    assert seen[0] == seen[1]
    kept.write_text("no json")
    in_box(use, workers=1)
    assert seen[2].passed == seen[0].passed
    assert seen[2].seconds != seen[0].seconds


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxUnavailable) as caught:
        one(HELLO)
    message = str(caught.value)
    assert len(message.splitlines()) <= 10
    for part in ("bwrap", "unshare -Ur true", "apt-get install bubblewrap", "sandbox.url"):
        assert part in message
    assert "sandbox.allow_unsandboxed_code" in message


def test_a_bubblewrap_that_may_not_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    before = _open_files() if sys.platform.startswith("linux") else None
    with pytest.raises(SandboxUnavailable, match="uid map: Permission denied"):
        one(HELLO)
    if before is not None:
        assert _open_files() == before


def test_no_isolation_needs_the_sentence() -> None:
    async def opened(sentence: str | None) -> RunResult:
        async with open_sandbox("none", allow_unsandboxed_code=sentence) as box:
            assert box.capabilities.backend == "none"
            return await box.run("print(input())", stdin="x\n", limits=Limits(memory_bytes=1 << 30))

    with pytest.raises(SandboxUnavailable, match="without any isolation"):
        asyncio.run(opened("yes"))
    assert asyncio.run(opened(I_ACCEPT)).stdout == b"x\n"


def test_no_isolation_still_has_limits() -> None:
    ended = {}
    programs = {
        "while True: pass": Status.TIMEOUT,
        "print('x' * 10**7)": Status.OUTPUT,
        "exit(3)": Status.NONZERO,
        "import os; os.kill(os.getpid(), 9)": Status.KILLED,
        "x = b'x' * 10**10": Status.NONZERO,
    }

    async def opened() -> None:
        async with open_sandbox("none", allow_unsandboxed_code=I_ACCEPT, wall_s=1.0) as box:
            for program in programs:
                ended[program] = (await box.run(program)).status

    asyncio.run(opened())
    assert ended == programs


def test_no_isolation_where_nothing_isolates_and_it_was_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    async def opened() -> None:
        async with open_sandbox(allow_unsandboxed_code=I_ACCEPT) as box:
            assert box.capabilities.backend == "none"

    asyncio.run(opened())
    assert "WITHOUT ISOLATION" in caplog.text


@needs_bwrap
def test_isolation_is_used_where_there_is_any() -> None:
    async def use(box: Sandbox) -> None:
        assert box.capabilities.backend == "bwrap"

    in_box(use, allow_unsandboxed_code=I_ACCEPT)
