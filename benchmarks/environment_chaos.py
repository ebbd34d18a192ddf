"""Kills and stops of environment processes while episodes play: nothing lost, nothing doubled.

    python benchmarks/environment_chaos.py [--faults 200] [--episodes 64] [--workers 4]

Episodes of random turns play side by side in a few processes, half of them blocking, half async.
Every so often a process is ended by SIGKILL or held by SIGSTOP. An episode that is lost is played
again from its start with the same messages, as the core would have it. Each answer of an
environment is a hash of all messages that it was given, so that a message that is lost, given twice
or given to another episode shows at once. At the end nothing may be left: no process, no episode.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import bench

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.environments.environment import Begun, EnvironmentConfig, Lost
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.workers.child import children

SOURCE = """
import asyncio, hashlib, random, time

class Blocking:
    deterministic = True

    def reset(self, row):
        self.said = hashlib.sha256(str(row["seed"]).encode())
        self.random = random.Random(row["seed"])
        return self.said.hexdigest()

    def answer(self, message):
        self.said.update(message["content"].encode())
        return self.said.hexdigest(), 0.0, message["content"].endswith("last")

    def step(self, message):
        time.sleep(self.random.expovariate(50))
        return self.answer(message)

class Async(Blocking):
    async def reset(self, row):
        return super().reset(row)

    async def step(self, message):
        await asyncio.sleep(self.random.expovariate(50))
        return self.answer(message)
"""
FAULT_EVERY_S = 0.4


@dataclass(slots=True)
class Tally:
    finished: Counter[SampleId] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    wrong: int = 0
    """Answers that do not follow from the messages of their episode."""
    replays: int = 0
    faults: Counter[str] = field(default_factory=Counter)


async def play(those: SupervisedEnvironments, number: int, tally: Tally) -> None:
    """One episode to its end, as often from its start as it is lost."""
    sample = SampleId(PromptId("train", 0, number), 0, 0)
    num_turns = random.Random(number).randint(1, 12)
    while True:
        expected = hashlib.sha256(str(number).encode())
        one: Any = await those.begin(sample, {}, seed=number)
        if isinstance(one, Begun):
            assert one.messages is not None
            tally.wrong += one.messages[0]["content"] != expected.hexdigest()
            for turn in range(1, num_turns + 1):
                text = f"{number} {turn} {'last' if turn == num_turns else ''}"
                expected.update(text.encode())
                one = await those.act(sample, turn, {"role": "assistant", "content": text})
                if isinstance(one, Lost):
                    break
                tally.turns += 1
                tally.wrong += one.messages[0]["content"] != expected.hexdigest()
        if not isinstance(one, Lost):
            tally.wrong += not one.done
            break
        tally.causes[one.cause] += 1
        tally.replays += 1
    tally.finished[sample] += 1
    those.end(sample)


async def disturb(those: SupervisedEnvironments, num_faults: int, tally: Tally) -> None:
    chance = random.Random(0)
    while sum(tally.faults.values()) < num_faults:
        await asyncio.sleep(chance.uniform(0.5, 1.5) * FAULT_EVERY_S)
        assert those._pool is not None
        ready = [one for one in those._pool._workers if one.ready and not one.gone]
        if ready:
            how = chance.choice((signal.SIGKILL, signal.SIGSTOP))
            os.kill(chance.choice(ready).process.child.pid, how)
            tally.faults[how.name] += 1


async def run(those: SupervisedEnvironments, faults: int, episodes: int) -> Tally:
    tally = Tally()
    await those.open()
    disturbing = asyncio.create_task(disturb(those, faults, tally))
    playing: set[asyncio.Task[None]] = set()
    num_begun = 0
    while playing or not disturbing.done():
        while len(playing) < episodes and not disturbing.done():
            playing.add(asyncio.create_task(play(those, num_begun, tally)))
            num_begun += 1
        done, playing = await asyncio.wait(
            playing, timeout=0.1, return_when=asyncio.FIRST_COMPLETED
        )
        for one in done:
            one.result()
    await disturbing
    assert len(tally.finished) == num_begun, "an episode was lost"
    assert not those._episodes, "an episode is left"
    await those.close()
    return tally


def measured(name: str, path: Path, faults: int, episodes: int, workers: int) -> dict[str, Any]:
    config = EnvironmentConfig(function=f"{path}:{name}", workers=workers, timeout_s=30.0)
    began, cpu = time.monotonic(), time.process_time()
    tally = asyncio.run(run(SupervisedEnvironments(config), faults, episodes))
    return {
        "faults": dict(tally.faults),
        "episodes": len(tally.finished),
        "finished_more_than_once": sum(count > 1 for count in tally.finished.values()),
        "turns": tally.turns,
        "answers_that_do_not_follow": tally.wrong,
        "played_again": tally.replays,
        "lost_by_cause": dict(tally.causes),
        "processes_left": len(children(os.getpid())),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds_of_the_run": round(time.process_time() - cpu, 1),
    }


def main(
    faults: int = 200, episodes: int = 64, workers: int = 4, quick: bool = False
) -> dict[str, Any]:
    """`faults`: of each kind of environment. `episodes`: at a time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chaos.py"
        path.write_text(SOURCE)
        return {
            **{"at_a_time": episodes, "workers": workers},
            **{
                name.lower(): measured(name, path, 10 if quick else faults, episodes, workers)
                for name in ("Blocking", "Async")
            },
        }


def holds(found: dict[str, Any]) -> bool:
    """No episode is lost or doubled, and nothing is left."""
    bad = ("finished_more_than_once", "answers_that_do_not_follow", "processes_left")
    return not any(found[kind][key] for kind in ("blocking", "async") for key in bad)


if __name__ == "__main__":
    bench(main, holds=holds)
