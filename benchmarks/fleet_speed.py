"""What control costs with many engines: 100 of them, which only say how long responses are, and
16,000 samples a round.

The real core on the real bus, with ports that answer at once: no tokens, no tensors. Measured are
processor seconds from `Launch` to `TrainOn`, what the ports do included: with one engine of which
the core does not know, with one that it knows, with 100 routed in each way, with 100 of which one
is lost in the middle of the round, and with every entry of the event log made into its line. Exit
code 1 if one of them takes more than 1.5 s.

    python benchmarks/fleet_speed.py [--rounds 5]
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import deque
from functools import partial
from typing import Any

from lab import bench

from rollpacker.bus import Bus, Recorded, Routes
from rollpacker.core import commands, events
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.messages import COMMANDS
from rollpacker.core.records import Entry, encode
from rollpacker.core.rounds.tail_batching import TailBatchingConfig

BOUND_S = 1.5
NUM_ENGINES, NUM_SAMPLES = 100, 16_000


class Ports:
    """Engines, rewards, a trainer and a cursor that answer at once; engines in random order."""

    def __init__(self, *, lose: bool) -> None:
        self.lose = lose
        self.to_lose: int | None = None
        """The engine that is lost when half of the round has ended."""
        self.answers = deque[events.Event]()
        self.rng = random.Random(0)
        self.where: dict[SampleId, int] = {}
        """Engines of the samples that have not ended."""
        self.order: list[SampleId] = []
        """In which they end."""
        self.incarnations = [0] * NUM_ENGINES
        self.version = self.num_rows = 0
        self.began_s = 0.0
        self.seconds: list[float] = []
        """Processor seconds of each round so far."""

    def routes(self) -> Routes:
        return {
            commands.FetchPrompts: self.fetch,
            commands.Launch: self.launch,
            commands.Place: lambda c: self.where.update(zip(c.samples, c.engines, strict=True)),
            commands.Move: self.move,
            commands.Abort: self.abort,
            commands.Replace: self.replace,
            commands.Score: lambda c: self.say(
                events.SampleScored(time_s=0.0, sample=c.sample, value=1.0)
            ),
            commands.TrainOn: self.train,
            commands.SyncWeights: lambda c: self.say(
                events.WeightsSynced(time_s=0.0, version=c.version)
            ),
            commands.Commit: lambda c: self.say(events.Committed(time_s=0.0, step=c.step)),
        }

    def say(self, event: events.Event) -> None:
        self.answers.append(event)

    def next_event(self) -> events.Event | None:
        """None: another sample is to end."""
        if self.answers:
            return self.answers.popleft()
        if self.to_lose is not None and len(self.order) == NUM_SAMPLES // 2:
            number, self.to_lose = self.to_lose, None
            incarnation = self.incarnations[number]
            return events.EngineLost(
                time_s=0.0, engine=number, incarnation=incarnation, reason="gone"
            )
        sample = self.order.pop()
        number = self.where.pop(sample, None)
        if number is None:
            return None
        return events.SampleGenerated(
            time_s=0.0,
            sample=sample,
            num_tokens=100,
            finish_reason="stop",
            version=self.version,
            engine=number,
            incarnation=self.incarnations[number],
        )

    def fetch(self, command: commands.FetchPrompts) -> None:
        rows = range(self.num_rows, self.num_rows + command.count)
        self.num_rows = rows.stop
        prompts = tuple(PromptId("train", 0, row) for row in rows)
        self.say(
            events.PromptsFetched(time_s=0.0, prompts=prompts, epoch_ended=False, data_ended=False)
        )

    def launch(self, command: commands.Launch) -> None:
        assert len(command.samples) == NUM_SAMPLES
        engines = command.engines or (0,) * len(command.samples)
        self.where = dict(zip(command.samples, engines, strict=True))
        self.order = list(command.samples)
        self.rng.shuffle(self.order)
        if self.lose:
            self.to_lose = self.rng.randrange(NUM_ENGINES)

    def move(self, command: commands.Move) -> None:
        for sample in command.samples:
            self.where[sample] = command.engine
            incarnation = self.incarnations[command.engine]
            self.say(
                events.SampleMoved(
                    time_s=0.0, sample=sample, engine=command.engine, incarnation=incarnation
                )
            )

    def abort(self, command: commands.Abort) -> None:
        for sample in command.samples:
            number = self.where.pop(sample)
            self.say(
                events.SampleAborted(
                    time_s=0.0,
                    sample=sample,
                    num_tokens=50,
                    engine=number,
                    incarnation=self.incarnations[number],
                )
            )

    def replace(self, command: commands.Replace) -> None:
        self.incarnations[command.engine] = command.incarnation
        self.say(
            events.EngineReady(
                time_s=0.0,
                engine=command.engine,
                incarnation=command.incarnation,
                version=command.version,
            )
        )

    def train(self, command: commands.TrainOn) -> None:
        self.seconds.append(time.process_time() - self.began_s)
        self.version += 1
        self.say(events.Trained(time_s=0.0, step=command.step, version=self.version))


class Clock:
    def now(self) -> float:
        return time.perf_counter()

    stamp = now


def measure(
    rounds: int, fleet: FleetConfig | None, *, lose: bool = False, log: bool = False
) -> list[float]:
    """Processor seconds of each round."""
    config = JobConfig(
        prompts_per_step=1280,
        samples_per_prompt=8,
        max_steps=None,
        # Without a long round in between: 1.25 x 1.25 as many samples as the step needs.
        tail_batching=TailBatchingConfig(selection="published", stragglers="pool"),
        fleet=fleet,
    )
    ports = Ports(lose=lose)
    lines: list[str] = []

    def write(entry: Entry) -> None:
        lines.append(encode(entry))

    idle = Recorded(*set(COMMANDS.values()) - ports.routes().keys())
    bus = Bus(Job(config), Clock(), [ports, idle], sinks=[write] if log else [])
    bus.take(events.RunStarted(time_s=0.0))
    while len(ports.seconds) < rounds:
        event = ports.next_event()
        if event is None:
            continue
        if isinstance(event, events.PromptsFetched):
            lines.clear()
            gc.collect()
            ports.began_s = time.process_time()
        bus.take(event)
    return ports.seconds


def main(rounds: int = 5) -> dict[str, Any]:
    many = partial(FleetConfig, num_engines=NUM_ENGINES)
    arms: dict[str, tuple[FleetConfig | None, dict[str, bool]]] = {
        "one engine, not known": (None, {}),
        "one engine": (FleetConfig(), {}),
        **{routing: (many(routing=routing), {}) for routing in ("spread", "group", "turns")},
        "spread, one lost": (many(moves=True), {"lose": True}),
        "spread, with the log": (many(), {"log": True}),
    }
    return {
        "engines": NUM_ENGINES,
        "samples_a_round": NUM_SAMPLES,
        "rounds": rounds,
        "median_cpu_s_a_round": {
            name: round(statistics.median(measure(rounds, fleet, **how)), 3)
            for name, (fleet, how) in arms.items()
        },
    }


if __name__ == "__main__":
    bench(main, holds=lambda found: max(found["median_cpu_s_a_round"].values()) <= BOUND_S)
