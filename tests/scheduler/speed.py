"""Trains a made-up loop against made-up servers of a fake speed, with the scheduler and without.

    python -m tests.scheduler.speed --mode plain|off|on --steps 20 --token-s 0.015

Prints a JSON object for each step, with its seconds and the lengths of what it trains on, and at
the end a hash of each trained response. The policy is frozen: training takes no time and changes
nothing. `plain` starts all responses of a step, and waits for all; `off` does so through the
scheduler; `on` trains on the same prompts with tail batching, until the data end.
`benchmarks/hosts.py` runs all hosts' drivers, which have this protocol.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from itertools import islice

import httpx2

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.engine import sample_key
from rollpacker.scheduler import Counted, Scheduler
from rollpacker.scheduler.servers import Servers
from tests.scheduler.made_up_servers import LONGEST, VOCABULARY, processes

NUM_SERVERS = 2

Responses = dict[str, Sequence[int]]
"""The tokens of responses, by "prompt/place"."""


def arguments() -> argparse.Namespace:
    """What every driver is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("plain", "off", "on"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--token-s", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def prompt_of(number: int) -> tuple[int, ...]:
    return (7, number, 9)


async def plain(asked: argparse.Namespace, urls: Sequence[str]) -> AsyncIterator[Responses]:
    """Steps of a loop that knows nothing of the scheduler but how it makes seeds."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)

    async def draw(client: httpx2.AsyncClient, prompt: int, place: int) -> tuple[str, list[int]]:
        key = sample_key(asked.seed, SampleId(PromptId("train", 0, prompt), place, 0))
        body = {"prompt": prompt_of(prompt), "seed": key >> 1, "max_tokens": LONGEST}
        url = f"{urls[prompt % len(urls)]}/v1/completions"
        answer = await client.post(url, json=body | {"stream": True, "return_token_ids": True})
        tokens: list[int] = []
        for line in answer.raise_for_status().text.splitlines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        return f"{prompt}/{place}", tokens

    async with httpx2.AsyncClient(limits=limits, timeout=None) as client:
        for step in range(asked.steps):
            prompts = range(step * asked.prompts, (step + 1) * asked.prompts)
            wanted = [draw(client, prompt, n) for prompt in prompts for n in range(asked.samples)]
            yield dict(await asyncio.gather(*wanted))


async def ours(asked: argparse.Namespace, urls: Sequence[str]) -> AsyncIterator[Responses]:
    """Steps of the same loop with the scheduler."""
    is_on = asked.mode == "on"
    batching = TailBatchingConfig(enabled=is_on, prompt_factor=1.25, carry="none")
    config = JobConfig(
        prompts_per_step=asked.prompts,
        samples_per_prompt=asked.samples,
        max_steps=None,
        max_response_tokens=LONGEST,
        tail_batching=batching,
    )
    servers = Servers("vllm", urls, prompt_of, vocab_size=VOCABULARY, max_response_tokens=LONGEST)
    left = iter(range(asked.steps * asked.prompts))
    fetch = Counted(lambda count: len([*islice(left, count)]))
    scheduler = servers.scheduler = Scheduler(config, servers, fetch, seed=asked.seed)
    while (step := await scheduler.next_step_async()) is not None:
        requests = [request for group in step.groups for request in group]
        yield {f"{one.prompt}/{one.place}": servers.response(one).tokens for one in requests}
        scheduler.trained()
    await servers.close()


async def run(asked: argparse.Namespace, urls: Sequence[str]) -> None:
    trained: dict[str, str] = {}
    start = time.perf_counter()
    number = 0
    async for responses in (plain if asked.mode == "plain" else ours)(asked, urls):
        rollout_s = time.perf_counter() - start
        for name, tokens in responses.items():
            assert name not in trained, f"{name} is trained on twice"
            trained[name] = hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]
        number += 1
        line = {"step": number, "rollout_s": rollout_s, "step_s": time.perf_counter() - start}
        print(json.dumps(line | {"lengths": [*map(len, responses.values())]}), flush=True)
        start = time.perf_counter()
    print(json.dumps({"responses": trained}))


if __name__ == "__main__":
    asked = arguments()
    with processes("vllm", NUM_SERVERS, asked.token_s) as urls:
        asyncio.run(run(asked, urls))
