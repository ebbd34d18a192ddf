"""Faults of every role while a run over three hosts trains.

The hosts are network namespaces of this machine, each with a ray (`tests/cluster/netns.py`). The
run and a process of the trainer are on the first, an engine is on each of the others. Struck are,
one after the other and at random moments: an engine, the trainer, an agent (killed, or stopped and
let go on 8 s later), the link of a host (cut for 5 to 20 s), and a host's raylet, whose ray is
started again. A fault waits until the one before is over and a step was committed. Measured:
seconds until the log says that something is lost, and until it is there again. In the end the run
is interrupted, and resumed on this machine alone, where it trains on what was deferred; the log is
read by `exactly_once.py`, which shares no code with RollPacker, and by the replay.

    make cluster
    .venv-vllm/bin/python benchmarks/cluster_faults.py [--faults 24] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from exactly_once import check
from machine import write_result
from resume import write_config, write_model

from tests.cluster.netns import Network, why_impossible

ROOT = Path(__file__).parents[1]
PATIENCE_S = 240.0
STOPPED_S = 8.0
LOST = {"EngineLost": "EngineReady", "TrainerLost": "TrainerReady"}
"""What the log says when something is lost, and when it is back."""
FAULTS = (
    *("kill engine", "stop engine", "kill trainer", "kill agent", "stop agent"),
    *("cut host", "kill raylet"),
)
OVERRIDES = (
    *("runtime=ray", "name=faults", "rollout.engines=2", "train.processes=1"),
    *("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "checkpoint.every_steps=5"),
    "rollout.max_response_tokens=200",
)


@dataclass(kw_only=True)
class Fault:
    kind: str
    host: int
    noticed_s: float | None = None
    """Until the log had the loss; None: nothing was lost of it."""
    back_s: float | None = None
    """Until all was there again and a step was committed."""


class Log:
    """The run's event log, which grows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[dict[str, Any]]:
        """Events that matter here."""
        if not self.path.exists():
            return []
        wanted = ("Committed", *LOST, *LOST.values())
        lines = self.path.read_text().splitlines()
        found = [line for line in lines if any(f'"{name}"' in line for name in wanted)]
        whole = [json.loads(line) for line in found if line.endswith("}")]
        return [entry for entry in whole if entry.get("event") in wanted]

    def count(self, *names: str) -> int:
        return sum(entry["event"] in names for entry in self.entries())

    def is_whole(self) -> bool:
        """Nothing that was lost is still away."""
        away = set()
        for entry in self.entries():
            name, number = entry["event"], entry.get("engine")
            if name in LOST:
                away.add((LOST[name], number))
            away.discard((name, number))
        return not away


