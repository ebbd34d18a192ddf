"""Drives a run on an event loop, and ends it when somebody asks: Ctrl-C, SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from rollpacker.controller.driver import Controller

T = TypeVar("T")

INTERRUPTED = "interrupted"

SWITCH_INTERVAL_S = 0.0005
"""How long a thread of this process keeps Python's lock while another wants it. The engine's thread
takes it many times per decode step, and would wait Python's 5 ms each time that verdicts or samples
are being worked on. `benchmarks/streaming.py` runs with it: there the engine decodes while verdicts
come in and gradients are asked for."""


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end; in a thread of its own where a loop runs already (a notebook)."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        in_loop = False
    else:
        in_loop = True
    if not in_loop:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def drive(controller: Controller) -> str:
    import asyncio

    loop = asyncio.get_running_loop()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asked = False

    def interrupt() -> None:
        nonlocal asked
        if asked:
            _exit_at_once()
        asked = True
        print("Finishing this step, then saving. Ctrl-C again ends at once.", file=sys.stderr)
        controller.request_stop(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, interrupt)
        except (ValueError, RuntimeError, NotImplementedError):  # not the main thread
            break
    try:
        return await controller.run()
    finally:
        await controller.close()


def _exit_at_once() -> NoReturn:
    """End the process now. What it says goes past the display's buffers, which stay as they are."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\r\n")  # the live display hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, b"Ended at once; --resume goes on from the last checkpoint.\n")
    os._exit(130)
