"""A trainer in two pipeline stages that turns slow, and takes another layout by itself.

The trainer is the one of a run (`ProcessTrainer`, train.pipeline.relayout=do). After some steps
something is slowed; what follows is its own doing: it finds out, its processes start anew between
two steps, and the steps are compared.

    stage     12 layers, a process for each stage. Every layer sleeps 10 ms in each of F, I and W;
              those of the second stage's process twice as long once it is slowed. The sleeps are
              this file's, around the ops of the trainer.
    network   2 stages of 2 shards on four hosts: network namespaces with a veth pair between every
              two, and host addresses on `lo`, so that a connection has one address whichever pair
              it takes. Both ends of the pair between the shards of the first stage are then held
              to 20 Mbit/s by tc's tbf. Linux, as root.

Measured are median steps: before it was slowed, slowed, and in the new layout; and the seconds of
the switch. Exit code 1 if a slowed step is not 1.3 times one in the new layout.

    python benchmarks/pipeline_relayout.py --arms stage,network          # 4 minutes
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.machine import write_result
from benchmarks.resume import write_model
from rollpacker.workers.child import Child
from rollpacker.workers.host import ThisHost
from rollpacker.workers.line import LINE_FD, Line
from tests.cluster.netns import why_impossible

ARMS = ("stage", "network")
NUM_HEALTHY, NUM_AFTER, MOST_SLOW = 6, 6, 20
WANTED = 1.3
LAYER_S = 0.01
SLOWNESS = 2.0
RATE, BURST = "20mbit", "16kb"
SLOW_FILE = "ROLLPACKER_BENCHMARK_SLOW_FILE"
"""In a worker's environment: which file says that it is slow."""
THIS = Path(__file__).resolve()


# -- a worker whose layers take their time -----------------------------------------------------


def work_slowly() -> None:
    """A process of the trainer, whose ops sleep for each layer that they run."""
    from rollpacker.pipeline.stages import passes
    from rollpacker.pipeline.stages.cut import Absent, decoder_of
    from rollpacker.trainer.worker import main

    slow_file = os.environ.get(SLOW_FILE)

    def slowed(name: str) -> None:
        run = getattr(passes._Training, name)

        def run_slowly(ops: Any, *arguments: Any) -> Any:
            layers = decoder_of(ops._models.policy.model).layers
            count = sum(not isinstance(layer, Absent) for layer in layers)
            is_slow = slow_file is not None and Path(slow_file).exists()
            time.sleep(LAYER_S * count * (SLOWNESS if is_slow else 1.0))
            return run(ops, *arguments)

        setattr(passes._Training, name, run_slowly)

    for name in ("forward", "backward", "weights"):
        slowed(name)
    main()


class WorkerHost(ThisHost):
    """This machine, or a network namespace of it, with workers of this file where they are to
    sleep. Weights lie in this machine's memory, which all of them share."""

    def __init__(self, namespace: str | None = None, sleeps: bool = False) -> None:
        self._namespace = namespace
        self._sleeps = sleeps

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Child, Line]:
        """See `Host`."""
        command = [sys.executable, "-m", module]
        if self._sleeps:
            command = [sys.executable, str(THIS), "--worker"]
        if self._namespace is not None:
            command = ["ip", "netns", "exec", self._namespace, *command]
        line, theirs = Line.pair()
        variables = {**os.environ, **environment, LINE_FD: str(theirs.fileno())}
        with theirs:
            child = Child.start(
                command,
                name,
                guarded=guarded,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in variables.items() if value is not None},
            )
        return child, line


# -- four hosts ----------------------------------------------------------------------------------


class Hosts:
    """Network namespaces with a veth pair between every two. Each has one address, on `lo`, and a
    route to every other one's over the pair between them."""

    def __init__(self, count: int) -> None:
        number = random.SystemRandom().randrange(1, 250)
        self.names = [f"rl{number}h{host}" for host in range(count)]
        self.addresses = [f"10.78.{number}.{host + 1}" for host in range(count)]

    def __enter__(self) -> Hosts:
        try:
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                # The only one there: torch takes the first address of an interface.
                _ip("-n", name, "addr", "flush", "dev", "lo")
                _ip("-n", name, "addr", "add", f"{address}/32", "dev", "lo")
            for one, other in self.pairs():
                ends = ("name", f"to{other}", "type", "veth", "peer", "name", f"to{one}")
                _ip("-n", self.names[one], "link", "add", *ends, "netns", self.names[other])
                for here, there in ((one, other), (other, one)):
                    _ip("-n", self.names[here], "link", "set", f"to{there}", "up")
                    route = (f"{self.addresses[there]}/32", "dev", f"to{there}")
                    own = ("src", self.addresses[here])
                    _ip("-n", self.names[here], "route", "add", *route, *own)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def pairs(self) -> Iterator[tuple[int, int]]:
        for one in range(len(self.names)):
            for other in range(one + 1, len(self.names)):
                yield one, other


