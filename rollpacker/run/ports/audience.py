"""Calls a program's callbacks, and then trackers, as a run goes on.

    on_start
    each step:  trained -> evaluated? -> on_evaluation -> on_step -> checkpoint? -> committed
                        -> its row is written -> trackers
    on_end

Callbacks are called before the checkpoint. So the checkpoint's log has the values that they log, a
resume calls them for no step twice, and a run that they stop ends with this step. Trackers get the
whole row of metrics; an error of a tracker is logged once and costs nothing else.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollpacker.bus import Bus
from rollpacker.callbacks import Callback, CallbackError, Metrics
from rollpacker.core.records import CALLBACK_SECONDS
from rollpacker.run.folder.samples import SampleWriter

logger = logging.getLogger(__name__)

NOTE = "callbacks"
"""Name of the entry in the event log for the seconds that callbacks took and the values they
logged."""

SLOW_TRACKER_S = 5.0
"""Seconds that a tracker may keep the run waiting; a slower one is named in a warning, once."""

CallInThread = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Telling:
    """What callbacks or trackers are told: metrics of a step or evaluation, and its samples."""

    metrics: Metrics
    rows: Sequence[Mapping[str, Any]] = ()
    """The samples of this step or evaluation, as rows of their parquet files."""
    logged: dict[str, float] | None = None
    """Receives the values that callbacks log for the row, by name. None: none may be logged."""


@dataclass(eq=False, slots=True, kw_only=True)
class ToldRun:
    """The run as callbacks and trackers see it: an implementation of `RunningRun`."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    total_steps: int | None
    resumed_step: int | None
    telling: Telling | None = None
    """The row of metrics that callbacks or trackers are told now. None at other times."""
    on_stop: Callable[[str], None] = lambda reason: None
    """Called, with the reason, when a callback asks the run to stop."""

    def log(self, name: str, value: float) -> None:
        """Add a value to the current row of metrics. Raises `RuntimeError` if no row is open for
        that, `TypeError` if the name is no text, `ValueError` if the run itself has a metric of
        that name."""
        told = self.telling
        if told is None or told.logged is None:
            raise RuntimeError("log is for on_step and on_evaluation of a program's own callbacks")
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a value is a text, not {name!r}")
        if name == "step" or name in told.metrics or name.startswith(("timing_s/", "perf/")):
            raise ValueError(f"{name} is a metric of the run itself; log it under another name")
        told.logged[name] = float(value)

    def samples(self, *, untrained: bool = False) -> list[dict[str, Any]]:
        """Returns copies of the rows of samples that belong to the current row of metrics.
        `untrained`: also samples that were not trained on."""
        rows = () if self.telling is None else self.telling.rows
        return [dict(row) for row in rows if untrained or row.get("trained", True)]

    def stop(self, reason: str = "a callback asked for it") -> None:
        """Ask the run to end after the step at hand. `reason`: given as the reason of the end."""
        self.on_stop(reason)


