"""A made-up SGLang server that is slime's router, too.

    python -m tests.integrations_slime.servers --token-s 0.015

starts one in a process of its own, which prints its port and runs until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.scheduler.made_up_servers import TOKEN_S, MadeUpServer, write


class Server(MadeUpServer):
    """What slime asks of its router and its servers, beside responses."""

    worker_type = "regular"
    weights = "1"
    """slime's version of its weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[dict[str, Any]] = []
        """Bodies of all requests for a response."""

    async def answer(self, path: str, body: bytes, *streams: Any) -> None:
        worker = {"url": self.url, "worker_type": self.worker_type, "is_healthy": True}
        answers = {
            "/workers": {"workers": [worker]},
            "/v1/loads?include=core": {"loads": [{"num_total_reqs": self.open}]},
            "/get_weight_version": {"weight_version": self.weights},
        }
        if path == "/generate":
            self.asked.append(json.loads(body))
        if path in answers:
            write(streams[1], 200, json.dumps(answers[path]).encode())
        else:
            await super().answer(path, body, *streams)


@contextmanager
def here(server: Server) -> Iterator[Server]:
    """A server that runs in a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextmanager
def serving(token_s: float = TOKEN_S) -> Iterator[int]:
    """The port of a server that runs in a process of its own."""
    command = [sys.executable, "-m", __name__, "--token-s", str(token_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def serve(token_s: float) -> None:
    async with Server("sglang", token_s=token_s) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--token-s", type=float, default=TOKEN_S)
    asyncio.run(serve(parser.parse_args().token_s))
