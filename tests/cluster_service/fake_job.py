"""A job without models: it enters pools through its seat, holds made-up devices, commits to a file.

    python fake_job.py FOLDER DEVICES STEPS ROLLOUT_S TRAIN_S

Its rollouts are an engine's, a process in a session of its own. FOLDER/commits.jsonl is its
checkpoint: a line for each iteration, whose `state` follows from the line before.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from rollpacker.cluster.seats.mailbox_seat import open_seat
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, Iteration, Seat
from rollpacker.cluster.service.local_runner import ROLLOUT_NODES, TRAIN_NODES
from tests.cluster_service.witness import devices_of

STOPPED = 130


def engine(devices: Path) -> None:
    """Holds its devices between a line and the next one."""
    own = devices_of(devices, os.environ, "rollout")
    who = os.environ[SEAT_VARIABLE].partition("#")[2]
    for line in sys.stdin:
        for device in own:
            if line == "hold\n":
                device.hold(f"{who} rollout on {os.environ[ROLLOUT_NODES]}")
            else:
                device.drop()
        print("done", flush=True)


def following(state: str, step: int) -> str:
    return hashlib.sha256(f"{state}/{step}".encode()).hexdigest()[:16]


def committed(folder: Path) -> list[dict[str, object]]:
    path = folder / "commits.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Job:
    def __init__(self, folder: Path, devices: Path, seat: Seat) -> None:
        self.folder = folder
        self.seat = seat
        self.stop = threading.Event()
        self.who = os.environ[SEAT_VARIABLE].partition("#")[2]
        self.own = devices_of(devices, os.environ, "train")
        self.engine = subprocess.Popen(
            [sys.executable, __file__, "engine", str(devices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        seat.watch(lambda why: os._exit(6), lambda why: self.stop.set())

    def tell_engine(self, word: str) -> None:
        assert self.engine.stdin and self.engine.stdout
        self.engine.stdin.write(f"{word}\n")
        self.engine.stdin.flush()
        assert self.engine.stdout.readline() == "done\n", "the engine is gone"

    def rollout(self, seconds: float) -> None:
        self.tell_engine("hold")
        time.sleep(seconds)
        self.tell_engine("drop")

    def train(self, seconds: float) -> None:
        for device in self.own:
            device.hold(f"{self.who} train on {os.environ[TRAIN_NODES]}")
        time.sleep(seconds)
        for device in self.own:
            device.drop()

    def commit(self, step: int, state: str) -> None:
        line = json.dumps({"step": step, "state": state, "by": self.who, "at_s": time.time()})
        with (self.folder / "commits.jsonl").open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run(self, steps: int, rollout_s: float, train_s: float) -> int:
        before = committed(self.folder)
        state = str(before[-1]["state"]) if before else ""
        for step in range(len(before) + 1, steps + 1):
            if not self.seat.enter("rollout", "round", given_up=self.stop):
                return STOPPED
            self.rollout(rollout_s)
            self.seat.leave("rollout")
            if not self.seat.enter("train", "step", given_up=self.stop):
                return STOPPED
            self.train(train_s)
            self.seat.leave("train")
            state = following(state, step)
            self.commit(step, state)
            times = {"rollout_s": rollout_s, "train_s": train_s}
            one = Iteration(step=step, kind="plain", between_s=0.0, after_s=0.0, **times)
            self.seat.committed(one)
            if self.stop.is_set() and step < steps:
                return STOPPED
        return 0


def main(folder: Path, devices: Path, steps: int, rollout_s: float, train_s: float) -> int:
    seat = open_seat(os.environ)
    assert seat is not None
    code = Job(folder, devices, seat).run(steps, rollout_s, train_s)
    seat.close()
    return code


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine(Path(sys.argv[2]))
    else:
        numbers = (int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
        code = main(Path(sys.argv[1]), Path(sys.argv[2]), *numbers)
        sys.stdout.flush()
        os._exit(code)
