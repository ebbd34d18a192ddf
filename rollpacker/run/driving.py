"""Drives a run on an event loop, and ends it when somebody asks: Ctrl-C, SIGTERM, a notebook's
interrupt.

    first request   finish the step, save a checkpoint, return
    second request  a command ends its process; in a program or notebook the call of `train` ends
                    with `KeyboardInterrupt`

If this thread has a running event loop already (as in a notebook's cell), the run gets a thread of
its own. The caller's thread then waits, calls the callbacks, and receives the signals.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rollpacker.run import interrupts

if TYPE_CHECKING:
    import asyncio

    from rollpacker.run.driver import Controller

T = TypeVar("T")

INTERRUPTED = "interrupted"

SWITCH_INTERVAL_S = 0.0005
"""Seconds for which a thread may keep Python's lock (the GIL) while another thread wants it. The
engine's thread takes the GIL many times per decode step, and would wait for Python's default of 5
ms each time that rewards or samples are worked on. `benchmarks/streaming.py` measures with this
value."""

COLLECT_AFTER = 20_000
"""Number of new container objects after which Python's garbage collector runs. With Python's
default, 700, a tenth of the controller's time went into looking through tokens, which are in no
reference cycle (`benchmarks/turns_overhead.py`)."""

CLOSE_WITHIN_S = 10.0
"""Seconds that a run which is ended at once may take to close its engines, workers and files."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run early. SIGHUP comes when the terminal is closed, and stays ignored if the
process ignored it before."""


NOT_BEGUN = "interrupted before the first step; the same command starts again"


@contextlib.contextmanager
def not_begun(message: str = NOT_BEGUN) -> Iterator[None]:
    """A context in which a `KeyboardInterrupt` that comes without a message gets this one."""
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args:
            raise
        raise KeyboardInterrupt(message) from None


@contextlib.contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP interrupt a command as Ctrl-C does, also outside of
    `drive`: while the command starts up, and while it writes its reports."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    further = interrupts.heed()
    try:
        yield
    finally:
        if further:
            interrupts.leave()


class Caller:
    """The thread that called `train`: callbacks are called in it, and signals arrive there."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None
        """Functions for this thread to call while the run has a thread of its own; an item None
        means that no more come. The attribute is None if the run is in this thread itself."""
        self.is_busy = False
        """Whether this thread executes a function given to `call`, and can be interrupted in it."""

    @property
    def is_apart(self) -> bool:
        """Whether the run has a thread of its own, other than the caller's."""
        return self._calls is not None

    async def call(self, function: Callable[[], T]) -> T:
        """Call the function in the caller's thread. The run waits for its result, which is
        returned, or for its error, which is raised."""
        import asyncio

        if self._calls is None:
            return self._now(function)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            settle: Callable[[Any], None]
            result: Any
            try:
                settle, result = future.set_result, self._now(function)
            except Exception as error:
                settle, result = future.set_exception, error
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(result))

        self._calls.put(work)
        return await future

    def _now(self, function: Callable[[], T]) -> T:
        self.is_busy = True
        try:
            return function()
        finally:
            self.is_busy = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine to its end and return its result: in this thread, or in a thread of its
        own if an event loop runs in this thread already."""
        import asyncio

        if not _loop_runs_here():
            return asyncio.run(coroutine)
        calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls = calls
        outcome: list[Callable[[], T]] = []

        def work() -> None:
            try:
                result = asyncio.run(coroutine)
                outcome.append(lambda: result)
            except BaseException as error:
                outcome.append(lambda error=error: _raise(error))  # type: ignore[misc]
            finally:
                calls.put(None)

        thread = threading.Thread(target=work, name="run", daemon=True)
        thread.start()
        try:
            while (call := calls.get()) is not None:
                call()
        except BaseException:  # ended at once
            thread.join(CLOSE_WITHIN_S)
            raise
        return outcome[0]()


def _raise(error: BaseException) -> NoReturn:
    raise error


def _loop_runs_here() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def drive(controller: Controller, caller: Caller, *, is_command: bool) -> str:
    """Run to the end, or until somebody asks for an early end. Returns why the run ended.
    `is_command`: whether a second request may end the process. Raises the error that ended the run,
    and `KeyboardInterrupt` if it was ended at once; a resume is possible in both cases."""
    import asyncio

    ending = _Ending(controller, caller, is_command=is_command)
    try:
        with python_set_for_runs(), ending.heeding_signals():
            return caller.run(ending.run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def python_set_for_runs() -> Iterator[None]:
    """A context with Python's settings for a run: `SWITCH_INTERVAL_S` and `COLLECT_AFTER`."""
    switch_interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if 0 < thresholds[0] < COLLECT_AFTER:  # 0: the program wants none at all
        gc.set_threshold(COLLECT_AFTER, *thresholds[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(switch_interval_s)
        gc.set_threshold(*thresholds)


class _Ending:
    """Ends a run early when signals such as Ctrl-C ask for that."""

    def __init__(self, controller: Controller, caller: Caller, *, is_command: bool) -> None:
        self.num_asked = 0
        self._controller, self._caller, self._is_command = controller, caller, is_command
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[str] | None = None

    async def run(self) -> str:
        import asyncio

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.num_asked:
            self._finish()
        try:
            return await self._controller.run()
        finally:
            await self._controller.close()

    @contextlib.contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """A context in which signals end the run. It changes nothing outside of the main thread,
        which alone receives signals in Python."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heeded = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Python calls this between any two instructions of the main thread, so
        that no lock may be taken here."""
        self.num_asked += 1
        if self.num_asked > 1 and self._is_command:
            _exit_at_once()
        if self.num_asked == 1:
            self._soon(self._finish)
            return
        in_call = self._caller.is_busy
        if self.num_asked == 2 and (self._caller.is_apart or not in_call):
            self._soon(self._cancel)
        if self.num_asked > 2 or in_call:  # out of the caller's own code, or what hangs
            raise KeyboardInterrupt

    def _soon(self, what: Callable[[], None]) -> None:
        if self._loop is None:  # `run` will see it; who asks twice does not wait for that
            if self.num_asked > 1:
                raise KeyboardInterrupt
            return
        with contextlib.suppress(RuntimeError):  # it has closed: the run is over
            self._loop.call_soon_threadsafe(what)

    def _finish(self) -> None:
        self._controller.request_stop(INTERRUPTED)
        again = "Ctrl-C again" if self._is_command else "Interrupting once more"
        with contextlib.suppress(OSError):  # the terminal is gone (SIGHUP)
            print(f"Finishing this step, then saving. {again} ends at once.", file=sys.stderr)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _exit_at_once() -> NoReturn:
    """End the process now. How to resume is written to stderr; buffered output is dropped."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\r\n")  # the live display hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, b"Ended at once; --resume goes on from the last checkpoint.\n")
    os._exit(130)
