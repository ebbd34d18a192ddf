"""The controller, killed with SIGKILL at random moments of a run, and resumed each time.

A tiny model is trained by one embedded engine. A kill is drawn for every session: while it starts,
at the launch of a round, at a response of it, while the trainer works, at a commit, while a
checkpoint is written; the first or the second time that this comes, and a random while after it.
The session after it takes up the run; the last one ends it, and must have come to what a run
without a kill comes to: weights, optimizer, cursor, ledger and metrics by SHA-256, and no problem
for `exactly_once.py`. After each kill nothing that the run had started may be there 15 s later: no
process, no agent, no file in /dev/shm; but for two helpers of ray's own, which are counted. This
process adopts what loses its parent, so it sees all.

    local      engine and trainer in the run's own process, tail batching with carrying
    ray        runtime=ray with a ray of the run's own: both in processes, and ray's own besides;
               plain rounds, since an abort of an engine in a process takes effect at no fixed step

    python -m tests.run.controller_faults [--kills 20] [--arm NAME]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.exactly_once import check
from benchmarks.resume import fingerprints, run, start, write_config, write_model

LEFT_S, SHM = 15.0, "/dev/shm/"
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Helpers of a raylet, which try for a minute to tell a GCS that died with it; then they end."""
POLL_S = 0.2
LONGEST_S = {
    "training": 0.15,
    "rollout": 0.01,
    "checkpoint": 0.05,
    "start": 4.0,
    "launch": 0.01,
    "commit": 0.01,
}
"""What a session may be doing when it is killed, and how long after its beginning at most."""
ARMS = {
    "local": ("tail_batching.prompt_factor=1.5",),
    "ray": ("runtime=ray", "train.processes=1", "tail_batching.enabled=false"),
}
RAY_KILLS = 6
"""By default: a session starts a ray, an engine and a trainer."""


@dataclass
class Strike:
    """One kill of the process in which it is armed."""

    moment: str
    occurrence: int
    """From 1."""
    delay_s: float
    response: int
    """Of a round: at so many responses (`rollout`)."""

    def arm(self) -> None:
        from rollpacker.core.commands import Commit, Launch, TrainOn
        from rollpacker.core.events import SampleGenerated
        from rollpacker.core.records import Record
        from rollpacker.run.folder.event_log import LogWriter
        from rollpacker.run.ports import commits

        if self.moment == "start":
            self._strike()
        command = {"launch": Launch, "training": TrainOn, "commit": Commit}.get(self.moment)
        append, write = LogWriter.append, commits.write_checkpoint
        responses = 0

        def append_seen(log: LogWriter, entry: Any) -> None:
            nonlocal responses
            append(log, entry)
            if isinstance(entry, Record):
                if command is not None and any(isinstance(c, command) for c in entry.commands):
                    self._comes()
                if any(isinstance(c, Launch) for c in entry.commands):
                    responses = 0
                responses += isinstance(entry.event, SampleGenerated)
                is_response = isinstance(entry.event, SampleGenerated)
                if self.moment == "rollout" and is_response and responses == self.response:
                    self._comes()

        def write_seen(*arguments: Any, **named: Any) -> Path:
            if self.moment == "checkpoint":
                self._comes()
            return write(*arguments, **named)

        LogWriter.append = append_seen  # type: ignore[method-assign]
        commits.write_checkpoint = write_seen

    def _comes(self) -> None:
        self.occurrence -= 1
        if not self.occurrence:
            self._strike()

    def _strike(self) -> None:
        threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def drawn(kills: int, rng: random.Random) -> list[Strike]:
    """Each moment as often as the others, in any order."""
    moments = [list(LONGEST_S)[number % len(LONGEST_S)] for number in range(kills)]
    rng.shuffle(moments)
    return [
        Strike(
            moment=moment,
            occurrence=rng.choice((1, 2)),
            delay_s=rng.uniform(0.0, LONGEST_S[moment]),
            response=rng.randint(1, 8),
        )
        for moment in moments
    ]


# -- what is left of a run -----------------------------------------------------------------


def adopt() -> None:
    """Be the parent of every process below this one that loses its own."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def descendants() -> dict[int, str]:
    """Processes below this one that have not ended, and their commands."""
    parents: dict[int, int] = {}
    for path in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found, below = {}, {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in below}:
        for pid in below:
            with suppress(OSError):
                text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                found[pid] = text.decode(errors="replace")[:200]
    return found


def shared_files(pids: Sequence[int]) -> set[str]:
    """Files in /dev/shm that these have open or mapped."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {SHM + one.split(SHM)[1] for one in lines if "/dev/shm/" in one}
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(link)
                    found |= {target} if target.startswith(SHM) else set()
    return {name for name in found if not name.endswith(" (deleted)")}


def reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@dataclass
class Session:
    killed: bool
    left_s: float
    """Until nothing was left of it."""
    left: list[str]
    """What was there after `LEFT_S`."""
    rays_own: int
    """Helpers of ray's that were still there then, also of sessions before."""
    processes: int
    """Besides its own, the most that it had at once."""
    shared: int
    """Files in /dev/shm."""


def session(
    config: Path, name: str, overrides: Sequence[str], strike: Strike | None, before: set[int]
) -> Session:
    """One process's share of the run, and what it leaves. `before`: processes of this one's own."""
    prepare = None if strike is None else strike.arm
    process = start(config, name, resume="auto", prepare=prepare, overrides=tuple(overrides))
    shared: set[str] = set()
    processes = 0
    while process.is_alive():
        pids = descendants().keys() - before
        shared |= shared_files([*pids])
        processes = max(processes, len(pids) - 1)
        process.join(POLL_S)
    ended = time.monotonic()
    while True:
        reap()
        there = [text for pid, text in descendants().items() if pid not in before]
        left = [text for text in there if not text.startswith(RAYS_OWN)]
        rays_own = len(there) - len(left)
        left += [one for one in shared if Path(one).exists()]
        passed = time.monotonic() - ended
        if not left or passed > LEFT_S:
            break
        time.sleep(0.02)
    assert process.exitcode in (0, -signal.SIGKILL), f"it exited {process.exitcode}"
    killed = process.exitcode != 0
    return Session(killed, round(passed, 2), left, rays_own, processes, len(shared))


def measure(arm: str, kills: int, folder: Path) -> dict[str, Any]:
    overrides = ARMS[arm]
    folder.mkdir()
    write_model(folder / "model")
    runs, config = folder / "runs", write_config(folder, 2 * kills + 2)
    before = set(descendants())
    assert run(config, "undisturbed", overrides=overrides) == 0
    before |= set(descendants())
    strikes, sessions = drawn(kills, random.Random(arm)), []
    salvaged: Counter[str] = Counter()
    for strike in [*strikes, None]:
        sessions.append(session(config, "killed", overrides, strike, before))
        found = salvaged_by(runs / "killed")
        salvaged.update(found)
        moment = "to the end" if strike is None else strike.moment
        print(arm, moment, sessions[-1], found, flush=True)
        if not sessions[-1].killed:
            break
    expected, found = fingerprints(runs / "undisturbed"), fingerprints(runs / "killed")
    killed = [one for one in sessions if one.killed]
    return {
        "kills": len(killed),
        "by_moment": dict(Counter(one.moment for one in strikes)),
        "different": [part for part in expected if expected[part] != found[part]],
        "problems": check(runs / "killed" / "events.jsonl")["problems"],
        "left": [text for one in sessions for text in one.left],
        "nothing_left_after_s": {
            "mean": round(sum(one.left_s for one in killed) / len(killed), 2),
            "max": max(one.left_s for one in killed),
        },
        "rays_own_helpers_at_most": max(one.rays_own for one in sessions),
        "processes_at_most": max(one.processes for one in sessions),
        "shared_files_at_most": max(one.shared for one in sessions),
        "salvaged": dict(salvaged),
    }


def salvaged_by(folder: Path) -> dict[str, int]:
    """Of the newest session in the log."""
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    begins = [number for number, line in enumerate(lines) if line.startswith('{"session"')]
    notes = [line for line in lines[begins[-1] if begins else 0 :] if '"note":"salvaged"' in line]
    counts: Counter[str] = Counter(sessions=bool(notes))
    for line in notes:
        with suppress(ValueError):  # cut off
            for metric, value in json.loads(line)["metrics"].items():
                counts[metric.removeprefix("perf/salvaged_")] += int(value)
    return dict(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, help="20, and of ray 6, if it is not given")
    parser.add_argument("--arm", choices=ARMS, help="this one alone")
    args = parser.parse_args()
    import torch
    import transformers  # noqa: F401  (imported once, before the forks)

    torch.set_num_threads(1)
    adopt()
    began = time.perf_counter()
    result: dict[str, Any] = {"arms": {}}
    with tempfile.TemporaryDirectory() as name:
        for arm in ARMS if args.arm is None else (args.arm,):
            if arm == "ray":
                from rollpacker.workers.hosts.token import make_token

                os.environ |= {"RAY_ADDRESS": "local", "RAY_AUTH_TOKEN_PATH": f"{name}/token"}
                make_token()
            kills = args.kills or (RAY_KILLS if arm == "ray" else 20)
            result["arms"][arm] = measure(arm, kills, Path(name) / arm)
    arms = result["arms"].values()
    result["all_well"] = not any(one["different"] or one["problems"] or one["left"] for one in arms)
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result, indent=1))
    return 0 if result["all_well"] else 1


if __name__ == "__main__":
    sys.exit(main())
