"""The responses that verl's agent loop workers generate, each started, stopped and awaited alone.

verl starts all responses of a prompt together, takes an aborted response for a finished one, and
looks at its queue every two seconds. Here the trainer starts requests, a worker reports each end as
it comes, and a response that was stopped goes no further than the client: it is neither scored nor
put into the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollpacker.engines.engine import EngineOutput, GenerationRequest, SamplingParams
from rollpacker.integrations.verl.carry import Anew, generated
from rollpacker.scheduler import Request

logger = logging.getLogger(__name__)

REQUESTS = "rollpacker_requests"
"""Field of a prompt's row with the requests (`Asked`) that are to be started for it."""
ABORT_AGAIN_S = 0.05
"""Seconds after which a stopped request is aborted once more: it had not reached the engine yet."""


class Asked(NamedTuple):
    """A request as it travels to a worker."""

    id: str
    place: int
    seed: int
    version: int = 0
    """Number of the weights' updates before it."""
    carrying: GenerationRequest | None = None
    """What is carried on, and the noise. None: tokens are not carried in this run."""


class End(NamedTuple):
    """How a request ended, as a worker reports it. `num_tokens` counts what the model generated, of
    all of an agent's turns."""

    id: str
    num_tokens: int
    reason: str
    why: str
    output: EngineOutput | None = None
    """The same as RollPacker's engines report it, with the tokens. None: tokens are not carried in
    this run, or it failed."""


class Stopped(Exception):
    """The response was stopped because its step needs it no more."""


@dataclass(slots=True)
class Running:
    """A request that a worker generates."""

    asked: Asked
    turns: int = 0
    num_tokens: int = 0
    is_stopped: bool = False
    server: Any = None
    """The server that generates the current turn. None: between turns, as in a tool or a reward."""
    engine_id: str = ""
    """Name of the current turn's request in the server's engine."""
    last_server: Any = None
    """The server that generated last, or does. None: none has yet."""
    output: EngineOutput | None = None
    """How the response ended, where tokens are carried."""

    def next_seed(self) -> int:
        """Return the seed of the next turn. Turns of a response do not share random numbers."""
        seed = (self.asked.seed + self.turns * 0x9E3779B97F4A7C15) % 2**63
        self.turns += 1
        return seed


_running: ContextVar[Running | None] = ContextVar("running", default=None)


