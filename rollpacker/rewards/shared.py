"""What the rewards of a run share: one sandbox, and the engine that a judge may use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rollpacker.rewards.judge.completer import MakeCompleter
from rollpacker.sandbox.sandbox import Capabilities, Sandbox, SandboxConfig, SandboxUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Makes a context manager that shows the progress of something long, given its name and its number
of parts. The context's value is a function to be called with the number of parts done so far."""
_LOGGED_EVERY_S = 2.0


@contextmanager
def logged_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of `what`, which has `total` parts, in the log alone."""
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        if time.monotonic() - told > _LOGGED_EVERY_S:
            told = time.monotonic()
            logger.info("%s: %d of %d", what, done, total)

    yield tell


@dataclass(slots=True)
class _Opened:
    """The sandbox that one event loop uses, and what closes it. Both are None until it is open."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    context: AbstractAsyncContextManager[Sandbox] | None = None
    box: Sandbox | None = None


class Shared:
    """What the rewards of a run share. The sandbox is opened at first use, in each event loop."""

    def __init__(
        self,
        sandbox: SandboxConfig,
        *,
        engine_completer: MakeCompleter | None = None,
        workers: int | None = None,
    ) -> None:
        """`workers`: most programs that run in the sandbox at a time. None: its backend decides."""
        self.config = sandbox
        self._workers = workers
        self.engine_completer = engine_completer
        """Function from a judge's model folder to what generates the judge's answers, on an engine
        of this process. None: this process has no engine."""
        self.progress: Progress = logged_progress
        """Shows how far a long check before the run is, such as that of reference solutions."""
        self._capabilities: Capabilities | None = None
        self._opened: dict[asyncio.AbstractEventLoop, _Opened] = {}

    def check_sandbox(self) -> Capabilities:
        """Return what the sandbox can do. The first call opens and closes one to find out. Must be
        called outside of any event loop. Raises `SandboxUnavailable`."""
        if self._capabilities is None:
            self.run(self.sandbox)
        assert self._capabilities is not None
        return self._capabilities

    @property
    def unsandboxed(self) -> bool:
        """Whether a sandbox was opened and nothing isolates what runs in it."""
        return self._capabilities is not None and self._capabilities.backend == "none"

    def run(self, coroutine_function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function to its end in a new event loop, close the sandbox that it opened
        there, and return its result. Uses another thread if an event loop runs in this one."""

        async def main() -> T:
            try:
                return await coroutine_function()
            finally:
                await self.close()

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(main())
        with ThreadPoolExecutor(1, "rewards-check") as thread:
            return thread.submit(lambda: asyncio.run(main())).result()

    async def sandbox(self) -> Sandbox:
        """The sandbox of the running event loop, which is opened if need be. Raises
        `SandboxUnavailable`."""
        loop = asyncio.get_running_loop()
        for other in [other for other in self._opened if other.is_closed()]:
            del self._opened[other]
        opened = self._opened.setdefault(loop, _Opened())
        async with opened.lock:
            if opened.box is None:
                await self._open(opened)
            assert opened.box is not None
            return opened.box

    async def _open(self, opened: _Opened) -> None:
        allowed = self.config.allow_unsandboxed_code
        try:
            context = self._context(self.config.backend)
            box = await context.__aenter__()
        except SandboxUnavailable as error:
            if allowed is None:
                raise
            if not self.unsandboxed:  # said already when it was opened before
                logger.warning(
                    "model-written code runs WITHOUT ISOLATION, as allow_unsandboxed_code says: %s",
                    str(error).splitlines()[0],
                )
            context = self._context("none")
            box = await context.__aenter__()
        opened.context, opened.box = context, box
        self._capabilities = box.capabilities

    def _context(self, backend: str) -> AbstractAsyncContextManager[Sandbox]:
        from rollpacker.sandbox import open_sandbox

        config = self.config
        return open_sandbox(
            backend,
            workers=self._workers,
            url=config.url,
            token_env=config.token_env,
            allow_unsandboxed_code=config.allow_unsandboxed_code if backend == "none" else None,
            memory_bytes=config.memory_mb << 20,
            disk_bytes=config.disk_mb << 20,
            output_bytes=config.output_kb << 10,
        )

    def outage(self) -> str | None:
        """Describe the outage of a sandbox that is an external service. None: no outage."""
        for opened in self._opened.values():
            ask = getattr(opened.box, "outage", None)
            if ask is not None and (outage := ask()):
                return str(outage)
        return None

    async def close(self) -> None:
        """Close the sandbox of the running event loop. A later call of `sandbox` opens another."""
        opened = self._opened.pop(asyncio.get_running_loop(), None)
        if opened is not None and opened.context is not None:
            await opened.context.__aexit__(None, None, None)
