"""Runs untrusted programs. A backend is imported only when it is opened."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollpacker.sandbox.sandbox import (
    I_ACCEPT,
    Capabilities,
    Limits,
    Profile,
    RunResult,
    Sandbox,
    SandboxUnavailable,
    Status,
)

__all__ = [
    "I_ACCEPT",
    "Capabilities",
    "Limits",
    "Profile",
    "RunResult",
    "Sandbox",
    "SandboxUnavailable",
    "Status",
    "open_sandbox",
]


_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_sandbox(
    backend: str = "auto",
    *,
    workers: int | None = None,
    url: str | None = None,
    token_env: str | None = None,
    allow_unsandboxed_code: str | None = None,
    **limits: Any,
) -> AsyncIterator[Sandbox]:
    """A context with a sandbox for programs, which is closed at the end of the block.

    `backend`: "auto" (http if there is a `url`, else bwrap), "bwrap", "http" or "none" (no
    isolation). `workers`: most runs at a time; None: one per processor, or 16 over http. `limits`:
    fields of `Limits`, as defaults for every run. The sandbox belongs to the running event loop and
    its thread. Raises SandboxUnavailable if nothing isolates programs here, unless
    `allow_unsandboxed_code` is the sentence `I_ACCEPT`: programs then run as plain processes
    (`capabilities.backend` is "none")."""
    defaults = Limits(**limits)
    if backend == "auto":
        backend = "http" if url else "bwrap"
    if backend == "http":
        from rollpacker.sandbox.http import open_http

        if url is None:
            raise ValueError("the sandbox backend http needs a url")
        remote = open_http(url, token_env=token_env, limits=defaults, workers=workers)
        async with remote as service:
            yield service
        return
    box = await _open_local(
        backend, workers or os.cpu_count() or 1, defaults, allow_unsandboxed_code
    )
    try:
        yield box
    finally:
        await box.close()


async def _open_local(
    backend: str, workers: int, defaults: Limits, allow_unsandboxed_code: str | None
) -> Sandbox:
    allowed = allow_unsandboxed_code == I_ACCEPT
    if backend == "bwrap":
        from rollpacker.sandbox.tested import open_pool

        try:
            return await open_pool(workers, defaults)
        except SandboxUnavailable as error:
            if not allowed:
                raise
            _log.warning("programs run WITHOUT ISOLATION, as was allowed: %s", error)
    elif backend != "none":
        raise ValueError(f"no sandbox backend {backend!r}; there are auto, bwrap, http and none")
    elif not allowed:
        raise SandboxUnavailable(
            "the sandbox backend none runs programs without any isolation, which "
            f'allow_unsandboxed_code must allow by saying "{I_ACCEPT}".'
        )
    from rollpacker.sandbox.unsandboxed import Unsandboxed

    return Unsandboxed(workers=workers, defaults=defaults)
