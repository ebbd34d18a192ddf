"""Simulates several scenarios at once, each in a process of its own, and shows the progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.core.records import Entry
    from rollpacker.sim.result import SystemResult
    from rollpacker.sim.scenario import Scenario

BAR_AFTER_S = 2.0
"""Seconds of work after which a progress bar appears."""
_POLL_S = 0.2
VIRTUAL_EPOCH = "1970-01-01T00:00:00+00:00"
"""Time at which a simulated run began, by its log: always the same, so that its log is, too."""


def simulate_all(
    scenarios: Mapping[str, Scenario], *, jobs: int | None = None, log: str | Path | None = None
) -> dict[str, SystemResult]:
    """Simulate every scenario, several at once in processes of their own. Returns the results by
    the scenarios' names. If that takes long, and stderr is a terminal, a progress bar appears
    there.

    `jobs`: number of processes; None: as many as there are cores. `log`: file for the event log,
    with one scenario only. Raises what `simulate` raises."""
    jobs = min(jobs or os.cpu_count() or 1, len(scenarios))
    bar = _Bar(sum(scenario.steps for scenario in scenarios.values()))
    try:
        if jobs > 1:
            return _in_processes(scenarios, jobs, bar)
        return {
            name: _one(scenario, lambda _: bar.show(bar.done + 1), log)
            for name, scenario in scenarios.items()
        }
    finally:
        bar.close()


def _one(
    scenario: Scenario, progress: Callable[[int], None], log: str | Path | None = None
) -> SystemResult:
    from rollpacker.sim.simulate import simulate

    with ExitStack() as stack:
        observe = None if log is None else stack.enter_context(_log_file(scenario, Path(log)))
        return simulate(scenario, observe=observe, progress=progress)


@contextmanager
def _log_file(scenario: Scenario, path: Path) -> Iterator[Callable[[Entry], None]]:
    """Yields a function that writes a log entry to `path`, which ends up complete or not there."""
    from rollpacker.core.records import Session, encode
    from rollpacker.sim.latency import Calibration
    from rollpacker.sim.simulate import job_config, machine_of
    from rollpacker.writing import replacing

    config = job_config(scenario, machine_of(scenario, Calibration()))
    begin = Session(started_at=VIRTUAL_EPOCH, time_s=0.0, step=0, job=config.to_plain())
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(f"{encode(begin)}\n")
        yield lambda entry: print(encode(entry), file=file)


def _in_processes(
    scenarios: Mapping[str, Scenario], jobs: int, bar: _Bar
) -> dict[str, SystemResult]:
    import multiprocessing
    from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait

    from rollpacker.sim.plan_workers import interrupt_held, interrupt_noted

    context = multiprocessing.get_context("spawn")
    steps_done, stop = context.Value("l", 0), context.Event()
    with ProcessPoolExecutor(jobs, context, _begin_worker, (steps_done, stop)) as pool:
        try:
            with interrupt_noted() as interrupted:
                with interrupt_held():
                    futures = {name: pool.submit(_in_worker, s) for name, s in scenarios.items()}
                waiting = set(futures.values())
                while waiting and not interrupted.is_set():
                    done, waiting = wait(waiting, _POLL_S, FIRST_EXCEPTION)
                    bar.show(steps_done.value)
                    for future in done:
                        future.result()
        except BaseException:  # whatever it is, the other processes need not go on
            stop.set()
            raise
    return {name: future.result() for name, future in futures.items()}


class _StoppedError(Exception):
    """Raised in a worker process to end its simulation, when its result is not needed any more."""


_worker: list[Any] = []
"""Values of a worker process, set at its start: the count of simulated steps that all workers
share, and the event that stops them. Empty in other processes."""


def _begin_worker(steps_done: Any, stop: Any) -> None:
    from rollpacker.sim.plan_workers import ignore_interrupt

    ignore_interrupt()
    _worker[:] = [steps_done, stop]


def _in_worker(scenario: Scenario) -> SystemResult:
    steps_done, stop = _worker
    parent = os.getppid()

    def progress(steps: int) -> None:
        if stop.is_set() or os.getppid() != parent:  # it was killed
            raise _StoppedError
        with steps_done.get_lock():
            steps_done.value += 1

    return _one(scenario, progress)


class _Bar:
    """A progress bar on stderr. It appears if the work takes longer than `BAR_AFTER_S`."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self._total = total
        self._began_s = time.monotonic()
        self._wanted = sys.stderr.isatty()
        self._shown: Any = None

    def show(self, done: int) -> None:
        self.done = done
        if self._shown is None and self._wanted:
            if time.monotonic() - self._began_s < BAR_AFTER_S:
                return
            self._shown = self._make()
        if self._shown is not None:
            self._shown.update(self._shown.task_ids[0], completed=done)

    def _make(self) -> Any:
        from rich.progress import Progress

        from rollpacker.run.output import console

        bar = Progress(console=console(stderr=True), transient=True)
        bar.add_task("simulated steps", total=self._total)
        bar.start()
        return bar

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()
