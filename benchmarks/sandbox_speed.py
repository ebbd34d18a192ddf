"""What a sandboxed run costs: latency, runs per second on one core, accuracy of the wall limit, and
what is left after many runs.

Arms take turns: a bare interpreter, a cold run (a new interpreter in a worker that is there), a
warm run, and the start of a worker, which is paid once in `MAX_RUNS` runs. Runs are paced: the
worker has had time to make the next one ready. Runs per second of one core are back to back, by the
clock and by the processor time of all processes of a run (where a control group can count it),
which the target is held against if it is known.

    python benchmarks/sandbox_speed.py [--runs 2000] [--quick]
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lab import bench
from reward_runs import descendants

from rollpacker.rewards.math.math_reward import PROFILE as MATH
from rollpacker.sandbox import Limits, Profile, Sandbox, Status, open_sandbox
from rollpacker.sandbox.bwrap import interpreter
from rollpacker.sandbox.cgroup import own_groups
from rollpacker.sandbox.sandbox import PYTHON

HELLO = "print('hello')"
PAUSE_S = 0.01
TARGETS = {
    "cold over bare, ms": 8.0,
    "warm, ms": 5.0,
    "cold runs/s per core": 45.0,
    "warm runs/s per core": 200.0,
    "killed after the limit, ms": 100.0,
    "memory growth, MB": 10.0,
}


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(ordered[int(len(ordered) * 0.95)], 2),
        "min": round(ordered[0], 2),
        "max": round(ordered[-1], 2),
        "n": len(ordered),
    }


async def hello(box: Sandbox, profile: Profile | str) -> None:
    result = await box.run(HELLO, profile=profile)
    assert (result.status, result.stdout) == (Status.OK, b"hello\n"), result


async def bare(*flags: str) -> None:
    command = [interpreter(), *flags, "-c", "pass"]
    subprocess.run(command, env={}, stdin=subprocess.DEVNULL, check=True)


async def start_worker(box: Sandbox) -> None:
    """As the pool does it; then ended again."""
    worker = await box._started(PYTHON)
    await box._end(worker)


async def latencies(box: Sandbox, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each arm; they take turns."""
    arms: dict[str, Callable[[], Awaitable[None]]] = {
        "bare": lambda: bare("-I"),
        "bare without site": lambda: bare("-I", "-S"),
        "cold": lambda: hello(box, "cold"),
        "warm": lambda: hello(box, "python"),
        "warm math": lambda: hello(box, MATH),
        "start and end of a worker": lambda: start_worker(box),
    }
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 3):
        for name, run in arms.items():
            await asyncio.sleep(PAUSE_S)
            began = time.perf_counter()
            await run()
            if turn >= 3:
                taken[name].append((time.perf_counter() - began) * 1e3)
    return {name: summary(values) for name, values in taken.items()}


class ProcessorTime:
    """Of this process and all that it starts from now on, by a control group; None if there can be
    none."""

    def __init__(self) -> None:
        groups = own_groups(Path("/proc/self/cgroup"), Path("/proc/self/mountinfo"))
        name = f"rollpacker-speed-{os.getpid()}"
        self._before = groups.get("cpuacct")
        self._group = self._before / name if self._before is not None else None
        try:
            if self._group is not None:
                self._group.mkdir()
                self._enter(self._group)
        except OSError:
            self._group = None

    @staticmethod
    def _enter(group: Path) -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    def now_s(self) -> float | None:
        if self._group is None:
            return None
        return int((self._group / "cpuacct.usage").read_text()) / 1e9

    def close(self) -> None:
        if self._group is not None and self._before is not None:
            self._enter(self._before)
            time.sleep(0.2)  # for the last of the others to be gone
            self._group.rmdir()


async def throughput(rounds: int, each: int) -> dict[str, dict[str, float]]:
    """Runs per second with all processes on one processor; the two kinds take turns."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    processor = ProcessorTime()
    rates: dict[str, list[float]] = {}
    try:
        async with open_sandbox("bwrap", workers=1) as box:
            for _ in range(rounds):
                for name, profile in (("cold", "cold"), ("warm", "python")):
                    await hello(box, profile)
                    began, used = time.perf_counter(), processor.now_s()
                    for _ in range(each):
                        await hello(box, profile)
                    took, after = time.perf_counter() - began, processor.now_s()
                    rates.setdefault(f"{name}, by the clock", []).append(each / took)
                    if used is not None and after is not None:
                        rate = each / (after - used)
                        rates.setdefault(f"{name}, by processor time", []).append(rate)
    finally:
        processor.close()
        os.sched_setaffinity(0, allowed)
    return {name: summary(values) for name, values in rates.items()}


async def kill_delays(box: Sandbox, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds from the wall limit to the verdict."""
    programs = {"spins": "while True: pass", "sleeps": "import time; time.sleep(60)"}
    limit_s = 0.3
    late: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            result = await box.run(program, limits=Limits(wall_s=limit_s))
            assert result.status is Status.TIMEOUT, result
            late[name].append((time.perf_counter() - began - limit_s) * 1e3)
    return {name: summary(values) for name, values in late.items()}


