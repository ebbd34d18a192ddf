"""What one answer of an environment costs that itself takes no time.

    python benchmarks/environment_speed.py [--episodes 1600] [--turns 8] [--at-a-time 256]

For a run, the processor time of its own process counts: it is what the controller spends on an
answer. Beside it: processor time of the processes of environments, and wall time. `line` is the
floor: a message of the same size to such a process and back (`workers/line.py`), with nothing of
environments around it. `parts` says where the run's own process spends its time (cProfile, as
shares of the whole).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from machine import write_result

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.environments.environment import Answered, Begun, EnvironmentConfig
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.workers.child import Child
from rollpacker.workers.line import Line

SOURCE = '''
class Blocking:
    def reset(self, row):
        return "begin"

    def step(self, message):
        return "go on", 0.0, False

class Async:
    async def reset(self, row):
        return "begin"

    async def step(self, message):
        return "go on", 0.0, False

def tool(x: int) -> int:
    """A tool.

    Args:
        x: A number.
    """
    return x
'''
_CALL = {"type": "function", "id": "1", "function": {"name": "tool", "arguments": {"x": 1}}}
MESSAGES = {
    "blocking": {"role": "assistant", "content": "x" * 100},
    "async": {"role": "assistant", "content": "x" * 100},
    "tools": {"role": "assistant", "content": "x" * 100, "tool_calls": [_CALL]},
}
ECHO = (
    "import sys; from rollpacker.workers.line import Line\n"
    "line = Line.inherited(int(sys.argv[1]))\n"
    "while True:\n"
    "    message = line.receive(); line.send(message.kind, message.number, message.payload)\n"
)


async def play(
    those: SupervisedEnvironments, number: int, message: dict[str, Any], num_turns: int
) -> None:
    sample = SampleId(PromptId("train", 0, number), 0, 0)
    assert isinstance(await those.begin(sample, {"prompt": "x"}, seed=number), Begun)
    for turn in range(1, num_turns + 1):
        assert isinstance(await those.act(sample, turn, message), Answered)
    those.end(sample)


async def all_played(
    those: SupervisedEnvironments, message: dict[str, Any], arguments: argparse.Namespace
) -> None:
    numbers = iter(range(arguments.episodes))

    async def one_after_another() -> None:
        for number in numbers:
            await play(those, number, message, arguments.turns)

    await asyncio.gather(*(one_after_another() for _ in range(arguments.at_a_time)))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def timed(
    config: EnvironmentConfig,
    message: dict[str, Any],
    arguments: argparse.Namespace,
    profile: cProfile.Profile | None,
) -> dict[str, float]:
    those = SupervisedEnvironments(config)
    await those.open()
    pool = those._pool
    assert pool is not None
    while sum(one.ready for one in pool._workers) < arguments.workers:
        await asyncio.sleep(0.05)
    await play(those, 10**9, message, 2)
    pids = [one.process.child.pid for one in pool._workers]
    wall, own, theirs = time.perf_counter(), time.process_time(), sum(map(cpu_s, pids))
    if profile is not None:
        profile.enable()
    await all_played(those, message, arguments)
    if profile is not None:
        profile.disable()
    seconds = {
        "wall": time.perf_counter() - wall,
        "cpu_of_the_run": time.process_time() - own,
        "cpu_of_the_environments": sum(map(cpu_s, pids)) - theirs,
    }
    await those.close()
    count = arguments.episodes * arguments.turns
    return {f"{name}_us_an_answer": round(1e6 * s / count, 1) for name, s in seconds.items()}


async def line_us(count: int, at_a_time: int) -> float:
    """Processor time of this process for a message to another one and back."""
    line, theirs = Line.pair()
    with theirs:
        command = [sys.executable, "-c", ECHO, str(theirs.fileno())]
        child = Child.start(command, "echo", guarded=False, pass_fds=[theirs.fileno()])
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    left = count

    def heard(message: Any) -> None:
        nonlocal left
        left -= 1
        if left >= at_a_time:
            line.post(2, 1, message.payload)
        elif left == 0:
            ended.set_result(None)

    line.attach(loop, heard, lambda: None)
    before = time.process_time()
    for _ in range(at_a_time):
        line.post(2, 1, b"x" * 200)
    await ended
    took = time.process_time() - before
    child.close()
    line.close()
    return round(1e6 * took / count, 1)


def parts(profile: cProfile.Profile) -> dict[str, float]:
    """Shares of the time spent in each file itself, the largest first."""
    stats = pstats.Stats(profile)
    by_file: dict[str, float] = defaultdict(float)
    for (file, _, name), (_, _, own_s, *_) in stats.stats.items():  # type: ignore[attr-defined]
        where = "/".join(Path(file).parts[-2:]) if file != "~" else name
        by_file[where] += own_s
    total = sum(by_file.values())
    largest = sorted(by_file, key=by_file.__getitem__, reverse=True)[:8]
    return {where: round(by_file[where] / total, 3) for where in largest}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=1600)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--at-a-time", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-result", action="store_true", help="write no result file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "line_cpu_us": asyncio.run(line_us(20_000, arguments.at_a_time)),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speed.py"
        path.write_text(SOURCE)
        for kind, message in MESSAGES.items():
            named: dict[str, Any] = (
                {"tools": (f"{path}:tool",)}
                if kind == "tools"
                else {"function": f"{path}:{kind.capitalize()}"}
            )
            config = EnvironmentConfig(workers=arguments.workers, **named)
            results[kind] = asyncio.run(timed(config, message, arguments, None))
            profile = cProfile.Profile()
            asyncio.run(timed(config, message, arguments, profile))
            results[kind]["parts"] = parts(profile)
            print(kind, results[kind])
    print(results)
    if not arguments.no_result:
        settings = ("episodes", "turns", "at_a_time", "workers")
        write_result(
            "environment_speed", {**{n: getattr(arguments, n) for n in settings}, **results}
        )


if __name__ == "__main__":
    main()
