"""A made-up vLLM server with all that TRL asks of one, in a process of its own:

    python -m tests.integrations_trl.trl_server SECONDS_A_TOKEN [FAULTS]

FAULTS: "some": some requests meet a fault. "other": it is started anew at the 60th request, and has
other weights after that, with which it draws other tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.scheduler.made_up_servers import MadeUpServer, policy, write

INFO = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}


class TrlsServer(MadeUpServer):
    def __init__(self, token_s: float, faults: str) -> None:
        dice = random.Random(1) if faults else None
        super().__init__("vllm", token_s=token_s, faults=dice)
        self.after = faults

    def fault(self) -> str:
        if self.after == "other":
            return "kill" if len(self.seen) == 60 else ""
        found = super().fault()
        return "cut" if found == "kill" else found

    async def restart_after(self, seconds: float) -> None:
        await super().restart_after(seconds)
        self.flaw = "seeds"

    async def answer(self, path: str, body: bytes, *streams: Any) -> None:
        asked = json.loads(body) if body else {}
        answers = {
            "/v1/models": {"data": [{"id": "made up"}]},
            "/server_info?config_format=json": INFO,
            "/reset_prefix_cache": {"success": True},
        }
        if path == "/v1/completions" and not asked.get("stream"):
            found: Any = {"choices": await self.whole(asked)}
        elif (found := answers.get(path)) is None:
            return await super().answer(path, body, *streams)
        write(streams[1], 200, json.dumps(found).encode())

    async def whole(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """All responses to all prompts, as soon as the longest has ended. `seeds` has one for each
        of a prompt's responses, which vLLM's own protocol cannot say."""
        choices, longest = [], 0
        for prompt, seeds in zip(asked["prompt"], asked["seeds"], strict=True):
            assert len(seeds) == asked["n"]
            for seed in seeds:
                tokens, log_probs, finish = policy(prompt, seed, asked["max_tokens"])
                names = [f"token_id:{token}" for token in tokens]
                none = [None] * len(tokens)
                drawn = {"tokens": names, "token_logprobs": log_probs, "top_logprobs": none}
                one = {"token_ids": tokens, "prompt_token_ids": prompt, "finish_reason": finish}
                choices.append({**one, "logprobs": drawn})
                longest = max(longest, len(tokens))
        await asyncio.sleep(self.token_s * longest)
        return choices


@contextmanager
def process(token_s: float, faults: str = "") -> Iterator[str]:
    """A server's address."""
    command = [sys.executable, "-m", __name__, str(token_s), faults]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


async def serve(token_s: float, faults: str = "") -> None:
    async with TrlsServer(token_s, faults) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), *sys.argv[2:]))
