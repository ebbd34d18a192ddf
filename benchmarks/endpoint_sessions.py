"""Sessions at once at the endpoint of a policy that itself takes next to no time.

    python benchmarks/endpoint_sessions.py [--sessions 1000] [--turns 4] [--clients 2]

The endpoint (`rollpacker/serving`) has a made-up engine, which answers after `--seconds` with
tokens that no tokenizer would have chosen. Processes of clients (OpenAI's own, async) hold all
sessions at once, each of so many calls with a tool, every other one streamed. Told: processor
seconds of the endpoint's process for one call (HTTP, JSON, the template, parsing, recording; the
made-up engine among them), wall seconds, and how many calls waited at the same time; and whether
each session was recorded as one trajectory whose ids and log-probs are those of the engine. Exit
code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from machine import ROOT, write_result

sys.path.insert(0, str(ROOT))

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
    arguments: argparse.Namespace, record: Path, profile: cProfile.Profile | None
) -> tuple[dict[str, Any], ScriptedEngine]:
    template = template_of("chatml")
    engine = ScriptedEngine(template, seconds=arguments.seconds)
    share = arguments.sessions // arguments.clients
    async with served(template, engine, record) as url:
        clients = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", CLIENT, str(ROOT), url),
                *map(str, (number * share, share, arguments.turns)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for number in range(arguments.clients)
        ]
        for client in clients:
            assert client.stdout is not None
            await client.stdout.readline()
        wall, own = time.perf_counter(), time.process_time()
        if profile is not None:
            profile.enable()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"go\n")
        codes = [await client.wait() for client in clients]
        if profile is not None:
            profile.disable()
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


def faults(arguments: argparse.Namespace, engine: ScriptedEngine, record: Path) -> list[str]:
    """What is recorded otherwise than the engine drew it."""
    recorded = read_recorded(record)
    found = []
    names = Counter(name for name, _ in recorded)
    if names != Counter(f"s{number}" for number in range(arguments.sessions)):
        found.append(f"{len(recorded)} trajectories of {len(names)} sessions")
    last = [one for one in engine.answered if one[0].turn == arguments.turns]
    whole = Counter(request.prompt_tokens + response.tokens for request, response in last)
    if whole != Counter(one.prompt + one.tokens for _, one in recorded):
        found.append("tokens")
    drawn = Counter((response.tokens, response.log_probs) for _, response in engine.answered)
    turns = [turn for _, one in recorded for turn in one.turns]
    if drawn != Counter((turn.tokens, turn.log_probs) for turn in turns):
        found.append("drawn tokens or log-probs")
    return found


def parts(profile: cProfile.Profile, cpu_s: float) -> dict[str, float]:
    """Shares of the processor's time, by package of the function that ran."""
    seconds: Counter[str] = Counter()
    for (file, _, name), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():
        known = [
            one
            for one in ("h11", "uvicorn", "starlette", "jinja2", "transformers", "asyncio", "json")
            if f"/{one}/" in file
        ]
        ours = "rollpacker/serving" in file or "rollpacker/dialogue" in file
        part = known[0] if known else "ours" if ours else "built in" if file == "~" else "other"
        if name not in ("<method 'poll' of 'select.epoll' objects>",):
            seconds[part] += own_s
    total = sum(seconds.values())
    return {part: round(value / total, 3) for part, value in seconds.most_common()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--profile", action="store_true", help="shares of the time; no result")
    arguments = parser.parse_args()
    if arguments.sessions % arguments.clients:
        parser.error("--sessions must be a multiple of --clients")
    load = os.getloadavg()[0]
    profile = cProfile.Profile() if arguments.profile else None
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder)
        told, engine = asyncio.run(held(arguments, record, profile))
        found = faults(arguments, engine, record)
    print(told, "faults:", found or "none")
    if profile is not None:
        print(parts(profile, told["cpu_of_the_endpoint_s"]))
    else:
        settings = {key: value for key, value in vars(arguments).items() if key != "profile"}
        payload = {"settings": settings, "load_average_before": round(load, 1)}
        write_result("endpoint_sessions", {**payload, **told, "faults": found})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
