"""The processes that simulate for a plan."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from rollpacker.sim.plan_ideas import Candidate, Evaluate
from rollpacker.sim.result import SystemResult

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_evaluate: Evaluate | None = None
"""In a worker process: what it simulates with."""


def _receive(evaluate: Evaluate) -> None:
    global _evaluate
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    _evaluate = evaluate


def work(candidate: Candidate, seed: int, steps: int) -> SystemResult:
    assert _evaluate is not None
    return _evaluate(candidate, seed, steps)


@contextmanager
def workers(evaluate: Evaluate, jobs: int) -> Iterator[Executor | None]:
    """Processes of one thread each; none for one job."""
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
