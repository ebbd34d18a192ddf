"""Completions from an OpenAI-compatible endpoint that may be slow, busy, down or hostile.

complete -> a free place -> the breaker says go -> one request, limited in time and size
               ^                  |                       |
               +--- back-off, or what Retry-After says ---+

While the endpoint is down or too busy, callers wait: they hold no connection, and nothing about
their sample is decided. A mistake in the set-up (key, model, address) fails at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.endpoints.http import checked_url, retry_after_s
from rollpacker.endpoints.service import Service
from rollpacker.rewards.judge.client import connection_trouble, error_text, open_client, reply_text
from rollpacker.rewards.judge.completer import CompletionFailed
from rollpacker.rewards.reward import Cause

logger = logging.getLogger(__name__)

MAX_DETAIL_CHARS = 200

_BUSY = {429}
_PASSING = {408, 409, 425, *_BUSY}
_REQUEST_ID = "rollpacker-"


class _Passing(Exception):
    """This attempt failed for a reason that may pass."""

    def __init__(self, why: str, *, after_s: float | None = None, busy: bool = False) -> None:
        super().__init__(why)
        self.after_s = after_s
        self.busy = busy


class _Refused(Exception):
    """The endpoint refuses the request as it is (400, 413, 422)."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """The connections, places and service of one event loop."""

    loop: asyncio.AbstractEventLoop
    places: asyncio.Semaphore
    service: Service
    client: Any


@dataclass(eq=False, slots=True, kw_only=True)
class EndpointCompleter:
    """Asks one model behind one address. Meets `Completer`.

    An attempt that fails is repeated up to `max_retries` times, and, while the endpoint is
    down or says that it is too busy, until it has been so for `outage_s` seconds.
    """

    url: str
    """The base address, up to and with `/v1`."""
    model: str
    token: str | None = None
    schema: Mapping[str, Any] | None = None
    """A JSON schema for the reply, sent as `response_format` until the endpoint turns out not to
    take it."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request."""
    concurrency: int = 16
    max_retries: int = 6
    outage_s: float = 1800.0
    probe_every_s: float = 5.0
    first_backoff_s: float = 0.5
    num_retries: int = field(default=0, init=False)
    """Attempts after the first of each request."""
    _bound: _Bound | None = field(default=None, init=False)
    _waited_before_s: float = field(default=0.0, init=False)
    """In event loops that are left."""

    @property
    def name(self) -> str:
        return f"the judge at {self.url}"

    @property
    def waited_s(self) -> float:
        """Seconds that requests waited for an endpoint that was down or busy, in all."""
        return self._waited_before_s + (self._bound.service.waited_s if self._bound else 0.0)

    def outage(self) -> str | None:
        return None if self._bound is None else self._bound.service.outage()

    async def complete(self, messages: Sequence[Mapping[str, str]], *, timeout_s: float) -> str:
        """The reply's text. `timeout_s` limits each attempt, not the waiting before it.

        Raises:
            CompletionFailed: after retries, after an outage of `outage_s`, or at once where trying
                again cannot help.
        """
        bound = self._bind()
        async with bound.places:
            return await _Attempts(self, bound.service, timeout_s).run(list(messages))

    async def close(self) -> None:
        """Close the connections of the running loop."""
        bound = self._bound
        if bound is not None and bound.loop is asyncio.get_running_loop():
            self._leave(bound)
            await bound.client.close()

    def _bind(self) -> _Bound:
        """The `_Bound` of the running loop, made anew if the loop is another one."""
        loop = asyncio.get_running_loop()
        if self._bound is not None:
            if self._bound.loop is loop:
                return self._bound
            self._leave(self._bound)
        self._bound = _Bound(
            loop=loop,
            places=asyncio.Semaphore(self.concurrency),
            service=Service(
                self.name,
                outage_s=self.outage_s,
                probe_every_s=self.probe_every_s,
                first_pause_s=self.first_backoff_s,
            ),
            client=open_client(checked_url(self.url), self.token, self.concurrency),
        )
        return self._bound

    def _leave(self, bound: _Bound) -> None:
        self._waited_before_s += bound.service.waited_s
        self._bound = None

    # -- one attempt -------------------------------------------------------------------

    async def _attempt(self, messages: list[Mapping[str, str]], timeout_s: float) -> str:
        """One reply; with the schema first, and without it where the endpoint refuses it."""
        if self.schema is None:
            return await self._send(messages, timeout_s, None)
        try:
            return await self._send(messages, timeout_s, self.schema)
        except _Refused:
            reply = await self._send(messages, timeout_s, None)
        if self.schema is not None:
            self.schema = None
            logger.warning("%s takes no response_format json_schema; going on without", self.name)
        return reply

    async def _send(
        self, messages: list[Mapping[str, str]], timeout_s: float, schema: Mapping[str, Any] | None
    ) -> str:
        import openai

        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if schema is not None:
            shape = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        request_id = _REQUEST_ID + uuid.uuid4().hex
        try:
            async with asyncio.timeout(timeout_s):
                raw = await self._bind().client.chat.completions.with_raw_response.create(
                    **body,
                    extra_body=dict(self.request),
                    extra_headers={"X-Request-Id": request_id},
                    timeout=timeout_s,
                )
        except (TimeoutError, openai.APITimeoutError):
            raise _Passing(f"no answer within {timeout_s:g} s") from None
        except openai.APIStatusError as error:
            raise self._status(error) from None
        except openai.APIConnectionError as error:
            raise _Passing(connection_trouble(error)) from None
        answered = raw.headers.get("x-request-id", request_id)
        if answered.startswith(_REQUEST_ID) and answered != request_id:
            raise _Passing("it answered another request")
        reply = reply_text(raw.http_response.content)
        if reply is None:
            detail = self._safe(error_text(raw.http_response.content))[:MAX_DETAIL_CHARS]
            raise _Passing(f"its answer is no chat completion: {detail}")
        return reply

    def _status(self, error: Any) -> Exception:
        """The error for an HTTP status: it may pass, or the request is refused, or the set-up is
        wrong."""
        status, detail = error.status_code, self._detail(error)
        if status in _PASSING or status >= 500:
            after_s = retry_after_s(error.response.headers.get("retry-after"), time.time())
            return _Passing(f"{status}{detail}", after_s=after_s, busy=status in _BUSY)
        if status in (400, 413, 422):
            return _Refused(f"{self.name} refuses the request ({status}{detail})")
        match status:
            case 401 | 403:
                why = "refuses the key"
                cure = "Set token_env to the environment variable that holds a valid key."
            case 404:
                why = f"has no model {self.model}, or the address is wrong"
                cure = "Correct model or url (it usually ends in /v1)."
            case _ if 300 <= status < 400:
                why = "sends elsewhere, and redirects are not followed"
                cure = "Put the final address into url."
            case _:
                why, cure = "refuses requests", "Correct url or request."
        return CompletionFailed(
            f"{self.name} {why} ({status}{detail}). {cure}", Cause.INFRASTRUCTURE, wrong_set_up=True
        )

    def _detail(self, error: Any) -> str:
        """The endpoint's own words, cut and without the key; "" if it says nothing."""
        text = error_text(error.response.content)
        return f": {self._safe(text)[:MAX_DETAIL_CHARS]}" if text else ""

    def _safe(self, text: str) -> str:
        return text.replace(self.token, "***") if self.token else text

    async def _answers_others(self, timeout_s: float) -> bool:
        """Whether it answers the simplest of requests."""
        try:
            await self._send([{"role": "user", "content": "Reply with OK."}], timeout_s, None)
        except _Passing:
            return False
        except (_Refused, CompletionFailed):
            return True
        return True


