"""The worker processes that run a plan's simulations."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from rollpacker.sim.plan_ideas import Candidate, Evaluate
from rollpacker.sim.result import SystemResult

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_evaluate: Evaluate | None = None
"""The function that this worker process simulates with. None: this process is no worker."""


@contextmanager
def interrupt_noted() -> Iterator[threading.Event]:
    """In this context Ctrl-C (SIGINT) does nothing but set the yielded `threading.Event`, since it
    could leave a lock taken that other processes need. `KeyboardInterrupt` is raised at the end."""
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda *_: noted.set())
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
    if noted.is_set():
        raise KeyboardInterrupt


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Inside this context, in which this process starts others, Ctrl-C has no effect until the end,
    so that no process is left half started. The started processes have Ctrl-C blocked."""
    with interrupt_noted():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupt() -> None:
    """Make this worker process ignore Ctrl-C; the process that started it ends it instead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _receive(evaluate: Evaluate) -> None:
    global _evaluate
    ignore_interrupt()
    _evaluate = evaluate


def work(candidate: Candidate, seed: int, steps: int) -> SystemResult:
    assert _evaluate is not None
    return _evaluate(candidate, seed, steps)


@contextmanager
def workers(evaluate: Evaluate, jobs: int) -> Iterator[Executor | None]:
    """Yields a pool of `jobs` single-threaded processes that call `evaluate`; None if `jobs` is 1,
    so that the caller simulates by itself. Raises `ValueError` for less than 1."""
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")
    if jobs == 1:
        yield None
        return
    others = {*multiprocessing.active_children()}
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_receive, initargs=(evaluate,)
    )
    try:
        yield pool
    except BaseException:  # nobody needs what they are at
        for process in {*multiprocessing.active_children()} - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
