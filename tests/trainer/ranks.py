"""Runs a function in several processes that share a process group (gloo), within a deadline.

The processes stay for many calls, since importing torch and transformers takes seconds: they are
forked from a server that has done so once.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from rollpacker.trainer.sharding import join, leave

PRELOAD = (
    *("hypothesis", "peft", "pytest", "torch.distributed.checkpoint"),
    *("rollpacker.trainer.checkpoint", "rollpacker.trainer.critic", "rollpacker.trainer.policy"),
    "transformers.models.qwen2.modeling_qwen2",
)
GRACE_S = 2.0
"""How long the others may take once one process has failed: they may wait for it."""


class RankError(AssertionError):
    """A process failed, died or took too long."""


class Ranks:
    """Up to `most` processes; a context manager. After an error they are started anew."""

    def __init__(self, most: int, timeout_s: float = 60.0) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(
        self, size: int, function: Callable[..., Any], *arguments: Any, replicas: int = 1
    ) -> list[Any]:
        """`function(shards, *arguments)` of the top level of a module, in `size` processes; what
        each returned. Raises `RankError`, with the traceback of the first that failed."""
        if not self._processes:
            self._start()
        # Ours and a new one for each call, on a port that is free: no process has to guess one.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, pipe in enumerate(self._pipes[:size]):
            environment = _environment(rank, size, store.port)
            pipe.send((environment, self._timeout_s, replicas, function, arguments))
        try:
            return self._answers(size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        for rank in range(self._most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name=f"rank{rank}")
            process.daemon = True
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _answers(self, size: int) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[str] = []
        until = time.monotonic() + self._timeout_s
        while len(answers) < size:
            waiting = {self._pipes[r]: r for r in range(size) if r not in answers}
            ready = wait(list(waiting), timeout=max(until - time.monotonic(), 0.0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                succeeded, answers[rank] = _receive(pipe)
                if not succeeded:
                    failures.append(f"rank {rank} of {size}: {answers[rank]}")
                    until = min(until, time.monotonic() + GRACE_S)
        if failures:
            raise RankError("\n".join(failures))
        if silent := sorted(set(range(size)) - answers.keys()):
            raise RankError(f"no answer from ranks {silent} of {size} in {self._timeout_s:g} s")
        return [answers[rank] for rank in range(size)]


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """As torchrun sets it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return False, "the process ended"


def _serve(pipe: Connection) -> None:
    """What a process does: calls until the other side is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            environment, timeout_s, replicas, function, arguments = pipe.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            shards = join(torch.device("cpu"), timeout_s, replicas=replicas)
            answer = (True, function(shards, *arguments))
            leave()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _end_with_parent() -> None:
    """Also out of a collective that waits for others."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