class Audience:
    """Calls the callbacks and trackers of a run. Used on the event loop, except for `end`."""

    def __init__(
        self,
        run: ToldRun,
        *,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[Callback] = (),
        call: CallInThread,
        row_so_far: Callable[[int], Metrics],
    ) -> None:
        """`call`: calls a function in the thread that called `train`. `row_so_far`: returns the
        metrics of a step as far as they are known when callbacks are called."""
        self._run = run
        self._callbacks = list(callbacks)
        self._trackers = list(trackers)
        self._warned: set[int] = set()
        """Ids of trackers of which a warning was logged, as they failed or kept the run waiting."""
        self._call = call
        self._row_so_far = row_so_far
        self._bus: Bus | None = None
        self._samples: SampleWriter | None = None
        self._observe: Callable[[], None] = lambda: None
        self._told_step = 0
        self._has_begun = False

    def join(
        self,
        bus: Bus,
        samples: SampleWriter | None,
        *,
        stop: Callable[[str], None],
        observe: Callable[[], None],
    ) -> None:
        """Connect this audience to its run. `stop` ends the run with a reason; `observe` shows the
        observers all new log entries."""
        self._bus, self._samples, self._observe = bus, samples, observe
        self._run.on_stop = stop

    async def begin(self, step: int) -> None:
        """Call `on_start` of all callbacks and trackers; a tracker that fails is not called again.
        Raises `CallbackError` if a callback fails."""
        self._has_begun = True
        if self._callbacks:
            seconds = await self._tell_all("on_start")
            self._noted().note(NOTE, seconds, step, {})
        for tracker in list(self._trackers):
            if not self._track(tracker, "on_start"):
                self._trackers.remove(tracker)

    async def evaluated(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Call `on_evaluation` of all callbacks. Returns the values that they logged, by name, with
        the seconds that they took as `timing_s/callbacks`; empty without callbacks. Raises
        `CallbackError` if a callback fails."""
        if not self._callbacks:
            return {}
        rows = () if self._samples is None else self._samples.evaluation_rows
        logged: dict[str, float] = {}
        self._run.telling = Telling(metrics, rows, logged)
        seconds = await self._tell_all("on_evaluation", step, metrics, logged)
        return {**logged, CALLBACK_SECONDS: seconds}

    async def trained(self, step: int) -> None:
        """Call `on_step` of all callbacks; again for the same step, it does nothing. Raises
        `CallbackError` if a callback fails."""
        if not self._callbacks or step <= self._told_step:
            return
        self._told_step = step
        self._observe()
        row, logged = self._row_so_far(step), dict[str, float]()
        self._run.telling = Telling(row, self._rows_of(step), logged)
        seconds = await self._tell_all("on_step", step, row, logged)
        self._noted().note(NOTE, seconds, step, logged)

    def row_written(self, step: int, row: Metrics, is_evaluation: bool) -> None:
        """Call `on_step` or `on_evaluation` of all trackers with the finished row of metrics."""
        if not self._trackers:
            return
        rows = self._rows_of(step)
        if is_evaluation:
            rows = () if self._samples is None else self._samples.evaluation_rows
        self._run.telling = Telling(row, rows)
        for tracker in self._trackers:
            self._track(tracker, "on_evaluation" if is_evaluation else "on_step", step, row)
        self._run.telling = None

    def end(self, reason: str | None) -> None:
        """Call `on_end` of all callbacks and trackers, once, if the run has begun. Raises
        `CallbackError` afterwards if a callback failed."""
        if not self._has_begun:
            return
        self._has_begun, failure = False, None
        for callback in self._callbacks:
            try:
                self._tell(callback, "on_end", reason)
            except CallbackError as error:
                failure = failure or error
        for tracker in self._trackers:
            self._track(tracker, "on_end", reason)
        if failure is not None:
            raise failure

    def _noted(self) -> Bus:
        assert self._bus is not None, "nobody has joined the audience to its run"
        return self._bus

    def _rows_of(self, step: int) -> Sequence[Mapping[str, Any]]:
        if self._samples is None:
            return ()
        return [row for row in self._samples.step_rows if row["step"] == step]

    async def _tell_all(
        self,
        method: str,
        step: int | None = None,
        metrics: Metrics | None = None,
        logged: Mapping[str, float] | None = None,
    ) -> float:
        """Call this method of every callback; each callback also sees the values logged before it.
        Returns the seconds that all calls took."""
        clock = self._noted().clock
        began = clock.now()
        for callback in self._callbacks:
            arguments: tuple[Any, ...] = ()
            if step is not None and metrics is not None:
                arguments = (step, {**metrics, **(logged or {})})
            await self._call(partial(self._tell, callback, method, *arguments))
        self._run.telling = None
        return clock.now() - began

    def _tell(self, callback: Callback, method: str, *arguments: Any) -> None:
        try:
            getattr(callback, method)(self._run, *arguments)
        except Exception as error:
            raise CallbackError(_failure(callback, method, arguments, error)) from error

    def _track(self, tracker: Callback, method: str, *arguments: Any) -> bool:
        """Call this method of a tracker. Returns False if it raises an error. Of an error, or a
        slow call, the log has one warning per tracker."""
        began = self._noted().clock.now()
        what = f"tracker {getattr(tracker, 'name', type(tracker).__name__)}"
        try:
            getattr(tracker, method)(self._run, *arguments)
        except Exception as error:
            self._warn(tracker, f"{what}: {_said(method, arguments, error)}; the run goes on")
            return False
        seconds = self._noted().clock.now() - began
        if seconds > SLOW_TRACKER_S and method in ("on_step", "on_evaluation"):
            self._warn(tracker, f"{what}: {method} kept the run waiting for {seconds:.1f} s")
        return True

    def _warn(self, tracker: Callback, message: str) -> None:
        if id(tracker) not in self._warned:
            self._warned.add(id(tracker))
            logger.warning("%s (said once)", message)


def nobody() -> Audience:
    """Returns an audience without callbacks and trackers."""
    run = ToldRun(name="", folder=Path(), config={}, total_steps=None, resumed_step=None)

    async def call(function: Callable[[], None]) -> None:
        function()

    return Audience(run, call=call, row_so_far=lambda step: {})


def _failure(callback: Callback, method: str, arguments: Sequence[Any], error: Exception) -> str:
    where = ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    if frames:
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    told = f"{type(callback).__qualname__}.{_said(method, arguments, error)}{where}."
    if method == "on_end":
        return f"{told} The run itself is complete"
    return f"{told} The run can be resumed from its last checkpoint, if it has one"


def _said(method: str, arguments: Sequence[Any], error: Exception) -> str:
    step = f" at step {arguments[0]}" if arguments and method != "on_end" else ""
    text = " ".join(str(error).split())[:400]
    return f"{method} raised {type(error).__name__}{step}: {text}"
