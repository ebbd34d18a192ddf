"""What it costs to have engines behind ray, beside engines in processes of this machine.

Engines of fake speed (`paced_engine.py`) generate rounds of responses with a long tail; each arm's
engines get the same requests, arms in turn. `rounds`: 8 engines, 1,600 samples a round whose
longest takes 20 s; seconds of a round over those of its longest response. `processor`: 32 engines,
16,000 samples a round; processor seconds of this process, which has the relays, from the first
request to the last response. The core's own share is in `fleet_speed.py`. `relayed`: what tokens
add to that: 32 engines, 16,000 responses of 2,000 tokens in the mean, which come whole, and one
token of each.

    make cluster
    .venv-vllm/bin/python benchmarks/remote_engines.py [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from machine import write_result

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import EngineConfig, EngineOutput, GenerationRequest, SamplingParams
from rollpacker.engines.messages import EngineSetup
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.weights.between_hosts.spread import OwnHost, Spread
from rollpacker.workers.host import Host, ThisHost
from rollpacker.workers.hosts.remote_host import RemoteHost
from rollpacker.workers.hosts.token import demand_token, make_token

STEP_S = 0.02
LONGEST = 1000
"""Tokens of a round's longest response: 20 s."""
LONG_STEP_S = 0.004
LONG = range(1000, 3000)
"""Tokens of responses that are relayed; their steps are shorter: 12 s."""


def engines_on(
    host: Host, count: int, step_s: float = STEP_S, returned: int | None = None
) -> list[ProcessEngine]:
    setup = EngineSetup(
        make="benchmarks.paced_engine:make",
        config=EngineConfig(),
        arguments={"step_s": step_s, "returned": returned},
    )
    return [ProcessEngine(setup, name=f"engine {n}", host=host) for n in range(count)]


async def all_ready(engines: Sequence[ProcessEngine]) -> None:
    for engine in engines:
        await engine.ready()


async def all_closed(engines: Sequence[ProcessEngine]) -> None:
    await asyncio.gather(*(engine.close() for engine in engines))


def tailed(seed: int, count: int) -> list[int]:
    """Lengths from 10 tokens on with a long tail; one has `LONGEST`."""
    rng = random.Random(seed)
    return [LONGEST, *(min(int(10 * rng.paretovariate(0.9)), LONGEST - 1) for _ in range(1, count))]


def requests_of(seed: int, lengths: Sequence[int]) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            sample=SampleId(PromptId("train", seed, row // 8), row % 8, 0),
            prompt_tokens=tuple(range(64)),
            sampling=SamplingParams(max_response_tokens=length),
        )
        for row, length in enumerate(lengths)
    ]


class Round:
    """Counts what has ended."""

    def __init__(self, count: int) -> None:
        self._left, self._lock, self.over = count, threading.Lock(), threading.Event()
        self.error: BaseException | None = None

    def heard(self, outputs: Sequence[EngineOutput]) -> None:
        with self._lock:
            self._left -= len(outputs)
            if not self._left:
                self.over.set()

    def failed(self, error: BaseException) -> None:
        self.error = error
        self.over.set()


def run(
    engines: Sequence[ProcessEngine], requests: Sequence[GenerationRequest]
) -> tuple[float, float]:
    """Seconds of a round, and this process's processor seconds. The engines end with it: idle ones
    would cost the next arm some."""
    asyncio.run(all_ready(engines))
    one = Round(len(requests))
    for engine in engines:
        engine.start(one.heard, one.failed)
    began_s, began_cpu = time.monotonic(), time.process_time()
    for number, engine in enumerate(engines):
        engine.submit(requests[number :: len(engines)])
    one.over.wait(300)
    found = time.monotonic() - began_s, time.process_time() - began_cpu
    asyncio.run(all_closed(engines))
    if one.error is not None:
        raise one.error
    return found


def measured(
    hosts: dict[str, Host], num_engines: int, num_samples: int, rounds: int
) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in hosts}
    for turn in range(rounds):
        requests = requests_of(turn, tailed(turn, num_samples))
        for name in list(hosts)[:: 1 if turn % 2 else -1]:
            found[name].append(run(engines_on(hosts[name], num_engines), requests))
            print(num_engines, name, *(f"{one:.3f}" for one in found[name][-1]), flush=True)
    return {
        name: {
            "round_s": [round(seconds, 3) for seconds, _ in some],
            "of_longest": round(statistics.median(s for s, _ in some) / (LONGEST * STEP_S), 4),
            "processor_s": [round(cpu, 3) for _, cpu in some],
        }
        for name, some in found.items()
    }


def relayed(
    hosts: dict[str, Host], num_engines: int, num_samples: int, rounds: int
) -> dict[str, Any]:
    whole: dict[str, list[float]] = {name: [] for name in hosts}
    bare: dict[str, list[float]] = {name: [] for name in hosts}
    lengths = random.Random(0).choices(LONG, k=num_samples)
    requests = requests_of(0, lengths)
    for turn in range(rounds):
        for name in list(hosts)[:: 1 if turn % 2 else -1]:
            for found, returned in ((whole, None), (bare, 1)):
                engines = engines_on(hosts[name], num_engines, LONG_STEP_S, returned)
                found[name].append(run(engines, requests)[1])
                print("relayed", returned, name, f"{found[name][-1]:.3f}", flush=True)
    added = {name: statistics.median(whole[name]) - statistics.median(bare[name]) for name in hosts}
    return {
        name: {
            "processor_s": [round(cpu, 3) for cpu in whole[name]],
            "processor_s_of_one_token_each": [round(cpu, 3) for cpu in bare[name]],
            "processor_s_per_million_tokens": round(added[name] / sum(lengths) * 1e6, 4),
        }
        for name in hosts
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round; writes nothing")
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    make_token()
    demand_token()
    from rollpacker.workers.hosts.ray_agents import join

    cluster = join("local")
    address = cluster.own_address
    cluster.reserve({address: {"CPU": 1.0}}, within_s=60.0)
    spread = Spread()
    OwnHost(spread, address=address)
    behind = RemoteHost("ray", cluster.connect(address), spread, heartbeat_s=30.0, address=address)
    behind.facts()
    hosts: dict[str, Host] = {"processes": ThisHost(), "ray": behind}
    result: dict[str, Any] = {
        "rounds": measured(hosts, 8, 1600, rounds),
        "processor": measured(hosts, 32, 16_000, rounds),
        "relayed": relayed(hosts, 32, 16_000, rounds),
        "asked": {"of_longest": 1.03, "processor_s": 3.0},
    }
    behind.close()
    cluster.close()
    print(json.dumps(result, indent=1))
    if not args.quick:
        write_result("remote_engines", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
