"""Completions from an OpenAI-compatible endpoint that may be slow, busy, down or hostile.

complete -> a free place -> the endpoint is up -> one request, limited in time and size
               ^                  |                       |
               +--- back-off, or what Retry-After says ---+

While the endpoint is down or too busy, callers wait: they hold no connection, and nothing about
their sample is decided. A mistake in the set-up (key, model, address) fails at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.endpoints.http import (
    CompressedAnswer,
    checked_url,
    http_library,
    one_line,
    read_bounded,
    retry_after_s,
)
from rollpacker.endpoints.service import Service
from rollpacker.rewards.judge.completer import CompletionFailed
from rollpacker.rewards.reward import Cause

logger = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 2**20
MAX_DETAIL_CHARS = 200

_BUSY = {429}
_PASSING = {408, 409, 425, *_BUSY}
_REQUEST_ID = "rollpacker-"


class _Passing(Exception):
    """A request failed, and may succeed if sent again. `after_s`: seconds to wait first, if the
    endpoint asks for them, else None. `busy`: whether it says that it has too much to do."""

    def __init__(self, why: str, *, after_s: float | None = None, busy: bool = False) -> None:
        super().__init__(why)
        self.after_s = after_s
        self.busy = busy


class _Refused(Exception):
    """The endpoint refuses the request as it is (400, 413, 422)."""


@dataclass(eq=False, slots=True, kw_only=True)
class EndpointCompleter:
    """Asks one model behind one address for completions. Meets the protocol `Completer`. An attempt
    that fails is repeated up to `max_retries` times. While the endpoint is down or says that it is
    too busy, attempts go on until this has lasted for `outage_s` seconds."""

    url: str
    """The base address, up to and with `/v1`."""
    model: str
    token: str | None = None
    schema: Mapping[str, Any] | None = None
    """A JSON schema for the reply, sent as `response_format`. It is dropped if the endpoint refuses
    requests with it. None: no schema is sent."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request to the endpoint, by name."""
    concurrency: int = 16
    max_retries: int = 6
    outage_s: float = 1800.0
    probe_every_s: float = 5.0
    first_backoff_s: float = 0.5
    num_retries: int = field(default=0, init=False)
    """Number of attempts that failed and could be made again, over all requests."""
    _service: Service = field(init=False)
    _places: asyncio.Semaphore = field(init=False)
    _http: Any = field(init=False)
    """The module httpx2, which is imported when a completer is made."""
    _client: Any = field(init=False)
    _address: str = field(init=False)

    def __post_init__(self) -> None:
        self._service = Service(
            self.name,
            outage_s=self.outage_s,
            probe_every_s=self.probe_every_s,
            first_pause_s=self.first_backoff_s,
        )
        self._places = asyncio.Semaphore(self.concurrency)
        self._address = f"{checked_url(self.url)}/chat/completions"
        self._http = http_library("the reward judge with a url")
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        self._client = self._http.AsyncClient(
            headers=headers,
            limits=self._http.Limits(
                max_connections=self.concurrency, max_keepalive_connections=self.concurrency
            ),
            timeout=None,  # each attempt is limited as a whole
            follow_redirects=False,
        )

    @property
    def name(self) -> str:
        return f"the judge at {self.url}"

    @property
    def waited_s(self) -> float:
        """Sum of the seconds that requests have waited for an endpoint that was down or busy."""
        return self._service.waited_s

    def outage(self) -> str | None:
        return self._service.outage()

    async def complete(self, messages: Sequence[Mapping[str, str]], *, timeout_s: float) -> str:
        """Return the reply's text. `timeout_s` limits each attempt, not the waiting before it.

        Raises:
            CompletionFailed: after retries, after an outage of `outage_s` seconds, or at once where
                another attempt cannot help.
        """
        async with self._places:
            return await self._until_answered(list(messages), timeout_s)

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        await self._client.aclose()

    # -- one request -------------------------------------------------------------------

    async def _until_answered(self, messages: list[Mapping[str, str]], timeout_s: float) -> str:
        """Make attempts until the endpoint answers, and return the reply's text. Raises
        `CompletionFailed` if the request is given up."""
        service = self._service
        started = asyncio.get_running_loop().time()
        why = "it does not answer"
        num_passing = num_not_busy = num_others_answered = 0
        while True:
            if not await service.ready(started):
                raise CompletionFailed(self._given_up(why), Cause.INFRASTRUCTURE)
            try:
                if num_not_busy > self.max_retries:
                    if not await self._answers_others(timeout_s):
                        raise _Passing(why)
                    # It is this request that it cannot answer, or the trouble has just ended.
                    num_others_answered += 1
                    if num_others_answered > 1:
                        raise CompletionFailed(
                            f"{self.name} failed {num_not_busy} times on this request ({why}),"
                            " while it answers others",
                            Cause.INFRASTRUCTURE,
                        )
                reply = await self._attempt(messages, timeout_s)
            except _Passing as error:
                why = str(error)
                self.num_retries += 1
                num_passing += 1
                num_not_busy += not error.busy
                service.failed(why, after_s=error.after_s)
                await service.pause(num_passing)
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
        """The reason why a request is given up. It holds no time that differs between requests,
        since samples are counted by reason."""
        service = self._service
        if service.outage() is None:
            return f"{service.name} could not be used ({why})"
        limit = f"outage_s={service.outage_s:g}"
        return f"{service.name} was down for longer than {limit} ({service.breaker.why})"

    # -- one attempt -------------------------------------------------------------------

    async def _attempt(self, messages: list[Mapping[str, str]], timeout_s: float) -> str:
        """Send the request once and return the reply's text. If the endpoint refuses the request
        with the JSON schema, send it without, and leave the schema out from then on."""
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
        body: dict[str, Any] = {"model": self.model, "messages": messages, **self.request}
        if schema is not None:
            shape = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        request_id = _REQUEST_ID + uuid.uuid4().hex
        headers = {"X-Request-Id": request_id}
        told = json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(
                    "POST", self._address, content=told, headers=headers
                ) as response,
            ):
                content, is_whole = await read_bounded(response, MAX_RESPONSE_BYTES)
        except TimeoutError:
            raise _Passing(f"no answer within {timeout_s:g} s") from None
        except CompressedAnswer as error:
            raise _Passing(f"it sent {error}") from None
        except (self._http.HTTPError, self._http.StreamError, OSError) as error:
            raise _Passing(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if not is_whole:
            raise _Passing(f"its answer has more than {MAX_RESPONSE_BYTES} bytes")
        if not response.is_success:
            raise self._status(response, content)
        answered = response.headers.get("x-request-id", request_id)
        if answered.startswith(_REQUEST_ID) and answered != request_id:
            raise _Passing("it answered another request")
        reply = reply_text(content)
        if reply is None:
            raise _Passing(f"its answer is no chat completion{self._detail(content)}")
        return reply

    def _status(self, response: Any, content: bytes) -> Exception:
        """The error for an unsuccessful HTTP status: `_Passing` if another attempt may succeed,
        `_Refused` if this request is at fault, `CompletionFailed` if the user's settings are."""
        status, detail = response.status_code, self._detail(content)
        if status in _PASSING or status >= 500:
            after_s = retry_after_s(response.headers.get("retry-after"), time.time())
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

    def _detail(self, content: bytes) -> str:
        """The endpoint's error message after ": ", shortened and without the key; "" for none."""
        text = error_text(content)
        text = text.replace(self.token, "***") if self.token else text
        return f": {text[:MAX_DETAIL_CHARS]}" if text else ""

    async def _answers_others(self, timeout_s: float) -> bool:
        """Whether the endpoint answers, or refuses, a request that any model can answer."""
        try:
            await self._send([{"role": "user", "content": "Reply with OK."}], timeout_s, None)
        except _Passing:
            return False
        except (_Refused, CompletionFailed):
            return True
        return True


def reply_text(body: bytes) -> str | None:
    """The text of a chat completion's first choice; empty for a refusal or a reply without text.
    None if the body is no chat completion (such as an error page or half an answer)."""
    try:
        message = json.loads(body)["choices"][0]["message"]
        content = message["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    if content is None:
        return ""
    return content if isinstance(content, str) else None


def error_text(body: bytes) -> str:
    """The message in an error response, on one line of printable characters."""
    text = body.decode("utf-8", "replace")
    try:
        told = json.loads(text)
        told = told.get("error", told) if isinstance(told, Mapping) else told
        text = str(told["message"] if isinstance(told, Mapping) else told)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return one_line(text)
