"""Inference servers behind HTTP as a `Host` of the scheduler: those of vLLM and SGLang.

    start -> a task for each request: place it -> ask a server -> report how it ended
    stop  -> vLLM: close the stream. SGLang: POST /abort_request until the answer has come
    a server is lost -> what ran on it starts again on another one, with the same seed

All but the two calls of `Host` runs in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollpacker.endpoints.http import checked_url, one_line
from rollpacker.engines.engine import Response
from rollpacker.scheduler.scheduler import Request, Scheduler
from rollpacker.scheduler.wire import Cut, Draw, Kind, Lost, Wire

logger = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.5
"""Seconds after which SGLang is asked again to abort: it ignores ids that it does not know yet."""
MAX_LOST = 5
"""Servers that may be lost with a request, before the request counts as the reason."""
CHECK_TOKENS = 16
CHECK_PROMPT = (1, 2, 3)
CHECK_SEEDS = ((1 << 63) - 2, (1 << 62) + 1)


class NoServer(Exception):
    """No server is left that answers."""


@dataclass(slots=True, eq=False)
class _Server:
    url: str
    is_up: bool = True
    load: int = 0
    num_cuts: int = 0
    """How often a connection to it ended before its answer was whole (`Cut`)."""
    prompts: Counter[int] = field(default_factory=Counter)
    """Number of requests that run there, by their prompt's number."""


@dataclass(slots=True, eq=False)
class _Run:
    """A request under way."""

    request: Request
    draw: Draw
    server: _Server | None = None
    """The server that was asked for it. None: it waits for one."""
    is_stopping: bool = False
    limit: asyncio.Timeout = field(default_factory=partial(asyncio.Timeout, None))
    """Expires as the server is cut, by which the request starts again elsewhere."""