class Chaos:
    """One run, and who strikes it."""

    def __init__(self, network: Network, folder: Path, rng: random.Random) -> None:
        self.network, self.rng = network, rng
        self.log = Log(folder / "runs" / "faults" / "events.jsonl")
        write_model(folder / "model")
        self.config = write_config(folder, 1_000_000)
        self.command = [sys.executable, "-m", "rollpacker.cli.main", "train", str(self.config)]
        self.output = (folder / "output.txt").open("w+")
        self.process = network.popen(
            0, [*self.command, *OVERRIDES], cwd=ROOT, stdout=self.output, stderr=self.output
        )

    def wait(self, until: Any, what: str) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not until():
            if self.process.poll() is not None or time.monotonic() > limit:
                self.output.seek(0)
                sys.exit(f"{what}: {self.output.read()[-4000:]}")
            time.sleep(0.02)

    def commits(self, number: int) -> None:
        aim = self.log.count("Committed") + number
        self.wait(lambda: self.log.count("Committed") >= aim, "no step was committed")

    def strike(self, kind: str) -> Fault:
        self.commits(2)
        self.wait(self.log.is_whole, "not all is there")
        time.sleep(self.rng.uniform(0, 1.5))
        fault = Fault(kind=kind, host=0 if kind == "kill trainer" else self.rng.choice((1, 2)))
        lost = self.log.count(*LOST)
        began = time.monotonic()
        length_s = self._do(fault)
        limit = began + 12.0 + length_s
        while self.log.count(*LOST) == lost and time.monotonic() < limit:
            time.sleep(0.01)
        if self.log.count(*LOST) > lost:
            fault.noticed_s = round(time.monotonic() - began, 2)
        self._undo(fault, began + length_s)
        self.wait(self.log.is_whole, f"{fault} was not made good")
        self.commits(1)
        fault.back_s = round(time.monotonic() - began, 2)
        return fault

    def _pids(self, fault: Fault) -> list[int]:
        part = {"engine": "engine_worker", "trainer": "trainer.worker", "agent": "ray::Agent"}
        name = fault.kind.split()[1]
        found = self.network.named(fault.host, part.get(name, "raylet/raylet"))
        return [p for p in found if b"guardian" not in Path(f"/proc/{p}/cmdline").read_bytes()]

    def _do(self, fault: Fault) -> float:
        """Strike. Returns how long the fault lasts."""
        verb = fault.kind.split()[0]
        if verb == "cut":
            self.network.cut(fault.host)
            return self.rng.uniform(5.0, 20.0)
        self.stopped = self._pids(fault)
        for pid in self.stopped:
            os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
        return STOPPED_S if verb == "stop" else 0.0

    def _undo(self, fault: Fault, at: float) -> None:
        time.sleep(max(at - time.monotonic(), 0.0))
        if fault.kind == "cut host":
            self.network.mend(fault.host)
            if not self.network.named(fault.host, "raylet/raylet"):
                self._restart_ray(fault.host)
        elif fault.kind.startswith("stop"):
            for pid in self.stopped:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue
        elif fault.kind == "kill raylet":
            self._restart_ray(fault.host)

    def _restart_ray(self, host: int) -> None:
        self.network.kill_all(host)
        self.network.start_ray([host])

    def finish(self) -> None:
        """Interrupt the run, and let it end on this machine."""
        for pid in self.network.named(0, "rollpacker.cli.main"):
            if b"ip\0netns" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGINT)
        self.process.wait(120)
        steps = self.log.count("Committed")
        last = [f"train.steps={steps + 2}", "runtime=local", "rollout.engines=1", "--resume"]
        subprocess.run([*self.command, *OVERRIDES, *last], cwd=ROOT, check=True, timeout=600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="one fault a kind; writes nothing")
    args = parser.parse_args()
    if why := why_impossible():
        sys.exit(why)
    from rollpacker.controller.replay import replay
    from rollpacker.report.log import EventLog

    rng = random.Random(2)
    plan = list(FAULTS) if args.quick else [FAULTS[n % len(FAULTS)] for n in range(args.faults)]
    rng.shuffle(plan)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, Network(3, cores=1) as network:
        network.start_ray()
        chaos = Chaos(network, Path(name), rng)
        faults = []
        try:
            for kind in plan:
                faults.append(chaos.strike(kind))
                print(json.dumps(asdict(faults[-1])), flush=True)
            chaos.finish()
        finally:
            network.kill_all(0)
        checked = check(chaos.log.path)
        difference = replay(EventLog(chaos.log.path)).difference
    by_kind: dict[str, Any] = {}
    for kind in FAULTS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        noticed = [fault.noticed_s for fault in of_kind if fault.noticed_s is not None]
        back = [fault.back_s for fault in of_kind if fault.back_s is not None]
        by_kind[kind] = {
            "faults": len(of_kind),
            "noticed": len(noticed),
            "noticed_s_max": max(noticed, default=None),
            "back_s_mean": round(statistics.mean(back), 1) if back else None,
        }
    result = {
        "faults": len(faults),
        "by_kind": by_kind,
        **{one: checked[one] for one in ("steps", "fetched", "trained", "dropped", "engines")},
        "problems": checked["problems"],
        "replay_difference": difference,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result, indent=1))
    if not args.quick:
        write_result("cluster_faults", result)
    return 0 if not checked["problems"] and difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
