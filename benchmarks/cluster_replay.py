"""How fast a new service replays what its folder knows, and how long it takes with a snapshot.

    python benchmarks/cluster_replay.py [--events 100000] [--quick]

Jobs come, take turns on 4 + 4 nodes, and end, in made-up time; their events are written as the
service writes them, and new services are made of the file: one that finds no snapshot, and leaves
one; and one that finds it. The state must be the same: a service refuses the file otherwise, and
what both say of all jobs is compared. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from machine import write_result

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Asked, Committed, Ended, Event, Left, Submitted
from rollpacker.cluster.decide.job import Phase
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.service.book import Book
from rollpacker.cluster.service.local_runner import LocalRunner
from rollpacker.cluster.service.past import State
from rollpacker.cluster.service.service import Service
from rollpacker.cluster.service.status import Status
from rollpacker.cluster.service.store import Position, Store, entry_of
from tests.cluster_service import lab

NUM_JOBS = 12
STEPS = 100
PHASES: tuple[Phase, ...] = ("rollout", "train")


def new_cluster() -> Cluster:
    return Cluster(lab.pools(4), CheapestWork(), max_group=5)


class History:
    """What a service with these jobs would write."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster, self.book = new_cluster(), Book()
        self.store = Store(folder / "events.db")
        self.num_events = self.num_jobs = 0
        self.now_s = 0.0

    def happen(self, event: Event, **facts: object) -> None:
        commands = self.cluster.handle(event)
        self.book.write(event, facts, commands)
        self.store.write([entry_of(event, facts, commands)], Position("", self.num_events))
        self.num_events += 1

    def submit(self) -> None:
        rollout_s, train_s = (self.rng.uniform(50, 150) for _ in PHASES)
        job = lab.job(f"job-{self.num_jobs}", STEPS, rollout_s, train_s, slo=self.rng.uniform(1, 3))
        self.num_jobs += 1
        facts = {"command": [], "resume": [], "environ": {}, "folder": "/", "run": job.name}
        self.happen(Submitted(self.now_s, job), **facts)

    def go_on(self) -> None:
        """One job does what comes next."""
        self.now_s += self.rng.expovariate(0.1)
        waiting = sum(not one.outcome for one in self.book.records.values()) < NUM_JOBS
        placed = [one for one in self.book.placed() if one.turn.phase is None or one.turn.token]
        if waiting or not placed:
            self.submit()
            return
        record = self.rng.choice(placed)
        name, turn = record.job.name, record.turn
        if turn.phase is None:
            phase = PHASES[turn.ask % 2]
            self.happen(Asked(self.now_s, name, phase), ask=turn.ask + 1, purpose="round")
        else:
            self.happen(Left(self.now_s, name, turn.phase, turn.token))
            if turn.ask % 2 == 0:
                step = record.steps + 1
                self.happen(Committed(self.now_s, name, sum(record.job.mean)), step=step)
                if step == STEPS:
                    self.happen(Ended(self.now_s, name), outcome="done")


def of_new_service(folder: Path) -> tuple[float, list[Any]]:
    """Seconds until it is there, and what it says of its jobs."""
    began_s = time.process_time()
    service = Service(
        new_cluster(),
        name="replayed",
        folder=folder,
        mailbox=FileMailbox(folder / "mail.db"),
        runner=LocalRunner(folder),
    )
    seconds = time.process_time() - began_s
    status = Status(service._cluster, service._book, service._alive, 0.0)
    jobs = [status.of_job(record) for record in service._book.records.values()]
    service.close()
    return seconds, jobs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="20,000 events, nothing written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        history = History(folder, 1)
        num_events = 20_000 if args.quick else args.events
        while history.num_events < num_events:
            history.go_on()
        history.store.close()
        replay_s, _ = of_new_service(folder)  # and the first snapshot
        with_snapshot_s, then = of_new_service(folder)
        snapshot = folder / "snapshot"
        snapshot_mb = snapshot.stat().st_size / 1e6
        snapshot.unlink()
        _, without = of_new_service(folder)
        assert then == without
        began_s = time.process_time()
        pickle.dumps(State(history.cluster, history.book, 0.0), pickle.HIGHEST_PROTOCOL)
        keep_s = time.process_time() - began_s
    payload = {
        "events": history.num_events,
        "jobs": history.num_jobs,
        "replay_cpu_s": round(replay_s, 2),
        "events_per_cpu_s": round(history.num_events / replay_s),
        "with_snapshot_cpu_s": round(with_snapshot_s, 3),
        "to_keep_one_cpu_s": round(keep_s, 3),
        "snapshot_mb": round(snapshot_mb, 2),
        "load": os.getloadavg()[0],
    }
    print(payload)
    if not args.quick:
        write_result("cluster_replay", payload)


if __name__ == "__main__":
    main()
