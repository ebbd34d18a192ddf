"""Nothing is left on the machine after many runs, attacks among them, and no run changes another.

One run in ten is an attack of `tests/sandbox/attacks`, in any order. Looked at before and after are
processes, mounts, control groups, files, System V objects, descriptors and memory.
`ROLLPACKER_NUMBER=10000` in the environment makes so many runs, in ten minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollpacker.sandbox import Limits, Sandbox, Status, open_sandbox
from tests.number import number_of
from tests.sandbox.attacks import ATTACKS, CLASSES, Attack
from tests.sandbox.attacks.bait import Bait, laid_out, resident_bytes
from tests.sandbox.attacks.harness import problems_of
from tests.sandbox.test_attacks import MISSING

WORKERS = 2
GROWTH_LIMIT_MIB = 10.0
HONEST_LIMITS = Limits(wall_s=30.0)


def left_behind() -> dict[str, int]:
    """What this process and its sandboxes have on the machine now."""
    return {
        "processes": len(descendants()),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": len(_own_cgroups()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def more_than(before: dict[str, int]) -> dict[str, int]:
    """What there is more of than before; what others of this process had may have gone."""
    after = left_behind()
    return {what: after[what] - count for what, count in before.items() if after[what] > count}


def _own_cgroups() -> list[Path]:
    """Control groups that have this process's number in their name."""
    found = Path("/sys/fs/cgroup").rglob(f"*rollpacker*-{os.getpid()}-*")
    return [path for path in found if path.is_dir()]


def descendants() -> list[int]:
    """Processes below this one, zombies included."""
    parents = {}
    for stat in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, level = [], {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += level
    return found


def memory_mib() -> dict[str, float]:
    """Resident memory that is no file's: of this process, and of the sandbox's."""
    return {
        "own": round(resident_bytes([os.getpid()]) / 2**20, 2),
        "workers": round(resident_bytes(descendants()) / 2**20, 2),
    }


async def many_runs(runs: int, bait: Bait) -> dict[str, Any]:
    """One in ten an attack. What they left, what went wrong, and how memory has grown."""
    rng = random.Random(7)
    usable = [attack for attack in ATTACKS if not attack.refused]
    rng.shuffle(usable)
    wrong: list[str] = []
    before = left_behind()
    async with open_sandbox("bwrap", workers=WORKERS) as box:

        async def one(number: int) -> None:
            attack = usable[number // 10 % len(usable)] if number % 10 == 0 else None
            if attack is None:
                wrong.extend(await honest(box, number))
            else:
                wrong.extend(await _attack(box, attack, bait))

        first = min(runs // 2, 1000)
        order = [*range(first)], [*range(first, runs)]
        for numbers in order:
            rng.shuffle(numbers)
        await _at_a_time(one, order[0])
        warm = memory_mib()
        await _at_a_time(one, order[1])
        grown = {key: value - warm[key] for key, value in memory_mib().items()}
    return {"wrong": wrong + bait.problems(), "before": before, "grown_mib": grown}


async def _at_a_time(one: Any, numbers: Sequence[int]) -> None:
    """As many as there are workers, and a few that wait."""
    places = asyncio.Semaphore(2 * WORKERS)

    async def placed(number: int) -> None:
        async with places:
            await one(number)

    for start in range(0, len(numbers), 500):
        await asyncio.gather(*(placed(number) for number in numbers[start : start + 500]))


async def honest(box: Sandbox, number: int) -> list[str]:
    """Reads its input, uses the standard library, and must give exactly its bytes."""
    program = "import json\nn = int(input())\nprint(json.dumps({'n': n, 'sum': sum(range(n))}))"
    result = await box.run(program, stdin=f"{number}\n", limits=HONEST_LIMITS)
    expected = f'{{"n": {number}, "sum": {number * (number - 1) // 2}}}\n'.encode()
    if result.status is Status.OK and result.stdout == expected:
        return []
    return [f"honest {number}: {result.status} {result.stdout[:80]!r} {result.detail}"]


async def _attack(box: Sandbox, attack: Attack, bait: Bait) -> list[str]:
    """What the attack reached that it must not reach."""
    result = await box.run(
        attack.text(bait.described()),
        stdin=attack.stdin,
        files=attack.files,
        limits=attack.limits,
    )
    return [f"{attack.name}: {problem}" for problem in problems_of(attack, result, bait)]


async def changed_by_poison(honest_runs: int, bait: Bait) -> list[str]:
    """Honest runs that came out different behind a program that spoils its interpreter."""
    changed: list[str] = []
    poisons = [attack for attack in CLASSES["later"] if attack.then is not None]
    async with open_sandbox("bwrap", workers=WORKERS) as box:

        async def one(number: int) -> None:
            changed.extend(await honest(box, number))

        for poison in poisons:
            text = poison.text(bait.described())
            run = [box.run(text, stdin=poison.stdin, limits=poison.limits) for _ in range(WORKERS)]
            await asyncio.gather(*run)
            await _at_a_time(one, range(honest_runs))
    return changed


@pytest.mark.skipif(MISSING is not None, reason=f"NOT TESTED: {MISSING}")
@pytest.mark.timeout(3600)
def test_runs_among_attacks_leave_nothing() -> None:
    """And every honest one gives its bytes, and memory does not grow."""
    with laid_out() as bait:
        found = asyncio.run(many_runs(number_of(400), bait))
    assert not found["wrong"], found["wrong"]
    until = time.monotonic() + 60.0
    while (left := more_than(found["before"])) and time.monotonic() < until:
        time.sleep(0.1)  # what has ended is taken down a moment later
    assert left == {}
    assert all(grown < GROWTH_LIMIT_MIB for grown in found["grown_mib"].values()), found


@pytest.mark.skipif(MISSING is not None, reason=f"NOT TESTED: {MISSING}")
@pytest.mark.timeout(3600)
def test_a_spoiled_interpreter_changes_no_later_run() -> None:
    """Of any of the programs that spoil one."""
    with laid_out() as bait:
        assert asyncio.run(changed_by_poison(number_of(50), bait)) == []
