"""Is every attack contained, and is anything left after ten thousand runs?

1. The whole corpus of `tests/sandbox/attacks`, in every sandbox of this machine: N of N.
2. 10,000 runs, one in ten an attack, in any order: what is on the machine before and after
   (processes, mounts, control groups, files, System V objects, descriptors, memory), and whether
   every honest program among them gave its bytes.
3. After each program that spoils its interpreter, 1,000 honest ones: whether any gave other bytes.

    python benchmarks/sandbox_attacks.py            # about ten minutes
    python benchmarks/sandbox_attacks.py --quick    # a smoke test; writes nothing

Exits with status 1 if anything was not contained, is left, or was changed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from machine import ROOT, write_result

sys.path.insert(0, str(ROOT))

from rollpacker.sandbox import Limits, Sandbox, Status, open_sandbox
from tests.sandbox.attacks import ATTACKS, CLASSES, Attack
from tests.sandbox.attacks.bait import Bait, laid_out, resident_bytes
from tests.sandbox.attacks.harness import Boxed, contained, problems_of

WORKERS = 2
SANDBOXES = ("bwrap python", "bwrap cold", "bwrap without cgroup")
GROWTH_LIMIT_MIB = 10.0
HONEST_LIMITS = Limits(wall_s=30.0)


def corpus(sandbox: str, attacks: Sequence[Attack]) -> dict[str, Any]:
    """Each attack by itself, in one box; with what got through."""
    began = time.monotonic()
    escaped = {}
    with laid_out() as bait, _lacks(sandbox):
        profile = "cold" if sandbox.endswith("cold") else "python"
        boxed = Boxed(open_sandbox("bwrap", workers=1), profile=profile)
        try:
            memory = boxed.box.capabilities.memory
            for attack in attacks:
                problems = contained(attack, boxed, bait)
                if problems:
                    escaped[attack.name] = problems
                    print(f"  NOT CONTAINED {attack.name}: {problems}", flush=True)
        finally:
            boxed.close()
    good = len(attacks) - len(escaped)
    print(f"{sandbox} (memory: {memory}): {good} of {len(attacks)} attacks contained", flush=True)
    return {
        "contained": good,
        "attacks": len(attacks),
        "memory_bound": memory,
        "not_contained": escaped,
        "seconds": round(time.monotonic() - began, 1),
    }


def _lacks(sandbox: str) -> Any:
    """A machine whose control groups are not ours to use, for the sandbox of that name."""
    if "without cgroup" not in sandbox:
        return contextlib.nullcontext()
    return mock.patch("rollpacker.sandbox.cgroup.find_place", lambda: None)


def left_behind() -> dict[str, int]:
    """What of this process and its sandboxes is on the machine now."""
    own = descendants()
    files = [
        path
        for folder in ("/tmp", "/var/tmp", "/dev/shm", os.environ.get("TMPDIR", "/tmp"))
        for path in Path(folder).glob("*")
        if any(word in path.name for word in ("rollpacker", "zygote", "sandbox", "bwrap"))
    ]
    return {
        "processes": len(own),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": len(_own_cgroups()),
        "temporary_files": len(set(files)),
        "system_v_objects": sum(
            len(path.read_text().splitlines()) - 1 for path in Path("/proc/sysvipc").glob("*")
        ),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


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
    """One in ten an attack. Before and after, and what went wrong in between."""
    rng = random.Random(7)
    usable = [attack for attack in ATTACKS if not attack.refused]
    rng.shuffle(usable)
    wrong: list[str] = []
    ended: Counter[str] = Counter()
    before = left_behind()
    began = time.monotonic()
    async with open_sandbox("bwrap", workers=WORKERS) as box:

        async def one(number: int) -> None:
            attack = usable[number // 10 % len(usable)] if number % 10 == 0 else None
            if attack is None:
                wrong.extend(await honest(box, number))
            else:
                wrong.extend(await _attack(box, attack, bait, ended))

        first = min(runs, 1000)
        order = [*range(first)], [*range(first, runs)]
        for numbers in order:
            rng.shuffle(numbers)
        await _at_a_time(one, order[0])
        warm = memory_mib()
        await _at_a_time(one, order[1])
        await asyncio.sleep(1.0)
        open_memory = memory_mib()
    took = time.monotonic() - began
    await asyncio.sleep(1.0)  # the loop closes its ends a moment later
    wrong += bait.problems()
    after = left_behind()
    return {
        "runs": runs,
        "attacks": sum(ended.values()),
        "ended": dict(ended),
        "seconds": round(took, 1),
        "wrong": wrong,
        "before": before,
        "after": after,
        "left": {key: after[key] - before[key] for key in before if after[key] != before[key]},
        f"memory_mib_after_{first}_runs": warm,
        "memory_mib_after_all": open_memory,
        "growth_mib": {key: round(open_memory[key] - warm[key], 2) for key in warm},
    }


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


async def _attack(box: Sandbox, attack: Attack, bait: Bait, ended: Counter[str]) -> list[str]:
    result = await box.run(
        attack.text(bait.described()),
        stdin=attack.stdin,
        files=attack.files,
        limits=attack.limits,
    )
    ended[result.status.value] += 1
    return [f"{attack.name}: {problem}" for problem in problems_of(attack, result, bait)]


async def poisoned(honest_runs: int, bait: Bait) -> dict[str, Any]:
    """Every program that spoils its interpreter, each followed by honest ones."""
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
    return {"poisons": len(poisons), "honest_runs_after_each": honest_runs, "changed": changed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--runs", type=int, default=10_000)
    options = parser.parse_args()
    attacks = ATTACKS[::8] if options.quick else ATTACKS
    sandboxes = {name: corpus(name, attacks) for name in SANDBOXES}
    with laid_out() as bait:
        leak = asyncio.run(many_runs(400 if options.quick else options.runs, bait))
        print({key: value for key, value in leak.items() if key != "wrong"}, flush=True)
        poison = asyncio.run(poisoned(50 if options.quick else 1000, bait))
        print(poison, flush=True)
    for line in leak["wrong"][:20]:
        print("  WRONG", line)
    goals = against_goals(sandboxes, leak, poison)
    for name, row in goals.items():
        met = "met" if row["met"] else "MISSED"
        print(f"{name:44} {row['measured']!s:>8}  goal {row['goal']!s:>8}  {met}")
    good = all(row["met"] for row in goals.values())
    print("nothing got through, nothing is left" if good else "NOT ALL IS WELL: see above")
    if not options.quick:
        found = {"corpus": sandboxes, "many_runs": leak, "poisoned": poison}
        print(write_result("sandbox_attacks", {"holds": good, "goals": goals, **found}))
    return 0 if good else 1


def against_goals(
    sandboxes: dict[str, Any], leak: dict[str, Any], poison: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    rows: dict[str, tuple[float, float]] = {
        f"contained, {name}": (result["contained"], result["attacks"])
        for name, result in sandboxes.items()
    }
    rows["kinds of things left after all runs"] = (len(leak["left"]), 0)
    rows["runs among attacks that went wrong"] = (len(leak["wrong"]), 0)
    rows["honest runs that a poisoned one changed"] = (len(poison["changed"]), 0)
    goals = {
        name: {"measured": measured, "goal": goal, "met": measured == goal}
        for name, (measured, goal) in rows.items()
    }
    for who, grown in leak["growth_mib"].items():
        goals[f"growth of memory, {who}, MiB"] = {
            "measured": grown,
            "goal": f"< {GROWTH_LIMIT_MIB}",
            "met": grown < GROWTH_LIMIT_MIB,
        }
    return goals


if __name__ == "__main__":
    sys.exit(main())
