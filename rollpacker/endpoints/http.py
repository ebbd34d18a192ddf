"""The HTTP side of an endpoint: bounded answers, no redirects, and what is read from them."""

from __future__ import annotations

import email.utils
import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rollpacker.rewards.base import RewardError

MAX_RESPONSE_BYTES = 2**20
MAX_RETRY_AFTER_S = 60.0
"""However long an endpoint asks to be left alone."""
_DROPPED_HEADERS = {"content-length", "transfer-encoding"}


def checked_url(url: str) -> str:
    """The address without a slash at its end. Raises `RewardError` for what is none."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise RewardError(f'url "{url}" is no address; write it like http://localhost:8000/v1.')
    if parts.username or parts.password:
        raise RewardError("url holds a password; put it into an environment variable (token_env).")
    if parts.query or parts.fragment:
        raise RewardError(f'url "{url}" must end with its path, such as /v1.')
    for ending in ("/chat/completions", "/completions"):
        if parts.path.rstrip("/").endswith(ending):
            raise RewardError(f'url "{url}" must be the address before {ending}.')
    return url.rstrip("/")


def open_client(url: str, token: str | None, concurrency: int) -> Any:
    """An `AsyncOpenAI` that reads answers up to a size, follows no redirect, and repeats nothing
    by itself. Its own time limits are off: whoever calls limits the whole attempt."""
    import httpx2
    import openai

    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return openai.AsyncOpenAI(
        base_url=url,
        api_key=token or "none",
        max_retries=0,
        timeout=None,
        default_headers={"Accept-Encoding": "identity"},
        http_client=_bounded_client_class()(limits=limits, follow_redirects=False, timeout=None),
    )


def _bounded_client_class() -> Any:
    import httpx2

    class BoundedClient(httpx2.AsyncClient):
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            """Read the whole answer here, so that nobody else does so without a bound."""
            response = await super().send(request, stream=True, **options)
            try:
                body = await _bounded_body(response)
            finally:
                await response.aclose()
            headers = [
                (name, value)
                for name, value in response.headers.multi_items()
                if name.lower() not in _DROPPED_HEADERS
            ]
            return httpx2.Response(
                response.status_code, headers=headers, content=body, request=request
            )

    return BoundedClient


async def _bounded_body(response: Any) -> bytes:
    """Raises a transport error for an answer that is too large or compressed, before it unfolds."""
    import httpx2

    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise httpx2.RemoteProtocolError("its answer is compressed, which was not asked for")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise httpx2.RemoteProtocolError(f"its answer has more than {MAX_RESPONSE_BYTES} bytes")
    return bytes(body)


def connection_trouble(error: BaseException) -> str:
    """Why there was no answer, in a few words."""
    cause = error.__cause__ or error
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def retry_after_s(value: str | None, now: float) -> float | None:
    """What a `Retry-After` header asks for, in seconds from `now` (Unix time): a number or an HTTP
    date, at most `MAX_RETRY_AFTER_S`. None for what is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (ValueError, TypeError, OverflowError, IndexError):
            return None
    if math.isnan(seconds):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def reply_text(body: bytes) -> str | None:
    """The text of a chat completion's first choice; "" for a refusal or a reply without text. None
    if the body is no chat completion at all (an error page, half an answer)."""
    try:
        message = json.loads(body)["choices"][0]["message"]
        content = message["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    if content is None:
        return ""
    return content if isinstance(content, str) else None


def error_text(body: bytes) -> str:
    """What an error answer says, on one line of printable characters."""
    text = body.decode("utf-8", "replace")
    try:
        told = json.loads(text)
        told = told.get("error", told) if isinstance(told, Mapping) else told
        text = str(told["message"] if isinstance(told, Mapping) else told)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
