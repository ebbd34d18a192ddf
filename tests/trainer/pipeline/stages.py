"""Pipeline stages as threads of one process: links that hand tensors over, and what stages tell
each other."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rollpacker.pipeline.plan.choosers import Kind, Op, ReadyFirst, StageState
from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.executor import Executor
from rollpacker.pipeline.stages.orders import NewChooser as Planner
from rollpacker.pipeline.stages.orders import SweepChooser
from rollpacker.pipeline.stages.stage import Stage

TIMEOUT_S = 60.0
NewChooser = Callable[[int], SweepChooser]
"""Of a stage."""


class ReadyOrder(ReadyFirst):
    def add(self, loads: Sequence[Load]) -> None:
        pass


class RandomOrder:
    """Any op that is ready, or none though there are some; the last resort keeps it going."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def add(self, loads: Sequence[Load]) -> None:
        pass

    def choose(self, state: StageState) -> Op | None:
        ready = [kind for kind in ("F", "I", "W") if state.ready(kind)]
        return state.next_op(self._draw.choice(ready)) if ready else None


class Link(Protocol):
    def send(self, number: int, tensor: Tensor) -> None: ...

    def close(self) -> None: ...


class ThreadLink:
    """A thread that hands each tensor on after a delay of its own. Starts with the first."""

    def __init__(self, arrive: Callable[[int, Tensor], None], delay: Callable[[], float]) -> None:
        self._arrive, self._delay = arrive, delay
        self._waiting: queue.SimpleQueue[tuple[int, Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, number: int, tensor: Tensor) -> None:
        self._waiting.put((number, tensor))

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._waiting.get()) is not None:
            time.sleep(self._delay())
            self._arrive(*message)


class ThreadPeers:
    """Meets `Peers` for stages that are threads."""

    def __init__(self, stage: int, shared: _Shared) -> None:
        self._stage, self._shared = stage, shared

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        self._shared.values[self._stage] = list(values)
        self._shared.barrier.wait()
        found = list(self._shared.values)
        self._shared.barrier.wait()
        return found

    def send(self, tensor: Tensor, stage: int) -> None:
        self._shared.boxes[self._stage, stage].put(tensor.clone())

    def receive(self, like: Tensor, stage: int) -> Tensor:
        found = self._shared.boxes[stage, self._stage].get(timeout=TIMEOUT_S)
        assert found.shape == like.shape and found.dtype == like.dtype
        return found


class _Shared:
    def __init__(self, count: int) -> None:
        self.values: list[list[float]] = [[] for _ in range(count)]
        self.barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        pairs = [(a, b) for a in range(count) for b in range(count)]
        self.boxes: dict[tuple[int, int], queue.Queue[Tensor]] = {p: queue.Queue() for p in pairs}


def in_stages(
    layers: Sequence[int],
    function: Callable[[Stage], Any],
    *,
    given: Sequence[int] | None = None,
    new_chooser: NewChooser = ReadyOrder,
    orders: Callable[[Place, ThreadPeers], Planner] | None = None,
    delay: Callable[[], float] = lambda: 0.0,
    new_link: Callable[[Callable[[int, Tensor], None]], Link] | None = None,
) -> list[Any]:
    """What `function` returned on each stage. Raises the first error of any. `given`: what the
    stages are told of their layers, if that is something else. `orders`: instead of `new_chooser`,
    for choosers that stages agree on. `new_link`: one that calls this with
    what arrives; by default a `ThreadLink` with this delay."""
    count = len(layers)
    shared = _Shared(count)
    places = [Place(index=index, count=count) for index in range(count)]
    executors = [Executor(place, timeout_s=TIMEOUT_S) for place in places]
    links: dict[tuple[Kind, int], Link] = {}
    new_link = new_link or partial(ThreadLink, delay=delay)
    for index in range(count - 1):
        for kind, to in (("F", index + 1), ("I", index)):
            links[kind, to] = new_link(_into(executors[to], kind))
    for index, executor in enumerate(executors):
        executor.connect(links.get(("F", index + 1)), links.get(("I", index - 1)))
    answers: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        torch.set_num_threads(1)
        peers = ThreadPeers(index, shared)
        stage = Stage(
            places[index],
            layers=layers if given is None else given,
            peers=peers,
            executor=executors[index],
            new_chooser=(lambda _measured: new_chooser(index))
            if orders is None
            else orders(places[index], peers),
        )
        try:
            answers[index] = function(stage)
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()
            for executor in executors:
                executor.fail(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in links.values():
        link.close()
    if errors:
        raise errors[0]
    return answers


def _into(executor: Executor, kind: Kind) -> Callable[[int, Tensor], None]:
    return lambda number, tensor: executor.arrive(kind, number, tensor)