class _Attempts:
    """One request until it is answered or given up."""

    def __init__(self, endpoint: EndpointCompleter, service: Service, timeout_s: float) -> None:
        self._endpoint, self._service = endpoint, service
        self._timeout_s = timeout_s
        self._started = asyncio.get_running_loop().time()
        self._num_passing = 0
        self._num_failed = 0
        """Without the attempts that were told that the endpoint is busy."""
        self._num_others_answered = 0

    async def run(self, messages: list[Mapping[str, str]]) -> str:
        endpoint, service = self._endpoint, self._service
        why = "it does not answer"
        while True:
            if not await service.ready(self._started):
                raise CompletionFailed(self._given_up(why), Cause.INFRASTRUCTURE)
            try:
                if self._num_failed > endpoint.max_retries:
                    await self._suspect(why)
                reply = await endpoint._attempt(messages, self._timeout_s)
            except _Passing as error:
                why = str(error)
                await self._failed(error)
            except _Refused as error:
                service.succeeded()
                raise CompletionFailed(str(error), Cause.SAMPLE) from None
            except CompletionFailed:
                service.succeeded()
                raise
            else:
                service.succeeded()
                return reply

    def _given_up(self, why: str) -> str:
        """Without a number of seconds that grows: samples are counted by it."""
        service = self._service
        if service.outage() is None:
            return f"{service.name} could not be used ({why})"
        limit = f"outage_s={service.outage_s:g}"
        return f"{service.name} was down for longer than {limit} ({service.breaker.why})"

    async def _failed(self, error: _Passing) -> None:
        self._endpoint.num_retries += 1
        self._num_passing += 1
        self._num_failed += not error.busy
        self._service.failed(str(error), after_s=error.after_s)
        await self._service.pause(self._num_passing)

    async def _suspect(self, why: str) -> None:
        """Many attempts failed. If the endpoint answers others, it is this request that it cannot
        answer; one more chance, since the trouble may just have ended."""
        endpoint = self._endpoint
        if not await endpoint._answers_others(self._timeout_s):
            raise _Passing(why)
        self._num_others_answered += 1
        if self._num_others_answered > 1:
            raise CompletionFailed(
                f"{endpoint.name} failed {self._num_failed} times on this request ({why}), while"
                " it answers others",
                Cause.INFRASTRUCTURE,
            )
