"""vLLM's own server as the scheduler's host: make test-vllm."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollpacker.scheduler.servers import Servers
from tests.data.characters import character_tokenizer
from tests.engines.tiny import tiny_model
from tests.scheduler.test_servers import request, run, scheduler_of, told, until

START_S = 600
pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs vLLM: make vllm, then make test-vllm"
    ),
    pytest.mark.timeout(START_S + 300),
]

NUM_PROMPTS, SAMPLES = 24, 4
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a tiny random model whose responses have a long tail."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    shape: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.05, **shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256", "--generation-config", "vllm"]
    log = folder / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT, cwd=folder
        )
    try:
        asyncio.run(answers(f"http://127.0.0.1:{port}", server, log))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


async def answers(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    servers = made(url)
    async with asyncio.timeout(START_S):
        while await servers._wire.status("GET", f"{url}/health") != 200:
            assert server.poll() is None, log.read_text()[-4000:]
            await asyncio.sleep(0.1)
    await servers.close()


def made(url: str, **sampling: Any) -> Servers:
    def prompt(number: int) -> list[int]:
        return [7 + (number * 5 + place * place) % 40 for place in range(2 + number % 9)]

    return Servers(
        "vllm",
        [url],
        prompt,
        vocab_size=1000,
        max_response_tokens=200,
        sampling={"temperature": 1.0, **sampling},
    )


def test_it_can_be_used_and_stops_what_is_stopped(url: str) -> None:
    async def work() -> None:
        servers = made(url, ignore_eos=True)
        await servers.check()
        host = told(servers)
        drawn = servers._draw((7, 8, 9), 5)
        await servers._wire.ask(url, drawn, ignore_eos=True)
        assert len(drawn.tokens) == 200 and len(set(drawn.tokens)) > 10
        servers.start([request(3)])
        await until(lambda: any(run.draw.tokens for run, _ in servers._running.values()))
        servers.stop([request(3)])
        await until(lambda: bool(host.ends))
        reason, tokens = host.ends[request(3).id]
        assert reason == "stopped" and 0 < len(tokens) < 200
        await until_idle(servers, url)
        await servers.close()

    run(work())


async def until_idle(servers: Servers, url: str) -> None:
    """Wait until the server itself says that it generates nothing."""
    while True:
        answer = await servers._wire._client.get(f"{url}/metrics")
        lines = [one for one in answer.text.splitlines() if "num_requests_running{" in one]
        if lines and all(float(one.split()[-1]) == 0 for one in lines):
            return
        await asyncio.sleep(0.1)


def test_it_trains_on_what_the_server_alone_would(url: str) -> None:
    async def trained(enabled: bool) -> tuple[Counter[tuple[Any, ...]], float]:
        servers, found, deferred = made(url), Counter[tuple[Any, ...]](), 0.0
        scheduler = scheduler_of(servers, NUM_PROMPTS, enabled=enabled)
        while (step := await scheduler.next_step_async()) is not None:
            for one in (one for group in step.groups for one in group):
                response = servers.response(one)
                assert len(response.log_probs) == len(response.tokens)
                found[one.prompt, one.place, response.tokens] += 1
            deferred += scheduler.trained()["prompts_deferred"]
        await servers.close()
        return found, deferred

    async def work() -> None:
        own, none = await trained(False)
        ours, deferred = await trained(True)
        assert own.total() == NUM_PROMPTS * SAMPLES
        assert none == 0 < deferred
        assert ours == own

    run(work())
