"""A sandbox on a remote service that speaks SandboxFusion's protocol (`POST URL/run_code`).

The service isolates the programs; a self-test when it is opened shows how well. The wall limit and
the memory limit are sent along (SandboxFusion applies the latter to each process); limits on files
and on output while it is produced are the service's own. Output is cut to its limit here.

While the service is down, runs wait behind a circuit breaker. Whether it is back is tested with a
harmless program, so that a program that breaks the service does not delay the others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rollpacker.endpoints.http import checked_url, is_private, token_from
from rollpacker.endpoints.service import Service
from rollpacker.sandbox.fusion import Trouble, Wire, build_request
from rollpacker.sandbox.sandbox import (
    Capabilities,
    Limits,
    Profile,
    RunResult,
    SandboxUnavailable,
    Status,
    profile_of,
)
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)

WORKERS = 16
"""Most requests at a time, if the config does not set the number."""
OUTAGE_S = 1800.0
"""Seconds that a service may be down before runs end with `sandbox_error`."""
ATTEMPTS = 4
"""Most attempts of one run. An attempt that got no answer in time counts twice."""
PROBE_EVERY_S = 2.0
FIRST_PAUSE_S = 0.25
"""Seconds before the second attempt. The pause doubles with each further attempt."""
ESSENTIAL = frozenset(
    {
        *("runs", "environment", "host files", "writes", "network", "signals", "output"),
        *("endless", "next run"),
    }
)
"""Names of the self-test's attacks that a service must contain: they could reach this machine, or
spoil another program's verdict. All other attacks can harm only the service's own machine."""

_PROBE = """\
import importlib.util, os
print({nonce!r})
print(*[name for name in {packages!r} if importlib.util.find_spec(name) is None])
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    print("fork")
except (OSError, AttributeError):
    print("")
