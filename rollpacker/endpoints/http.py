"""HTTP with untrusted servers: checked addresses, answers of limited size, no redirects."""

from __future__ import annotations

import email.utils
import importlib
import ipaddress
import math
import os
from typing import Any
from urllib.parse import urlsplit

from rollpacker.imports import require

MAX_RETRY_AFTER_S = 60.0
"""The most seconds of a pause for which an endpoint can ask by `Retry-After`."""


class CompressedAnswer(Exception):
    """Raised for a compressed answer, which was not asked for and is not unpacked."""


def http_library(what: str) -> Any:
    """Return the module httpx2. Raises `MissingPackageError`, whose text begins with `what`."""
    require("httpx2", extra="judge", what=what)
    return importlib.import_module("httpx2")


def checked_url(url: str, *, key: str = "url", example: str = "http://localhost:8000/v1") -> str:
    """Return the HTTP address without a slash at its end. Raises `ValueError` if it is no HTTP
    address, or has a password, a query or a fragment. `key`: name of the setting in messages."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ValueError(f'{key} "{url}" is no address; write it like {example}.')
    if parts.username or parts.password:
        raise ValueError(
            f"{key} holds a password; put it into an environment variable, and its name into"
            " token_env."
        )
    if parts.query or parts.fragment:
        raise ValueError(
            f"{key} must end with its path, such as {example}, without query or fragment."
        )
    return url.rstrip("/")


def token_from(variable: str | None) -> str | None:
    """Return the bearer token in this environment variable, or None if `variable` is None. Raises
    `ValueError` if the variable is not set or holds no token."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"the environment variable {variable} (token_env) is not set")
    if not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"the environment variable {variable} (token_env) holds no token: a token is one line"
            " of letters, digits and signs"
        )
    return token


def is_private(url: str) -> bool:
    """Whether nobody else can read what is sent to this address: by TLS, or within this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        return parts.scheme == "https" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_compressed(response: Any) -> None:
    """Raise `CompressedAnswer` if the response's headers say that its body is compressed."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise CompressedAnswer(f"a compressed reply ({encoding[:20]}), which nobody asked for")


async def read_bounded(response: Any, max_bytes: int) -> tuple[bytes, bool]:
    """Return a body up to `max_bytes`, and whether it is whole. Raises `CompressedAnswer`."""
    refuse_compressed(response)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            return bytes(body[:max_bytes]), False
    return bytes(body), True


def retry_after_s(value: str | None, now: float) -> float | None:
    """Return the seconds from `now` (Unix time) for which a `Retry-After` header asks, by a number
    or an HTTP date: at most `MAX_RETRY_AFTER_S`. None for any other text."""
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


def one_line(text: str) -> str:
    """Return text from outside as one line of printable characters, safe for a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
