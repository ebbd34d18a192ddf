"""Made-up servers with the protocols of vLLM's completions and SGLang's /generate, and faults.

The policy is frozen, and its noise is keyed by the prompt, the seed and a token's position. Every
token takes the same time, whatever else a server does.

    python -m tests.scheduler.made_up_servers --kind vllm --token-s 0.015

starts one in a process of its own, which prints its address and runs until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

VOCABULARY = 1000
MAX_TOKENS = 200
"""Tokens of a test's longest response."""
LONGEST = 640
"""Tokens of the longest response that ends by itself."""
MEDIAN, SPREAD = 20, math.log(20) / 2.326
"""Lengths are log-normal: the 99th percentile is 20 times the median."""
TOKEN_S = 0.000125
TOKENS_A_WRITE = 32
LATE_S = 0.04
"""By how much an answer comes late, in the fault of that name."""

Drawn = tuple[tuple[int, ...], tuple[float, ...], str]
"""Tokens, their log-probs, and the reason of the end."""


def policy(
    prompt: Sequence[int], seed: int, max_tokens: int = MAX_TOKENS, *, endless: bool = False
) -> Drawn:
    dice = random.Random(f"{seed} {list(prompt)}")
    length = min(math.ceil(dice.lognormvariate(math.log(MEDIAN), SPREAD)), LONGEST)
    length = LONGEST + 1 if endless else length
    places = range(min(length, max_tokens))
    pairs = [(dice.randrange(VOCABULARY), -5 * dice.random()) for _ in places]
    tokens, log_probs = zip(*pairs, strict=True)
    return tokens, log_probs, "stop" if length <= max_tokens else "length"


class Cut(Exception):
    """The server drops the connection."""