class Client(LLMServerClient):  # type: ignore[misc]  # verl is not typed
    """verl's client of the servers, with a seed for each request, and an end to those stopped."""

    _ends: Sequence[int] = ()
    """Tokens that end a response, once the engine has told."""

    async def generate(
        self, request_id: str, *, sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Generate one turn of a response. Raises `Stopped` if it was stopped."""
        running = _running.get()
        if running is None:  # of a validation
            return await super().generate(request_id, sampling_params=sampling_params, **kwargs)
        if running.asked.carrying is not None:
            output = await self._carry(running, request_id, sampling_params, **kwargs)
        else:
            seed = {"seed": running.next_seed()}
            output = await self._ask(running, request_id, {**sampling_params, **seed}, **kwargs)
        if output is None or output.stop_reason in ("aborted", "abort"):
            raise Stopped
        return output

    async def _ask(
        self, running: Running, request_id: str, sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Have a server generate. Returns an aborted output if the response was stopped."""
        if running.is_stopped:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        try:
            output = await super().generate(request_id, sampling_params=sampling_params, **kwargs)
        finally:
            running.server = None
        running.num_tokens += len(output.token_ids)
        if output.stop_reason in ("aborted", "abort") and not running.is_stopped:
            raise RuntimeError("the engine aborted the response, and was not asked to")
        return output

    async def _carry(
        self,
        running: Running,
        request_id: str,
        sampling_params: dict[str, Any],
        *,
        prompt_ids: list[int],
        **kwargs: Any,
    ) -> Any:
        """Generate a response from its carried tokens on. Returns None if it was stopped."""
        asked, rollout = running.asked, self.config.actor_rollout_ref.rollout
        assert asked.carrying is not None
        if running.turns or sampling_params.get("stop"):
            raise ValueError(
                "carry=exact is for agents of a single turn, without stop strings: leave it out"
            )
        running.turns = 1
        room = rollout.prompt_length + rollout.response_length - len(prompt_ids)
        sampling = SamplingParams(
            max_response_tokens=min(rollout.response_length, room),
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            top_k=max(sampling_params["top_k"], 0),
            seed=rollout.seed,
        )
        request = replace(asked.carrying, prompt_tokens=tuple(prompt_ids), sampling=sampling)

        async def ask(given: list[int], more: dict[str, Any]) -> Any:
            prompt = [*prompt_ids, *given]
            params = {**sampling_params, **more}
            return await self._ask(running, request_id, params, prompt_ids=prompt, **kwargs)

        async def take_anew(name: str | None) -> Anew:
            if (name is None and self._ends) or running.last_server is None:
                return (), (), self._ends
            call = running.last_server.__ray_call__.remote(_take_anew, name or "")
            found: Anew = await call
            self._ends = found[2]
            return found

        running.output, output = await generated(request, asked.version, ask, take_anew)
        return output

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        name, server = await super()._acquire_server(request_id, **extra)
        if (running := _running.get()) is not None:
            running.server = running.last_server = server
        return name, server

    def _vllm_request_id(self, request_id: str) -> str:
        engine_id: str = super()._vllm_request_id(request_id)
        if (running := _running.get()) is not None:
            running.engine_id = engine_id
        return engine_id


def _abort(server: Any, engine_ids: list[str]) -> None:
    """Abort requests of a vLLM server, in whose process this runs. verl's own `abort_request` looks
    for names that vLLM does not use, and its `abort_all_requests` passes an argument that newer
    versions of vLLM have no more."""
    # Ray calls this in a thread of its own, without the event loop of the engine.
    loop = server.engine.output_handler.get_loop()
    abort = asyncio.run_coroutine_threadsafe(server.engine.abort(engine_ids), loop)
    abort.add_done_callback(_report)


def _take_anew(server: Any, name: str) -> Any:
    """Return what `vllm_worker.Extension.take_anew` does, in the process of a vLLM server."""
    loop, engine = server.engine.output_handler.get_loop(), server.engine
    call = asyncio.run_coroutine_threadsafe(engine.collective_rpc("take_anew", args=(name,)), loop)
    return call.result()[0]  # all of an engine's processes draw the same


def _report(abort: Future[None]) -> None:
    if (error := abort.exception()) is not None:
        logger.error("vLLM did not abort responses that were stopped", exc_info=error)


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's worker, which runs the requests of a prompt and reports their ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests: dict[str, Running] = {}
        self._ends: asyncio.Queue[End] = asyncio.Queue()

    async def ends(self) -> list[End]:
        """Wait for the end of a request, and return all that have ended."""
        ends = [await self._ends.get()]
        while not self._ends.empty():
            ends.append(self._ends.get_nowait())
        return ends

    async def stop(self, ids: Sequence[str]) -> None:
        """Stop these requests. Returns when they have ended: one in a tool or a reward goes on
        until that is done."""
        stopped = [self._requests[one] for one in ids if one in self._requests]
        for running in stopped:
            running.is_stopped = True
        while stopped := [one for one in stopped if one.asked.id in self._requests]:
            by_server: dict[Any, list[str]] = {}
            for one in stopped:
                if one.server is not None and one.engine_id:
                    by_server.setdefault(one.server, []).append(one.engine_id)
            await asyncio.gather(
                *(one.__ray_call__.remote(_abort, ids) for one, ids in by_server.items())
            )
            await asyncio.sleep(ABORT_AGAIN_S)

    async def _run_prompt(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool = False,
    ) -> None:
        requests = prompt.pop(REQUESTS, None)
        if requests is None:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        runs = (
            self._run_request(Asked(*one), dict(sampling_params), trajectory, trace=trace, **prompt)
            for one in requests
        )
        await asyncio.gather(*runs)

    async def _run_request(self, asked: Asked, *args: Any, **kwargs: Any) -> None:
        running = self._requests[asked.id] = Running(asked)
        _running.set(running)  # in this request's task alone, and in those that it starts
        reason, why = "stop", ""
        try:
            await self._run_agent_loop(*args, session_id=asked.place, **kwargs)
        except Stopped:
            reason = "stopped"
        except Exception as error:  # of an engine, a tool or a reward
            logger.exception("request %s failed", asked.id)
            reason, why = "failed", f"{type(error).__name__}: {error}"
        del self._requests[asked.id]
        output = None if reason == "failed" else running.output
        self._ends.put_nowait(End(asked.id, running.num_tokens, reason, why, output))


def _asked(request: Request, version: int | None) -> Asked:
    found = Asked(request.id, request.place, request.seed)
    if version is None:
        return found
    carrying = GenerationRequest(
        sample=request.sample,
        prompt_tokens=(),
        sampling=SamplingParams(max_response_tokens=0),  # of both the worker knows
        noise=request.noise,
        carried=request.carried,
    )
    return found._replace(version=version, carrying=carrying)


class Manager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager of workers, which starts and stops single responses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(Worker)
        self._polls: dict[Any, Any] = {}
        """For each worker a call that returns when a request has ended."""
        self._calls: set[Any] = set()
        """Calls of workers that are under way, whose errors must not be lost."""

    def start(
        self, requests: Sequence[Request], rows: dict[int, Any], step: int, version: int | None
    ) -> None:
        """Start requests. `rows` has the row of each prompt, of a single one in its batch. `step`:
        number of the step. `version`: number of the weights' updates so far, if tokens are
        carried; None: they are not."""
        by_worker: dict[int, list[Any]] = {}
        for prompt, group in groupby(requests, key=lambda request: request.prompt):
            row = rows[prompt].clone()
            asked = [tuple(_asked(one, version)) for one in group]
            tensordict_utils.assign_non_tensor_stack(row, REQUESTS, [asked])
            by_worker.setdefault(self._worker_of(prompt), []).append(row)
        for worker, found in by_worker.items():
            batch = tensordict_utils.concat_tensordict(found)
            tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
            self._calls.add(self.agent_loop_workers[worker].generate_sequences.remote(batch))

    def stop(self, requests: Sequence[Request]) -> None:
        """Stop requests. Each is reported by `ends` when it has."""
        by_worker: dict[int, list[str]] = {}
        for request in requests:
            by_worker.setdefault(self._worker_of(request.prompt), []).append(request.id)
        for worker, ids in by_worker.items():
            self._calls.add(self.agent_loop_workers[worker].stop.remote(ids))

    def ends(self) -> Iterator[End]:
        """Wait for a worker, and yield the requests that have ended, or none. Raises the error of
        a worker that was lost, or that could not start or stop."""
        for worker in set(self.agent_loop_workers) - set(self._polls.values()):
            self._polls[worker.ends.remote()] = worker
        ready, _ = ray.wait([*self._polls, *self._calls], num_returns=1)
        for call in ready:
            found = ray.get(call)
            if self._polls.pop(call, None) is not None:
                yield from found
            self._calls.discard(call)

    def _worker_of(self, prompt: int) -> int:
        return prompt % len(self.agent_loop_workers)
