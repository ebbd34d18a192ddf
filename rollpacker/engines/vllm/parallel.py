"""vLLM's own processes, where several devices share an engine (tensor parallelism).

the engine's process   vLLM's scheduler and cache tables, and no weights
a worker a device      its part of vLLM's model; draws tokens, keeps log-probs until asked
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.engines.engine import EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

WORKER = "rollpacker.engines.vllm.worker"


class Workers:
    """The worker processes of one vLLM engine that several devices share."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def take_log_probs(self, numbers: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities of the generated tokens of each of these requests, which the
        workers then forget."""
        found: list[list[float]] = self._agreed("take_log_probs", tuple(numbers))
        return found

    def drawn_anew(self, numbers: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """For each request, return the tokens that were drawn in the places of its carried tokens
        (from before an abort), and their log-probabilities."""
        found: list[tuple[list[int], list[float]]] = self._agreed("drawn_anew", tuple(numbers))
        return found

    def _agreed(self, method: str, argument: Any) -> Any:
        """Call this method of all workers with `argument` and return their answer. Raises
        `EngineError` if the workers' answers differ."""
        first, *others = self._call(method, argument)
        if any(repr(other) != repr(first) for other in others):  # NaN is NaN here
            raise EngineError("the devices of an engine of vLLM have drawn different tokens")
        return first

    def _call(self, method: str, argument: Any) -> list[Any]:
        answers: list[Any] = self._engine.collective_rpc(method, args=(argument,))
        return answers


def watch_processes(engine: LLMEngine, on_error: Callable[[EngineError], None]) -> threading.Event:
    """Watch the engine's worker processes in a thread, and call `on_error` when one of them ends
    unasked. Set the event that this returns before ending them. vLLM's own watch is 10 s slower."""
    executor: Any = engine.engine_core.engine_core.model_executor
    processes = [worker.proc for worker in executor.workers]
    family = [os.getpid(), *(one.pid for one in processes)]
    for path in {path for pid in family for path in _shared_memory(pid)}:
        path.unlink(missing_ok=True)  # all have mapped it: it goes with them, however they end
    may_end = threading.Event()

    def watch() -> None:
        ended = wait([one.sentinel for one in processes])
        if not may_end.is_set():
            gone = next(one for one in processes if one.sentinel in ended)
            on_error(EngineError(f"{gone.name} of vLLM's (pid {gone.pid}) ended by itself"))

    threading.Thread(target=watch, daemon=True).start()
    return may_end


def _shared_memory(pid: int) -> Iterator[Path]:
    """The files in /dev/shm of vLLM and of Python's multiprocessing that a process has mapped."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, slash, name = line.partition("/dev/shm/")
            if slash and name.startswith(("psm_", "vllm_", "sem.mp-")):
                yield Path("/dev/shm", name)
