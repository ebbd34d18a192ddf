"""Faults of servers and of the host at once, and a host that is killed within `Scheduler.save`.

Nothing is lost, doubled, or trained on with other tokens than the frozen policy's. The host is a
process of its own: `python -m tests.scheduler.test_faults KIND FOLDER PROMPTS DEATH URL...`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import sample_key
from rollpacker.scheduler import FOLDER, Counted, Request, Scheduler, has_state
from tests.scheduler.made_up import MadeUp, length_of
from tests.scheduler.made_up_servers import MadeUpServer, policy
from tests.scheduler.test_servers import KINDS, SAMPLES, config, prompt_of, servers_of

TRAINED = "trained.json"
"""A host's own file in its checkpoints, in place of weights: seed and tokens of all responses that
were trained on so far."""


# -- the host, in a process of its own -----------------------------------------------------------


async def host(kind: str, folder: Path, num_prompts: int, death: int, urls: list[str]) -> None:
    """Train on all prompts from the newest checkpoint that has the scheduler's state, with a
    checkpoint after each step. `death`: the file operation within saves at which it is killed, from
    1; 0: none."""
    whole = [path for path in sorted(folder.glob("step_*")) if has_state(path)]
    newest = whole[-1] if whole else None
    trained = json.loads((newest / TRAINED).read_text()) if newest else {}
    fetch = Counted(lambda count: min(count, num_prompts - fetch.num_fetched))

    async def load(url: str) -> None:
        assert await servers._wire.status("POST", f"{url}/load") == 200

    servers = servers_of(kind, urls, abort_s=0.02, returned=load)
    scheduler = servers.scheduler = Scheduler(config(), servers, fetch, resume=newest)
    for url in urls:
        await load(url)
    print("begun", flush=True)
    deaths = dying(death)
    while (step := await scheduler.next_step_async()) is not None:
        for one in (one for group in step.groups for one in group):
            name = f"{one.prompt}/{one.place}"
            assert name not in trained, f"{name} is trained on twice"
            trained[name] = [one.seed, servers.response(one).tokens]
        scheduler.trained()
        checkpoint = folder / f"step_{scheduler.version:04}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / TRAINED).write_text(json.dumps(trained))
        with deaths():
            scheduler.save(checkpoint)
    await servers.close()


def dying(at: int) -> Any:
    """A context within which this process is killed at its file operation of that number."""
    counts = {"left": at, "depth": 0}

    def heard(event: str, _: Any) -> None:
        if counts["depth"] and (event == "open" or event.startswith(("os.", "shutil."))):
            counts["left"] -= 1
            if not counts["left"]:
                os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def within() -> Iterator[None]:
        counts["depth"] += 1
        yield
        counts["depth"] -= 1

    sys.addaudithook(heard)
    return within


# -- the tests -----------------------------------------------------------------------------------


async def live(
    kind: str, urls: list[str], folder: Path, prompts: int, death: int = 0, kill_s: float = math.inf
) -> int:
    """Run a host, which is killed after `kill_s` seconds, or within a save (`death`). Returns how
    it ended."""
    words = [kind, str(folder), str(prompts), str(death), *urls]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *words, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    if kill_s < math.inf:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), kill_s)
        with suppress(ProcessLookupError):
            process.kill()
    return await process.wait()


async def suffer(kind: str, folder: Path, num_prompts: int, num_kills: int) -> Counter[str]:
    """Train on all prompts while servers meet faults and hosts are killed. Returns the faults by
    name."""
    dice, met = random.Random(num_kills), Counter[str]()
    async with AsyncExitStack() as stack:
        made = [MadeUpServer(kind, faults=random.Random(n), forgets=True) for n in range(3)]
        for server in made:
            await stack.enter_async_context(server)
        urls = [server.url for server in made]
        for number in range(num_kills):
            in_save = number % 2 == 0
            fate = {"death": dice.randrange(1, 30)} if in_save else {"kill_s": dice.uniform(0, 0.5)}
            if await live(kind, urls, folder, num_prompts, **fate):
                met["killed in a save" if in_save else "killed"] += 1
        assert await live(kind, urls, folder, num_prompts) == 0
    trained = json.loads((max(folder.glob("step_*")) / TRAINED).read_text())
    wanted = [(prompt, place) for prompt in range(num_prompts) for place in range(SAMPLES)]
    assert trained.keys() == {f"{prompt}/{place}" for prompt, place in wanted}
    for prompt, place in wanted:
        seed = sample_key(0, SampleId(PromptId("train", 0, prompt), place, 0)) >> 1
        tokens = policy(prompt_of(prompt), seed)[0]
        assert trained[f"{prompt}/{place}"] == [seed, [*tokens]]
    return sum((server.met for server in made), met)


class Carrying(MadeUp):
    """The made-up host, with tokens, so that some are saved."""

    def end(self, request: Request) -> None:
        _, since = self.running.pop(request.id)
        tokens = [7] * (self.decode_steps - since)
        is_whole = len(tokens) == length_of(request)
        log_probs = [-1.0] * len(tokens)
        self.scheduler.ended(
            request, tokens, "stop" if is_whole else "stopped", log_probs=log_probs
        )


@pytest.mark.parametrize("saved_before", [False, True])
def test_a_kill_within_save_leaves_the_state_before_or_the_new_one(
    saved_before: bool, tmp_path: Path
) -> None:
    host = Carrying(num_prompts=80, prompt_factor=1.5, carry="exact")
    host.step()
    if saved_before:
        host.scheduler.save(tmp_path / "whole")
    host.step()
    host.scheduler.save(tmp_path / "new")
    new, old = (tokens_of(tmp_path / name) for name in ("new", "whole"))
    assert new and (bool(old), new == old) == (saved_before, False)
    found = []
    for at in range(1, 100):
        folder = tmp_path / str(at)
        if saved_before:
            shutil.copytree(tmp_path / "whole", folder)
        child = os.fork()
        if not child:
            with dying(at)():
                host.scheduler.save(folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        found.append(tokens_of(folder))
    assert len(found) > 10
    assert found == [old] * found.count(old) + [new] * found.count(new)
    host.scheduler.save(folder)  # over what the last kill left
    assert tokens_of(folder) == new and len([*(folder / FOLDER).iterdir()]) == 2


def tokens_of(checkpoint: Path) -> dict[str, int]:
    """What a resumed host starts with kept tokens: ids of requests and the tokens' number."""
    if not has_state(checkpoint):
        return {}
    host = Carrying(num_prompts=80, prompt_factor=1.5, carry="exact", resume=checkpoint)
    host.scheduler.begin_step()
    kept = {name: one.carried for name, (one, _) in host.running.items()}
    return {name: 0 if carried is None else len(carried.tokens) for name, carried in kept.items()}


def test_no_fault_loses_or_doubles_a_response(tmp_path: Path) -> None:
    met = asyncio.run(suffer("vllm", tmp_path, 64, 3))
    assert met["killed in a save"] and met.total() > 20, met


@pytest.mark.parametrize("kind", KINDS)
def test_nor_do_two_hundred_faults(kind: str, tmp_path: Path) -> None:
    met = asyncio.run(suffer(kind, tmp_path, 480, 20))
    print(f"{kind}: {met.total()} faults:", dict(met))
    assert met.total() >= 200 and met["killed in a save"] + met["killed"] > 10, met


if __name__ == "__main__":
    kind, folder, num_prompts, death, *urls = sys.argv[1:]
    asyncio.run(host(kind, Path(folder), int(num_prompts), int(death), urls))