def slow(names: list[str], one: int, other: int) -> None:
    """What goes over the pair between these hosts is held, both ways."""
    for here, there in ((one, other), (other, one)):
        held = ("tbf", "rate", RATE, "burst", BURST, "latency", "400ms")
        command = ["tc", "-n", names[here], "qdisc", "add", "dev", f"to{there}", "root", *held]
        subprocess.run(command, check=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


# -- steps ---------------------------------------------------------------------------------------


def trainer_of(folder: Path, places: list[Any], address: str, budget: int) -> Any:
    from rollpacker.algo.config import AlgorithmConfig
    from rollpacker.trainer.launch import Ranks
    from rollpacker.trainer.model import load_model
    from rollpacker.trainer.process_trainer import ProcessTrainer
    from rollpacker.trainer.setup import LearnerSetup
    from rollpacker.trainer.trainer import ModelConfig, PipelineConfig, TrainConfig

    ranks = Ranks(len(places), places, address)
    model = ModelConfig(path=str(folder / "model"), device="cpu")
    train = TrainConfig(
        steps=1000,
        processes=len(places),
        learning_rate=1e-4,
        micro_batch_tokens=budget,
        pipeline=PipelineConfig(stages=2, relayout="do"),
    )
    setup = LearnerSetup(
        model=model,
        train=train,
        algorithm=AlgorithmConfig(old_logprobs="rollout"),
        temperature=1.0,
        total_steps=1000,
        threads=1,
    )
    weights = load_model(model).model.named_parameters()
    return ProcessTrainer(setup, ranks, weights, journal_in=folder)


def step_s(trainer: Any, seed: int) -> tuple[float, float]:
    """Seconds of a step without those of a switch, and those."""
    from rollpacker.algo.config import AlgorithmConfig
    from rollpacker.trainer.samples import build_train_samples
    from tests.trainer.tiny import responses

    samples = build_train_samples(responses(seed, 8, 4), AlgorithmConfig())[0]

    async def run() -> Mapping[str, float]:
        await trainer.accumulate(samples)
        found: Mapping[str, float] = await trainer.apply()
        return found

    began = time.perf_counter()
    switch_s = asyncio.run(run()).get("perf/pipeline/relayout_s", 0.0)
    return time.perf_counter() - began - switch_s, switch_s


def measured(trainer: Any, turn_slow: Any) -> dict[str, Any]:
    """Steps before, slowed, and after the switch."""
    healthy = [step_s(trainer, number)[0] for number in range(NUM_HEALTHY)]
    turn_slow()
    slowed, switch_s = [], 0.0
    while not switch_s and len(slowed) < MOST_SLOW:
        seconds, switch_s = step_s(trainer, len(slowed))
        slowed.append(seconds)
    after = [step_s(trainer, number)[0] for number in range(NUM_AFTER)] if switch_s else slowed
    layers = trainer._setup.train.pipeline.layers
    medians = [statistics.median(steps[1:] or steps) for steps in (healthy, slowed, after)]
    return {
        "healthy_s": medians[0],
        "slowed_s": medians[1],
        "after_s": medians[2],
        "faster": medians[1] / medians[2],
        "switch_s": switch_s,
        "slowed_steps": len(slowed),
        "layers": layers if layers == "auto" else list(layers),
        "places": list(trainer._ranks.order),
    }


def run_stage(folder: Path) -> dict[str, Any]:
    from rollpacker.trainer.launch import LOOPBACK, RankPlace

    write_model(folder / "model", num_hidden_layers=12)
    flag = folder / "slow"
    places = [
        RankPlace(0, WorkerHost(sleeps=True), {}),
        RankPlace(1, WorkerHost(sleeps=True), {SLOW_FILE: str(flag)}),
    ]
    trainer = trainer_of(folder, places, LOOPBACK, 64)
    try:
        return measured(trainer, flag.touch)
    finally:
        trainer.close()


def run_network(folder: Path, names: list[str], address: str) -> dict[str, Any]:
    """On the first of the hosts."""
    from rollpacker.trainer.launch import RankPlace

    write_model(folder / "model", num_hidden_layers=12, hidden_size=128)
    places = [RankPlace(0, WorkerHost(n), {"GLOO_SOCKET_IFNAME": "lo"}) for n in names]
    trainer = trainer_of(folder, places, address, 128)
    try:
        return measured(trainer, lambda: slow(names, 0, 1))
    finally:
        trainer.close()


def network_arm(folder: Path) -> dict[str, Any]:
    with Hosts(4) as hosts:
        where = json.dumps([hosts.names, hosts.addresses[0]])
        command = [sys.executable, str(THIS), "--inside", where, "--folder", str(folder)]
        child = subprocess.Popen(["ip", "netns", "exec", hosts.names[0], *command])
        try:
            if child.wait() != 0:
                raise SystemExit("the hosts' run failed; its messages stand above")
        finally:
            child.kill()
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="which of them, with commas")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work_slowly()
        return 0
    logging.basicConfig(level=logging.INFO, format="    %(message)s")
    logging.getLogger("rollpacker").setLevel(logging.INFO)
    if options.inside is not None:
        found = run_network(options.folder, *json.loads(options.inside))
        (options.folder / "result.json").write_text(json.dumps(found))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it made is taken away
    results = {}
    for arm in options.arms.split(","):
        if arm == "network" and (why := why_impossible()) is not None:
            raise SystemExit(why)
        with tempfile.TemporaryDirectory() as name:
            results[arm] = (run_stage if arm == "stage" else network_arm)(Path(name))
        found = results[arm]
        print(
            f"{arm}: a step takes {found['healthy_s']:.2f} s, slowed {found['slowed_s']:.2f} s, in "
            f"the new layout {found['after_s']:.2f} s: {found['faster']:.2f} times as fast as "
            f"slowed, for a switch of {found['switch_s']:.1f} s",
            flush=True,
        )
    write_result("pipeline_relayout", {"wanted": WANTED, "arms": results})
    return int(any(found["faster"] < WANTED for found in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