class Servers:
    """A `Host` whose responses come from inference servers. Set `scheduler` before the first
    step."""

    scheduler: Scheduler

    def __init__(
        self,
        kind: Kind,
        urls: Sequence[str],
        prompts: Callable[[int], Sequence[int]],
        *,
        vocab_size: int,
        max_response_tokens: int,
        sampling: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        ended: Callable[[Request, Draw], object] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        token_env: str | None = None,
        returned: Callable[[str], Awaitable[None]] | None = None,
        abort_s: float = 10.0,
        pause_s: float = 1.0,
        outage_s: float = 120.0,
        silence_s: float = 3600.0,
    ) -> None:
        """`urls`: addresses of the servers, such as "http://node1:8000", which all hold the same
        weights. `prompts` gives the tokens of a prompt by its number (`Request.prompt`). Tokens are
        numbers below `vocab_size`, and a response has at most `max_response_tokens`, which is that
        of the scheduler's config. `sampling`: the server's own sampling settings, such as
        {"temperature": 1.0, "stop_token_ids": [2]}. `extra`: more of each request's body, such as
        {"return_routed_experts": True}. `ended` is called with each whole response, before the
        scheduler hears of it. `loop`: where all of it runs, by default the
        event loop that runs now. `token_env` names the environment variable with a bearer token.

        A request that is stopped counts as stopped `abort_s` seconds later, whatever its server
        does. A lost server is asked for its health every `pause_s` seconds, and used again once it
        has answered, and once `returned`, which is called with its address, is through: load the
        present weights there. A step fails if no server answers for `outage_s` seconds. A server
        that sends nothing for `silence_s` seconds is lost.
        Raises `ValueError` for settings that cannot be right."""
        if kind not in ("vllm", "sglang"):
            raise ValueError(f'kind "{kind}" of server is not known: it is "vllm" or "sglang"')
        if not urls:
            raise ValueError("no server is given: urls is empty")
        example = "http://localhost:8000"
        self._servers = [_Server(checked_url(u, key="urls", example=example)) for u in urls]
        self._prompts, self._returned, self._whole = prompts, returned, ended
        self._loop = loop or asyncio.get_running_loop()
        self._abort_s, self._pause_s, self._outage_s = abort_s, pause_s, outage_s
        self._draw = partial(Draw, max_tokens=max_response_tokens, vocab_size=vocab_size)
        self._wire = Wire(kind, sampling or {}, token_env, silence_s, extra or {})
        self._some_up = asyncio.Event()
        self._some_up.set()
        self._running: dict[str, tuple[_Run, asyncio.Task[None]]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._responses: dict[str, Response] = {}
        self._version = -1
        """The scheduler's version when these responses ended."""
        self._is_closed = False

    # -- what the scheduler calls, and the trainer ---------------------------------------------

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to generate these responses (`Host.start`), from any thread."""
        if not hasattr(self, "scheduler"):
            raise RuntimeError("set servers.scheduler to the scheduler before its first step")
        self._loop.call_soon_threadsafe(self._start, tuple(requests))

    def stop(self, requests: Sequence[Request]) -> None:
        """Stop these responses (`Host.stop`), from any thread."""
        self._loop.call_soon_threadsafe(self._stop, tuple(requests))

    def response(self, request: Request) -> Response:
        """Return the tokens and log-probs of a request that a step trains on. They are kept until
        the first response of the next step ends. Raises `KeyError` for another request."""
        return self._responses[request.id]

    @property
    def up(self) -> list[str]:
        """Addresses of the servers that are not lost."""
        return [server.url for server in self._servers if server.is_up]

    async def check(self) -> None:
        """Ask each server for a few responses. Raises `ValueError`, in one sentence, if one of them
        does not answer, gives no token ids or log-probs, does not draw the same tokens again with
        the same seed, or cannot stop a response."""
        await asyncio.gather(*map(self._check, self._servers))

    async def close(self) -> None:
        """End all that runs, without a report to the scheduler, and close the connections."""
        self._is_closed = True
        tasks = [*(task for _, task in self._running.values()), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._wire.close()

    # -- a request's life ----------------------------------------------------------------------

    def _start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            run = _Run(request, self._draw((), request.seed))
            task = self._loop.create_task(self._serve(run))
            self._running[request.id] = run, task
            task.add_done_callback(partial(self._ended, run))

    def _stop(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.id not in self._running:
                continue  # it has just ended by itself
            run, task = self._running[request.id]
            run.is_stopping = True
            if self._wire.kind == "vllm" or run.server is None:
                task.cancel()
            else:
                self._in_background(self._abort(run.server, run.draw, task))

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _ended(self, run: _Run, task: asyncio.Task[None]) -> None:
        """Report how a request ended. A task that was cancelled before it ran gets here, too."""
        request, draw, scheduler = run.request, run.draw, self.scheduler
        del self._running[request.id]
        error = None if task.cancelled() else task.exception()
        if self._is_closed or (task.cancelled() and not run.is_stopping):
            return  # the event loop ends
        if isinstance(error, ValueError):
            scheduler.ended(request, reason="failed", why=one_line(str(error))[:300])
        elif error is not None:
            scheduler.fail(error)
        elif not draw.is_whole:
            scheduler.ended(request, draw.tokens, "stopped", log_probs=draw.log_probs)
        else:
            if self._version != scheduler.version:
                self._responses.clear()
                self._version = scheduler.version
            self._responses[request.id] = Response(
                sample=request.sample,
                prompt_tokens=draw.prompt,
                tokens=tuple(draw.tokens),
                log_probs=tuple(draw.log_probs),
                finish_reason=draw.finish,
                version=self._version,
            )
            if self._whole is not None:
                self._whole(request, draw)
            scheduler.ended(
                request,
                draw.tokens,
                "stop" if draw.finish == "stop" else "length",
                log_probs=draw.log_probs,
            )

    async def _serve(self, run: _Run) -> None:
        """Generate a response, again on another server if one is lost."""
        number, draw, num_lost = run.request.prompt, run.draw, 0
        draw.prompt = tuple(self._prompts(number))
        while num_lost < MAX_LOST:
            server = run.server = await self._placed(number)
            server.load += 1
            server.prompts[number] += 1
            try:
                async with asyncio.timeout(None) as run.limit:
                    await self._wire.ask(server.url, draw)
                if draw.finish == "abort" and not run.is_stopping:
                    raise Lost("it aborted a response, and was not asked to")
            except TimeoutError:
                draw.finish = ""
            except Lost as error:
                draw.finish = ""
                num_lost += error.was_taken
                run.server = None
                self._lose(server, error)
            finally:
                server.load, run.server = server.load - 1, None
                server.prompts -= Counter((number,))
            if draw.is_whole or run.is_stopping:
                return
        raise ValueError(f"{MAX_LOST} servers were lost with it")

    async def _placed(self, number: int) -> _Server:
        """Return the server for a response: that of its prompt's others, whose cache has the
        prompt, or the one with the fewest requests. Raises `NoServer`."""
        try:
            async with asyncio.timeout(self._outage_s):
                await self._some_up.wait()
        except TimeoutError:
            urls = ", ".join(server.url for server in self._servers)
            raise NoServer(f"no server has answered for {self._outage_s:g} s: {urls}") from None
        up = [server for server in self._servers if server.is_up]
        return min(up, key=lambda server: (not server.prompts[number], server.load))

    async def _abort(self, server: _Server, draw: Draw, task: asyncio.Task[None]) -> int:
        """Have SGLang abort a response, whose task then ends with what it had; after `abort_s` the
        task is cancelled. Returns the last HTTP status, 0 if there was none."""
        status = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self._abort_s):
                while not task.done():
                    url = f"{server.url}/abort_request"
                    status = await self._wire.status("POST", url, {"rid": draw.id})
                    await asyncio.wait([task], timeout=ABORT_AGAIN_S)
        task.cancel()
        return status

    # -- servers ---------------------------------------------------------------------------------

    def _lose(self, server: _Server, error: Lost) -> None:
        if isinstance(error, Cut):
            # It may be another process by now, with old weights, and some may have been sent to it.
            server.num_cuts += 1
            for run, _ in self._running.values():
                if run.server is server:
                    run.limit.reschedule(self._loop.time())
        if not server.is_up:
            return  # another request has met it
        logger.warning("%s is lost: %s", server.url, error)
        server.is_up = False
        if not any(server.is_up for server in self._servers):
            self._some_up.clear()
        self._in_background(self._watch(server))

    async def _watch(self, server: _Server) -> None:
        """Wait until a lost server answers, and use it again."""
        while not server.is_up:
            await asyncio.sleep(self._pause_s)
            num_cuts = server.num_cuts
            if await self._wire.status("GET", f"{server.url}/health") != 200:
                continue
            try:
                if self._returned is not None:
                    await self._returned(server.url)
            except Exception as error:  # the host's
                logger.warning("%s is not used again: %s", server.url, one_line(str(error)))
                continue
            if server.num_cuts != num_cuts:
                continue  # it was cut again, perhaps after it was given the weights
            logger.warning("%s is back", server.url)
            server.is_up = True
            self._some_up.set()

    async def _check(self, server: _Server) -> None:
        async def drawn(seed: int) -> list[int]:
            draw = self._draw(CHECK_PROMPT, seed, max_tokens=CHECK_TOKENS)
            await self._wire.ask(server.url, draw, ignore_eos=True)
            return draw.tokens

        try:
            first = await drawn(CHECK_SEEDS[0])
            again, _ = await asyncio.gather(*map(drawn, CHECK_SEEDS))  # beside another response
        except (Lost, ValueError) as error:
            raise ValueError(f"{server.url} cannot be used: {one_line(str(error))[:300]}") from None
        is_vllm = self._wire.kind == "vllm"
        if first != again:
            option = "" if is_vllm else ": start SGLang with --enable-deterministic-inference"
            raise ValueError(f"{server.url} draws other tokens with the same seed{option}")
        if not is_vllm:
            draw = self._draw(CHECK_PROMPT, CHECK_SEEDS[0])
            task = self._loop.create_task(self._wire.ask(server.url, draw, ignore_eos=True))
            await asyncio.sleep(0)  # it has an id then
            status = await self._abort(server, draw, task)
            await asyncio.gather(task, return_exceptions=True)
            if status != 200 or not draw.finish:
                raise ValueError(f"{server.url} does not stop a response (POST /abort_request)")