"""


@asynccontextmanager
async def open_http(
    url: str,
    *,
    token_env: str | None = None,
    limits: Limits | None = None,
    workers: int | None = None,
) -> AsyncIterator[HttpSandbox]:
    """Open a service as a sandbox and test it. Raises `SandboxUnavailable` if it cannot be reached,
    refuses the token, or does not contain the self-test's essential attacks. `token_env`: name of
    the environment variable with the bearer token. The token is sent only over TLS, or to this
    machine itself."""
    token = _token(url, token_env)
    box = HttpSandbox(url, token=token, limits=limits, workers=workers)
    try:
        began = asyncio.get_running_loop().time()
        can_fork = await box.probe(attempts=3)

        from rollpacker.sandbox.selftest import self_test

        passed, failed = await self_test(box, backend="http")
        seconds = asyncio.get_running_loop().time() - began
        box.capabilities = replace(
            box.capabilities, passed=passed, failed=failed, can_fork=can_fork, seconds=seconds
        )
        _refuse_unsafe(box.name, failed)
        yield box
    finally:
        await box.close()


class HttpSandbox:
    """A sandbox that sends one request per run to a service. Meets the protocol `Sandbox`. Use
    `open_http`, which tests the service before it returns one."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        workers: int | None = None,
        outage_s: float = OUTAGE_S,
    ) -> None:
        self.name = f"the sandbox at {url.rstrip('/')}"
        self.capabilities = Capabilities(backend="http", memory="by the service", can_fork=False)
        self._limits = limits or Limits()
        self._slots = asyncio.Semaphore(workers or WORKERS)
        self._service = Service(
            self.name,
            outage_s=outage_s,
            failures=3,
            probe_every_s=PROBE_EVERY_S,
            first_pause_s=FIRST_PAUSE_S,
        )
        self._wire = Wire(url, token, workers or WORKERS)
        self._warn_once = WarnOnce(logger)
        self._missing: dict[Profile, str] = {}

    async def run(
        self,
        program: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        profile: Profile | str = "python",
    ) -> RunResult:
        """Run a program as `Sandbox.run` does. Every run has a new interpreter, in which the
        profile's packages must be installed. A cancelled run ends on the service at its wall limit
        at the latest."""
        if missing := await self.lacks(profile_of(profile)):
            raise ValueError(missing)
        limits = limits or self._limits
        try:
            request = build_request(program, stdin, files or {}, limits)
        except UnicodeDecodeError:
            return _error(self.name, "takes text as standard input only, and this is not UTF-8")
        async with self._slots:
            return await self._run(request, limits)

    def outage(self) -> str | None:
        """Describe the outage of the service that runs wait for. None: the service is up."""
        return self._service.outage()

    async def lacks(self, profile: Profile) -> str:
        """A sentence with the profile's packages that the service lacks; empty if none. The
        service's answer is remembered. While the service is down, the sentence is empty, too."""
        if profile.packages and profile not in self._missing:
            try:
                self._missing[profile], _ = await self._ask(profile.packages)
            except Trouble:
                return ""
        if missing := self._missing.get(profile):
            return f"{self.name} lacks these packages of the profile {profile.name!r}: {missing}"
        return ""

    async def probe(self, attempts: int = 1) -> bool:
        """Test the service with a harmless program, at most `attempts` times, and return whether
        programs may start processes there. Raises `SandboxUnavailable` if no attempt succeeded."""
        while True:
            attempts -= 1
            try:
                _, can_fork = await self._ask()
                return can_fork
            except Trouble as trouble:
                if trouble.refused:
                    raise SandboxUnavailable(f"{self.name} {trouble}") from None
                if attempts < 1:
                    cure = "Check that the service runs, and that sandbox.url is right."
                    raise SandboxUnavailable(f"{self.name} {trouble}. {cure}") from None
            await asyncio.sleep(FIRST_PAUSE_S)

    async def _ask(self, packages: tuple[str, ...] = ()) -> tuple[str, bool]:
        """Run a harmless program on the service. Returns those of `packages` that it lacks, as a
        text, and whether programs may start processes there. Raises `Trouble`."""
        nonce = secrets.token_hex(8)
        limits = Limits(wall_s=10.0)
        request = build_request(_PROBE.format(nonce=nonce, packages=packages), b"", {}, limits)
        result = await self._wire.post(request, limits)
        lines = result.stdout.decode(errors="replace").split("\n")
        if lines[0].strip() != nonce or len(lines) < 3:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[-200:]
            raise Trouble(
                f"does not run Python programs: asked to print a number, it answered"
                f" {result.status} and {said!r}. Check that the service has Python.",
                refused=True,
            )
        missing = ", ".join(name for name in packages if name in lines[1].split())
        return missing, lines[2].strip() == "fork"

    async def close(self) -> None:
        """Close the connections to the service."""
        await self._wire.close()

    async def _run(self, request: dict[str, Any], limits: Limits) -> RunResult:
        service = self._service
        key = str(uuid.uuid4())
        started = asyncio.get_running_loop().time()
        spent = 0
        why = "it does not answer"
        while True:
            if not await service.ready(started, self._answers):
                return _error(self.name, f"did not come back: {service.outage() or why}")
            try:
                result = await self._wire.post(request, limits, key)
            except Trouble as trouble:
                if trouble.refused:
                    self._warn_once(f"{self.name} {trouble}")
                    return _error(self.name, str(trouble))
                why = str(trouble)
                service.failed(why, after_s=trouble.busy_s or None)
                if not trouble.busy_s:
                    spent += ATTEMPTS // 2 if trouble.timed_out else 1
                if spent >= ATTEMPTS:
                    return _error(self.name, why)
                await service.pause(max(1, spent))
            else:
                service.succeeded()
                return result

    async def _answers(self) -> bool:
        """Whether the service runs a harmless program now."""
        try:
            await self._ask()
        except Trouble as trouble:
            self._service.failed(str(trouble))
            return False
        return True


def _error(name: str, why: str) -> RunResult:
    return RunResult(status=Status.SANDBOX_ERROR, detail=f"{name} {why}")


def _token(url: str, token_env: str | None) -> str | None:
    try:
        checked_url(url, key="sandbox.url", example="http://host:8080")
        token = token_from(token_env)
    except ValueError as error:
        raise SandboxUnavailable(f"sandbox: {error}".rstrip(".") + ".") from None
    if token is None or is_private(url):
        return token
    raise SandboxUnavailable(
        f"{url} is not encrypted, and anybody on the way could read the token in {token_env}. Use"
        " an https:// address, or a tunnel to 127.0.0.1, or a service that needs no token."
    )


def _refuse_unsafe(name: str, failed: tuple[str, ...]) -> None:
    escaped = [canary for canary in failed if canary in ESSENTIAL]
    if escaped:
        raise SandboxUnavailable(
            f"{name} does not contain these attacks of the self-test: {', '.join(escaped)}.\n"
            "Run the service where it isolates programs (SandboxFusion: full isolation, not lite),"
            " or use the embedded sandbox (sandbox.backend: bwrap)."
        )
    if failed:
        logger.warning(
            "%s does not contain these attacks of the self-test: %s. They can harm the service,"
            " not this machine.",
            name,
            ", ".join(failed),
        )
