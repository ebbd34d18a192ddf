"""Sessions at once at the endpoint of a policy that itself takes next to no time.

The endpoint (`rollpacker/serving`) has a made-up engine, which answers after `--seconds`. Processes
of clients (OpenAI's own, async) hold all sessions at once, of calls with a tool, every other one
streamed. Told: processor seconds of the endpoint's process for a call, wall seconds, how many calls
waited at once. Exit code 1 unless each session was recorded as one trajectory with the engine's ids
and log-probs.

    python benchmarks/endpoint_sessions.py [--sessions 1000] [--turns 4] [--clients 2]
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lab import ROOT, bench

from rollpacker.serving.sessions import read_recorded
from tests.dialogue.families import template_of
from tests.serving.fakes import ScriptedEngine, served

CLIENT = """
import asyncio, json, sys
import openai
sys.path.insert(0, sys.argv[1])
from tests.serving.fakes import TOKEN
from tests.serving.test_endpoint import session

async def main(url, first, count, turns):
    http = openai.DefaultAsyncHttpxClient(
        limits=openai.DEFAULT_CONNECTION_LIMITS.__class__(max_connections=count),
        timeout=600.0,
    )
    async with openai.AsyncOpenAI(
        base_url=url, api_key=TOKEN, max_retries=0, http_client=http
    ) as client:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(
            *(
                session(client, f"s{n}", turns, stream=bool(n % 2))
                for n in range(first, first + count)
            )
        )

asyncio.run(main(sys.argv[2], *map(int, sys.argv[3:6])))
"""


async def held(
    sessions: int, turns: int, num_clients: int, seconds: float, record: Path
) -> tuple[dict[str, Any], ScriptedEngine]:
    template = template_of("chatml")
    engine = ScriptedEngine(template, seconds=seconds)
    share = sessions // num_clients
    async with served(template, engine, record) as url:
        clients = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", CLIENT, str(ROOT), url),
                *map(str, (number * share, share, turns)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for number in range(num_clients)
        ]
        for client in clients:
            assert client.stdout is not None
            await client.stdout.readline()
        wall, own = time.perf_counter(), time.process_time()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"go\n")
        codes = [await client.wait() for client in clients]
        wall, own = time.perf_counter() - wall, time.process_time() - own
    assert codes == [0] * len(clients), codes
    calls = len(engine.answered)
    return {
        "calls": calls,
        "most_at_once": engine.most_at_once,
        "wall_s": round(wall, 2),
        "cpu_of_the_endpoint_s": round(own, 2),
        "cpu_ms_per_call": round(1000 * own / calls, 3),
    }, engine


def faults(sessions: int, turns: int, engine: ScriptedEngine, record: Path) -> list[str]:
    """Name what is recorded otherwise than the engine drew it."""
    recorded = read_recorded(record)
    found = []
    names = Counter(name for name, _ in recorded)
    if names != Counter(f"s{number}" for number in range(sessions)):
        found.append(f"{len(recorded)} trajectories of {len(names)} sessions")
    last = [one for one in engine.answered if one[0].turn == turns]
    whole = Counter(request.prompt_tokens + response.tokens for request, response in last)
    if whole != Counter(one.prompt + one.tokens for _, one in recorded):
        found.append("tokens")
    drawn = Counter((response.tokens, response.log_probs) for _, response in engine.answered)
    told = [turn for _, one in recorded for turn in one.turns]
    if drawn != Counter((turn.tokens, turn.log_probs) for turn in told):
        found.append("drawn tokens or log-probs")
    return found


def main(
    sessions: int = 1000, turns: int = 4, clients: int = 2, seconds: float = 25.0
) -> dict[str, Any]:
    """`seconds`: of an answer of the engine. Sessions are a multiple of the clients."""
    load = os.getloadavg()[0]
    settings = {"sessions": sessions, "turns": turns, "clients": clients, "seconds": seconds}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder)
        told, engine = asyncio.run(held(sessions, turns, clients, seconds, record))
        found = faults(sessions, turns, engine, record)
    before = {"settings": settings, "load_average_before": round(load, 1)}
    return {**before, **told, "faults": found}


if __name__ == "__main__":
    bench(main, holds=lambda found: not found["faults"])
