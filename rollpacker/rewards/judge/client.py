"""The client of an OpenAI-compatible endpoint: answers bounded in size, and what is read of
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollpacker.endpoints.http import CompressedAnswer, http_library, one_line, read_bounded
from rollpacker.imports import require

MAX_RESPONSE_BYTES = 2**20
_DROPPED_HEADERS = {"content-length", "transfer-encoding"}
_WHAT = "the reward judge with a url"


def open_client(url: str, token: str | None, concurrency: int) -> Any:
    """An `AsyncOpenAI` that reads answers up to a size, follows no redirect, and repeats nothing
    by itself. Its own time limits are off: whoever calls limits the whole attempt."""
    require("openai", extra="judge", what=_WHAT)
    http = http_library(_WHAT)
    import openai

    limits = http.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return openai.AsyncOpenAI(
        base_url=url,
        api_key=token or "none",
        max_retries=0,
        timeout=None,
        default_headers={"Accept-Encoding": "identity"},
        http_client=_bounded_client_class(http)(
            limits=limits, follow_redirects=False, timeout=None
        ),
    )


def _bounded_client_class(http: Any) -> Any:
    base: Any = http.AsyncClient

    class BoundedClient(base):  # type: ignore[misc]  # the library is known when it is asked for
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            """Read the whole answer here, so that nobody else does so without a bound."""
            response = await super().send(request, stream=True, **options)
            try:
                body, is_whole = await read_bounded(response, MAX_RESPONSE_BYTES)
            except CompressedAnswer as error:
                raise http.RemoteProtocolError(f"it sent {error}") from None
            finally:
                await response.aclose()
            if not is_whole:
                raise http.RemoteProtocolError(
                    f"its answer has more than {MAX_RESPONSE_BYTES} bytes"
                )
            headers = [
                (name, value)
                for name, value in response.headers.multi_items()
                if name.lower() not in _DROPPED_HEADERS
            ]
            return http.Response(
                response.status_code, headers=headers, content=body, request=request
            )

    return BoundedClient


def connection_trouble(error: BaseException) -> str:
    """The reason why there was no answer, in a few words."""
    cause = error.__cause__ or error
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


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
    """The message of an error answer, on one line of printable characters."""
    text = body.decode("utf-8", "replace")
    try:
        told = json.loads(text)
        told = told.get("error", told) if isinstance(told, Mapping) else told
        text = str(told["message"] if isinstance(told, Mapping) else told)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return one_line(text)
