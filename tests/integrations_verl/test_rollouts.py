"""verl's client and worker, by their classes here. Faked: servers, the balancer before them, and
agent loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import GenerationRequest, SamplingParams
from rollpacker.integrations.verl.rollouts import (
    REQUESTS,
    Asked,
    Client,
    End,
    Running,
    Worker,
)


def remote(function: Callable[..., Any]) -> Any:
    """A method of an actor's handle."""
    return SimpleNamespace(remote=function)


class Server:
    """Generates until it is aborted, or at once if it is told to. `seeds`: those it was given."""

    def __init__(self, stop_reason: str | None) -> None:
        self.stop_reason, self.seeds = stop_reason, []
        self.aborted: dict[str, asyncio.Event] = {}
        self.engine = self
        self.generate = remote(self._generate)
        self.__dict__["__ray_call__"] = remote(self._call)

    async def _generate(self, request_id: str, sampling_params: Any, **_: Any) -> Any:
        self.seeds.append(sampling_params.get("seed"))
        reason = self.stop_reason
        if reason is None:
            await self.aborted.setdefault(request_id, asyncio.Event()).wait()
            reason = "aborted"
        return SimpleNamespace(token_ids=[1, 2, 3], stop_reason=reason, extra_fields={})

    async def _call(self, function: Callable[..., Any], *args: Any) -> None:
        self.output_handler = asyncio.current_task()  # vLLM's task, by which its loop is found
        await asyncio.to_thread(function, self, *args)  # as ray does

    async def abort(self, request_ids: list[str]) -> None:
        for one in request_ids:
            if one in self.aborted:  # vLLM passes over what has not reached it yet
                self.aborted[one].set()


def client_of(server: Server) -> Client:
    async def fields() -> list[str]:
        return []

    async def acquire(request_id: str) -> tuple[str, Server]:
        return "server", server

    balancer = SimpleNamespace(
        require_acquire_fields=remote(fields),
        require_release_fields=remote(fields),
        acquire_server=remote(acquire),
        release_server=remote(lambda **_: None),
    )
    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    return Client(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), balancer)


def worker_of(loop: Callable[[Client, dict[str, Any]], Awaitable[None]], server: Server) -> Any:
    """A worker without a model, whose agents are `loop`."""
    worker = object.__new__(Worker)
    worker._requests, worker._ends = {}, asyncio.Queue()
    client = client_of(server)

    async def run(sampling_params: dict[str, Any], trajectory: Any, **kwargs: Any) -> None:
        await loop(client, sampling_params)

    worker._run_agent_loop = run
    return worker


async def two_turns(client: Client, sampling_params: dict[str, Any]) -> None:
    for _ in range(2):
        await client.generate("agent", prompt_ids=[1], sampling_params=sampling_params)


ASKED = [Asked("a", 0, 5), Asked("b", 1, 2**63 - 1)]


async def run(worker: Any, stopped: list[str]) -> list[End]:
    prompt = {REQUESTS: [tuple(one) for one in ASKED], "uid": "u"}
    running = asyncio.create_task(worker._run_prompt(prompt, {"temperature": 1.0}, {}))
    if stopped:
        while len(worker._requests) < len(ASKED):
            await asyncio.sleep(0)
        await worker.stop(stopped)
    await running
    return sorted(await worker.ends())


def test_each_turn_has_a_seed_of_its_own() -> None:
    server = Server("completed")
    ends = asyncio.run(run(worker_of(two_turns, server), []))
    assert ends == [End("a", 6, "stop", ""), End("b", 6, "stop", "")]
    assert {5, 2**63 - 1} < set(server.seeds) and len(set(server.seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in server.seeds)
    assert Running(ASKED[0]).next_seed() == 5  # and the same again at its next start


def test_a_stopped_response_goes_no_further() -> None:
    """Also one that is not in the engine yet when it is stopped."""
    went_on = []

    async def loop(client: Client, sampling_params: dict[str, Any]) -> None:
        await client.generate("agent", prompt_ids=[1], sampling_params=sampling_params)
        went_on.append(sampling_params)

    ends = asyncio.run(run(worker_of(loop, Server(None)), ["a", "b"]))
    assert ends == [End("a", 3, "stopped", ""), End("b", 3, "stopped", "")]
    assert went_on == []


def test_an_abort_that_nobody_asked_for_is_a_failure() -> None:
    a, b = asyncio.run(run(worker_of(two_turns, Server("aborted")), []))
    assert a.reason == b.reason == "failed"
    assert "the engine aborted the response, and was not asked to" in a.why


def test_a_validation_has_verls_own_settings() -> None:
    server = Server("completed")
    asyncio.run(two_turns(client_of(server), {"temperature": 0}))
    assert server.seeds == [None, None]


def test_a_second_turn_is_not_carried() -> None:
    request = GenerationRequest(
        sample=SampleId(PromptId("train", 0, 0), 0, 0),
        prompt_tokens=(),
        sampling=SamplingParams(max_response_tokens=0),
    )
    running = Running(ASKED[0]._replace(carrying=request), turns=1)
    with pytest.raises(ValueError, match="carry=exact is for agents of a single turn"):
        asyncio.run(client_of(Server("completed"))._carry(running, "agent", {}, prompt_ids=[1]))