class MadeUpServer:
    """One server, in the event loop that runs now."""

    def __init__(
        self,
        kind: str,
        *,
        faults: random.Random | None = None,
        flaw: str = "",
        junk: bytes = b"",
        token_s: float = TOKEN_S,
    ) -> None:
        """`faults` decides which requests meet one. `flaw`: what the server does not do. `junk`: it
        answers with that. `token_s`: seconds that a token takes."""
        self.kind, self.faults, self.flaw, self.junk = kind, faults, flaw, junk
        self.token_s = token_s
        self.met: Counter[str] = Counter()
        """Faults that were met, by name."""
        self.seen: list[tuple[tuple[int, ...], int]] = []
        """Prompt and seed of each request."""
        self.open = 0
        """Number of responses that are generated now."""
        self.running: dict[str, asyncio.Task[bytes]] = {}
        """What watches the connection of each response, by its id at SGLang."""
        self.port = 0
        self.num_aborts = 0
        self.connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> MadeUpServer:
        if not self.port:  # kept from others while the server is down
            self.holder = socket.socket()
            self.holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.holder.bind(("127.0.0.1", 0))
            self.port = self.holder.getsockname()[1]
        self.server = await asyncio.start_server(
            self.connected, "127.0.0.1", self.port, backlog=2048, reuse_port=True
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.holder.close()
        self.die()

    def die(self) -> None:
        self.server.close()
        for writer in self.connections:
            writer.transport.abort()

    async def restart_after(self, seconds: float) -> None:
        """Die with all that runs, and come back at the same address."""
        self.die()
        await asyncio.sleep(seconds)
        await self.__aenter__()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            fields = dict(line.split(": ", 1) for line in lines[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            await self.answer(lines[0].split()[1], body, reader, writer)
            writer.close()
        except (Cut, EOFError, OSError):
            writer.transport.abort()
        finally:
            self.connections.discard(writer)

    async def answer(self, path: str, body: bytes, *streams: Any) -> None:
        writer = streams[1]
        if path == "/health":
            write(writer, 200)
        elif path == "/abort_request" and self.flaw != "abort":
            self.num_aborts += 1
            if self.flaw != "slow abort" and (self.flaw != "first abort" or self.num_aborts > 1):
                self.abort(**json.loads(body))
            write(writer, 200)
        elif path == {"vllm": "/v1/completions", "sglang": "/generate"}[self.kind]:
            self.open += 1
            try:
                await self.generate(json.loads(body), *streams)
            finally:
                self.open -= 1
        else:
            write(writer, 404)

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        for name, watch in self.running.items():
            if abort_all or name.startswith(rid):
                watch.cancel()

    def fault(self) -> str:
        """The fault that a request meets, or none."""
        if self.faults is None or self.faults.random() > 0.1:
            return ""
        names = ("cut", "cut", "late", "late", "abort", "500", "503", "kill")
        fault = self.faults.choice(names)
        self.met[fault] += 1
        return fault

    async def generate(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        vllm = self.kind == "vllm"
        settings = asked if vllm else asked["sampling_params"]
        prompt = asked["prompt" if vllm else "input_ids"]
        seed = settings["seed" if vllm else "sampling_seed"]
        self.seen.append((tuple(prompt), seed))
        fault = self.fault()
        if fault in ("500", "503"):
            return write(writer, int(fault))
        if fault == "kill":
            self.task = asyncio.create_task(self.restart_after(0.05))
            raise Cut
        if self.flaw == "seeds":
            seed = random.getrandbits(62)
        most = settings["max_tokens" if vllm else "max_new_tokens"]
        drawn = policy(prompt, seed, most, endless=settings.get("ignore_eos", False))
        watch = asyncio.create_task(reader.read())  # ends as the client leaves
        rid = str(asked.get("rid") or id(watch))
        self.running[rid] = watch
        try:
            await self.respond(drawn, fault, watch, writer)
        finally:
            del self.running[rid]
            watch.cancel()

    async def respond(
        self, drawn: Drawn, fault: str, watch: asyncio.Task[bytes], writer: asyncio.StreamWriter
    ) -> None:
        if self.flaw == "silence":
            await watch
            raise Cut
        if self.flaw == "redirect":
            return write(writer, 302, kind="text/html\r\nlocation: /elsewhere")
        if self.flaw == "compressed":
            return write(writer, 200, kind="text/event-stream\r\ncontent-encoding: gzip")
        if self.junk:
            return write(writer, 200, self.junk, kind="text/event-stream")
        if self.kind == "vllm":
            await self.stream(drawn, fault, watch, writer)
        else:
            await self.reply(drawn, fault, watch, writer)

    async def stream(self, drawn: Drawn, fault: str, watch: Any, writer: Any) -> None:
        """A chunk now and then, as long as somebody reads."""
        if self.flaw == "stream":
            return write(writer, 200, b"{}")
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        tokens, log_probs, finish = drawn
        start = asyncio.get_running_loop().time()
        for at in range(0, len(tokens), TOKENS_A_WRITE):
            end = min(at + TOKENS_A_WRITE, len(tokens))
            await passed(start + end * self.token_s + LATE_S * (fault == "late"), watch)
            if watch.done() or (fault == "cut" and at > 0):
                raise Cut
            choice: dict[str, Any] = {"index": 0, "text": "x"}
            if self.flaw != "token ids":
                choice["token_ids"] = tokens[at:end]
            if self.flaw != "log-probs":
                choice["logprobs"] = {"token_logprobs": log_probs[at:end]}
            if end == len(tokens) or fault == "abort":
                choice["finish_reason"] = "abort" if fault == "abort" else finish
            event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            half = len(event) // 2  # the boundaries of events are not those of the network
            for part in (event[:half], event[half:]):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            if fault == "abort":
                break
        event = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))

    async def reply(self, drawn: Drawn, fault: str, watch: Any, writer: Any) -> None:
        """One answer at the end, or at the abort with what there is."""
        tokens, log_probs, finish = drawn
        start, done = asyncio.get_running_loop().time(), len(tokens)
        if fault == "late":  # deaf to an abort: it ends whole, or is given up
            await asyncio.sleep(done * self.token_s + LATE_S)
        elif fault == "cut":
            raise Cut
        elif fault != "abort":
            await passed(start + done * self.token_s, watch)
        if watch.done() and not watch.cancelled():
            raise Cut
        if fault == "abort" or (watch.cancelled() and fault != "late"):
            passed_s = asyncio.get_running_loop().time() - start
            done, finish = min(done, int(passed_s / self.token_s)), "abort"
        meta: dict[str, Any] = {"finish_reason": {"type": finish}}
        if self.flaw != "log-probs":
            triples = zip(log_probs[:done], tokens[:done], strict=True)
            meta["output_token_logprobs"] = [[*pair, None] for pair in triples]
        write(writer, 200, json.dumps({"text": "", "meta_info": meta}).encode())


async def passed(until_s: float, watch: asyncio.Task[bytes]) -> None:
    """Wait up to this time of the event loop, or the end of the watch."""
    await asyncio.wait([watch], timeout=max(until_s - asyncio.get_running_loop().time(), 0))


def write(
    writer: asyncio.StreamWriter, status: int, body: bytes = b"{}", kind: str = "application/json"
) -> None:
    head = f"HTTP/1.1 {status} made up\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)


@contextmanager
def processes(kind: str, count: int, token_s: float) -> Iterator[list[str]]:
    """Servers in processes of their own: their addresses."""
    command = [sys.executable, "-m", __name__, "--kind", kind, "--token-s", str(token_s)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [server.stdout.readline().strip() for server in started if server.stdout]
    finally:
        for server in started:
            server.kill()
            server.communicate()


async def serve(kind: str, token_s: float) -> None:
    async with MadeUpServer(kind, token_s=token_s) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--token-s", type=float, default=TOKEN_S)
    asked = parser.parse_args()
    asyncio.run(serve(asked.kind, asked.token_s))