def rss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def below() -> set[int]:
    return {process.pid for process in descendants()}


async def zygote() -> int:
    """The Python below this process that has children of its own (its next run)."""
    while True:
        found = descendants()
        parents = {process.parent for process in found}
        for one in found:
            if one.pid in parents and "python" in one.command.partition(" ")[0]:
                return one.pid
        await asyncio.sleep(0.01)


async def growth(num_runs: int) -> dict[str, Any]:
    """Memory (MB) and leftovers after many runs, a tenth of which misbehave."""
    bad = ("1/0", "import os; os.kill(os.getpid(), 9)", "print('x' * 2**21)", "x = b'x' * 10**10")
    fds, processes = len(os.listdir("/proc/self/fd")), below()
    workers, parents = [], []
    async with open_sandbox("bwrap", workers=1) as box:
        for i in range(num_runs):
            await box.run(bad[i // 10 % 4] if i % 10 == 9 else HELLO)
            if i % 1000 in (100, 950):
                workers.append(rss_kb(await zygote()))
            if i in (100, num_runs - 1):
                parents.append(rss_kb(os.getpid()))
    return {
        "runs": num_runs,
        "worker_mb": [round(value / 1024, 2) for value in workers],
        "worker_growth_mb": round((max(workers) - workers[0]) / 1024, 2),
        "parent_growth_mb": round((parents[-1] - parents[0]) / 1024, 2),
        "processes_left": len(below() - processes),
        "descriptors_left": len(os.listdir("/proc/self/fd")) - fds,
        "control_groups_left": sum(
            f"-{os.getpid()}-" in folder for folder, *_ in os.walk("/sys/fs/cgroup")
        ),
    }


async def measure(runs: int, *, quick: bool) -> dict[str, Any]:
    rounds = 10 if quick else 200
    async with open_sandbox("bwrap", workers=2) as box:
        capabilities = box.capabilities
        found: dict[str, Any] = {
            "memory": capabilities.memory,
            "can_fork": capabilities.can_fork,
            "latency_ms": await latencies(box, rounds),
            "kill_delay_ms": await kill_delays(box, 3 if quick else 25),
        }
    found["runs_per_s_on_one_core"] = await throughput(2 if quick else 8, 50)
    found["after_many_runs"] = await growth(150 if quick else runs)
    return found


def _rate(rates: dict[str, dict[str, float]], name: str) -> float:
    by_clock = rates[f"{name}, by the clock"]
    return rates.get(f"{name}, by processor time", by_clock)["median"]


def against_targets(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    latency, rates = found["latency_ms"], found["runs_per_s_on_one_core"]
    after = found["after_many_runs"]
    measured = {
        "cold over bare, ms": latency["cold"]["median"] - latency["bare without site"]["median"],
        "warm, ms": latency["warm"]["median"],
        "cold runs/s per core": _rate(rates, "cold"),
        "warm runs/s per core": _rate(rates, "warm"),
        "killed after the limit, ms": max(each["max"] for each in found["kill_delay_ms"].values()),
        "memory growth, MB": max(after["worker_growth_mb"], after["parent_growth_mb"]),
    }
    return {
        name: {
            "measured": round(value, 2),
            "target": TARGETS[name],
            "met": value >= TARGETS[name] if "runs/s" in name else value <= TARGETS[name],
        }
        for name, value in measured.items()
    }


def main(runs: int = 2000, quick: bool = False) -> dict[str, Any]:
    """`runs`: for the growth of memory."""
    found = asyncio.run(measure(runs, quick=quick))
    found["nice"] = os.nice(0)  # below 0: before other work on a machine that is not idle
    found["own_cpu_s"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 2)
    return found | {"targets": against_targets(found)}


if __name__ == "__main__":
    bench(main)
