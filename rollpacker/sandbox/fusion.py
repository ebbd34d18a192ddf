"""SandboxFusion's protocol, one request at a time: `POST URL/run_code`, JSON both ways.

A reply is untrusted: only a bounded part of it is read, its types are checked, and redirects and
compressed bodies are refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn

from rollpacker.endpoints.http import (
    CompressedAnswer,
    checked_url,
    http_library,
    read_bounded,
    retry_after_s,
)
from rollpacker.imports import MissingPackageError
from rollpacker.sandbox.sandbox import Limits, RunResult, SandboxUnavailable, Status

MARGIN_S = 10.0
"""Seconds that a request may take beyond the program's wall limit, for the service's queue, a new
container, and the network."""
CONNECT_S = 5.0
DEFAULT_PAUSE_S = 1.0
"""Seconds before the next attempt if an overloaded service does not say how long to wait."""
MIN_PAUSE_S = 0.1

_REPLY_BEGINS = re.compile(rb'\s*\{\s*"(status|message|(compile|run)_result|executor|files)')
_STDOUT = re.compile(rb'"stdout"\s*:\s*"((?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*+)')


class Trouble(Exception):
    """A request to the service has brought no result; the message says why."""

    def __init__(
        self, why: str, *, refused: bool = False, timed_out: bool = False, busy_s: float = 0.0
    ) -> None:
        super().__init__(why)
        self.refused = refused
        """Whether the service refused the request, so that another attempt would not help."""
        self.timed_out = timed_out
        self.busy_s = busy_s
        """Seconds that the service asks to wait before the next attempt. 0: it did not ask."""


class Wire:
    """Sends requests and reads replies, up to a bounded size. Redirects are not followed."""

    def __init__(self, url: str, token: str | None, connections: int) -> None:
        try:
            base = checked_url(url, key="sandbox.url", example="http://host:8080")
            self._http = http_library("the http sandbox")
        except (ValueError, MissingPackageError) as error:
            raise SandboxUnavailable(str(error)) from None
        self._url = f"{base}/run_code"
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._client = self._http.AsyncClient(
            headers=headers,
            timeout=self._http.Timeout(None, connect=CONNECT_S),
            limits=self._http.Limits(max_connections=connections + 1),
            follow_redirects=False,
            trust_env=False,  # no proxy and no password file of this machine's user
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(
        self, request: dict[str, Any], limits: Limits, key: str | None = None
    ) -> RunResult:
        """Send a request once, within the program's wall limit plus `MARGIN_S`, and return the
        result. `key`: idempotency key; None: a new one. Raises `Trouble`."""
        total_s = limits.wall_s + MARGIN_S
        try:
            async with asyncio.timeout(total_s):
                return await self._post(request, limits, key or str(uuid.uuid4()))
        except TimeoutError:
            why = f"did not answer within {total_s:g} s"
            raise Trouble(why, timed_out=True) from None
        except self._http.ConnectTimeout:
            raise Trouble(f"cannot be reached (no connection within {CONNECT_S:g} s)") from None
        except (self._http.HTTPError, self._http.StreamError, OSError) as error:
            raise Trouble(f"cannot be reached ({error or type(error).__name__})") from None

    async def _post(self, request: dict[str, Any], limits: Limits, key: str) -> RunResult:
        body = json.dumps(request).encode()
        headers = {"Idempotency-Key": key}
        async with self._client.stream(
            "POST", self._url, content=body, headers=headers
        ) as response:
            if response.status_code != 200:
                _raise_for(response.status_code, response.headers)
            # A character may take six bytes in JSON, and there are two streams.
            max_bytes = 12 * limits.output_bytes + (64 << 10)
            try:
                reply, is_whole = await read_bounded(response, max_bytes)
            except CompressedAnswer as error:
                raise Trouble(f"sent {error}") from None
        if is_whole:
            return parse_result(reply, limits)
        if _REPLY_BEGINS.match(reply):
            stdout = _stdout_so_far(reply)[: limits.output_bytes]
            return RunResult(status=Status.OUTPUT, truncated=True, stdout=stdout)
        raise Trouble("sent a reply without end that is not SandboxFusion's")


def _raise_for(code: int, headers: Mapping[str, str]) -> NoReturn:
    """Raise the `Trouble` that corresponds to a reply with an HTTP status other than 200."""
    if code in (401, 403):
        raise Trouble(
            f"refuses us ({code}). Set sandbox.token_env to the name of an environment variable"
            " that holds a valid token.",
            refused=True,
        )
    if code == 404:
        raise Trouble(
            "has no /run_code (404). sandbox.url must be the address of a service that speaks"
            " SandboxFusion's protocol, such as http://host:8080.",
            refused=True,
        )
    if 300 <= code < 400:
        target = headers.get("Location", "")[:200]
        raise Trouble(
            f"sends us elsewhere ({code} to {target!r}), and redirects are not followed. Set"
            " sandbox.url to where the service really is.",
            refused=True,
        )
    if code == 429 or (code == 503 and "Retry-After" in headers):
        wanted_s = retry_after_s(headers.get("Retry-After"), time.time())
        pause_s = DEFAULT_PAUSE_S if wanted_s is None else max(wanted_s, MIN_PAUSE_S)
        raise Trouble(f"is overloaded ({code})", busy_s=pause_s)
    refused = 400 <= code < 500 and code != 408
    raise Trouble(f"answered {code}", refused=refused)


def build_request(
    program: str, stdin: str | bytes, files: Mapping[str, str | bytes], limits: Limits
) -> dict[str, Any]:
    """The JSON of the request to run `program` with `stdin` and `files` (contents by name). Raises
    `ValueError` for a file name that leads out of the run's folder, and `UnicodeDecodeError` for
    input that is not UTF-8."""
    if isinstance(stdin, bytes):
        stdin = stdin.decode()
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"file name {name!r} must be relative and stay in its folder")
    return {
        "code": _encodable(program),
        "language": "python",
        "run_timeout": limits.wall_s,
        "compile_timeout": limits.wall_s,
        "memory_limit_MB": max(1, limits.memory_bytes >> 20),
        "stdin": _encodable(stdin),
        "files": {
            name: base64.b64encode(_bytes(content)).decode() for name, content in files.items()
        },
        "fetch_files": [],
    }


def _bytes(content: str | bytes) -> bytes:
    return content.encode(errors="replace") if isinstance(content, str) else content


def _encodable(text: str) -> str:
    """The text without lone surrogates, which many services cannot handle."""
    return text.encode(errors="replace").decode()


def _stdout_so_far(reply: bytes) -> bytes:
    """The stdout in a reply that was cut off, as far as it was received; may be empty."""
    found = _STDOUT.search(reply)
    text = found[1].decode(errors="ignore") if found else ""
    return str(json.loads(f'"{text}"', strict=False)).encode(errors="ignore")


def parse_result(reply: bytes, limits: Limits) -> RunResult:
    """The result that the service's `reply` holds. Raises `Trouble` if it holds none: the service
    failed, or sent something else."""
    try:
        fields = json.loads(reply)
    except (ValueError, RecursionError):
        raise Trouble(f"sent what is not JSON: {reply[:80]!r}") from None
    status = fields.get("status") if isinstance(fields, dict) else None
    if status == "SandboxError":
        message = fields.get("message")
        raise Trouble(f"failed: {str(message)[:200] if message else 'it gives no reason'}")
    run = fields.get("run_result") if status in ("Success", "Failed") else None
    if not isinstance(run, dict) or not _is_sound(run):
        raise Trouble(f"sent a reply that is not SandboxFusion's: {reply[:80]!r}")
    texts = (run.get(name) or "" for name in ("stdout", "stderr"))
    stdout, stderr = (text.encode(errors="backslashreplace") for text in texts)
    if run["status"] == "Error":
        raise Trouble(f"failed: {stderr[:200].decode(errors='replace') or 'no reason given'}")
    truncated = max(len(stdout), len(stderr)) > limits.output_bytes
    code = run.get("return_code")
    if run["status"] == "TimeLimitExceeded":
        outcome, code = Status.TIMEOUT, None
    elif truncated:
        outcome = Status.OUTPUT
    elif code is None or code < 0:
        outcome, code = Status.KILLED, None
    else:
        outcome = Status.OK if code == 0 else Status.NONZERO
    return RunResult(
        status=outcome,
        exit_code=code,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        truncated=truncated,
        wall_s=float(run.get("execution_time") or 0.0),
    )


def _is_sound(run: dict[str, Any]) -> bool:
    """Whether `run_result` of a reply has values of the types that the protocol prescribes."""
    seconds, code = run.get("execution_time") or 0.0, run.get("return_code")
    return (
        run.get("status") in ("Finished", "TimeLimitExceeded", "Error")
        and (isinstance(seconds, int | float) and 0 <= seconds < 1e6)
        and (type(code) is int or (code is None and run["status"] != "Finished"))
        and all(isinstance(run.get(name) or "", str) for name in ("stdout", "stderr"))
    )
