"""One stage's loop: ask the chooser for an op, run it, send its result, wait for messages.

Ops of one kind run in the order of the micro-batches whatever arrives when, so that timing changes
no bit of a result. A message's number counts those of its direction since the start, over all
sweeps: what the next sweep sends early is not mistaken for this one's.

    executor.sweep(loads, ops, chooser)   # all micro-batches at once, in the caller's thread

    sweep = executor.open(ops, chooser)   # an open sweep, in a thread of its own
    sweep.add(loads)                      # adds micro-batches
    sweep.forward(scoring, 3)             # 3 forwards without gradients, after theirs
    sweep.add(more)                       # adds others, while the first are under way
    sweep.drain()                         # waits until all ops are done

All stages make these calls in the same order, so that all send in the same order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollpacker.pipeline.links.link import Sender
from rollpacker.pipeline.plan.choosers import Chooser, FixedOrder, Kind, Op, StageState
from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.clock import StageClock
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.orders import SweepChooser
from rollpacker.trainer.trainer import TrainerError

TIMEOUT_S = 1800.0
"""Seconds after which a sweep fails if no message comes: as long as processes wait for one another
elsewhere (`sharding.TIMEOUT_S`)."""


class StageOps(Protocol):
    """The ops of a sweep (all micro-batches once through the stages) on one stage. `arrived` is a
    neighbour's message, and the result goes to the other neighbour; None for no neighbour."""

    def forward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None: ...

    def backward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None: ...

    def weights(self, micro_batch: int) -> None: ...


class Executor:
    """Runs the ops of one pipeline stage and sends their results. One thread calls `sweep` and
    `open`; any may call `arrive` and `fail`."""

    def __init__(
        self, place: Place, *, timeout_s: float = TIMEOUT_S, clock: StageClock | None = None
    ) -> None:
        self.clock = StageClock() if clock is None else clock
        self._place = place
        self._timeout_s = timeout_s
        self._to_next: Sender | None = None
        self._to_previous: Sender | None = None
        self._changed = threading.Condition()
        self._arrived: dict[Kind, deque[Tensor]] = {"F": deque(), "I": deque()}
        self._num_arrived: dict[Kind, int] = {"F": 0, "I": 0}
        self._num_sent: dict[Kind, int] = {"F": 0, "I": 0}
        self._failure: BaseException | None = None

    def connect(self, to_next: Sender | None, to_previous: Sender | None) -> None:
        """Set the senders to the two neighbours, before the first sweep. None: no such stage."""
        assert (to_next is None) == self._place.is_last
        assert (to_previous is None) == self._place.is_first
        self._to_next, self._to_previous = to_next, to_previous

    def arrive(self, kind: Kind, number: int, tensor: Tensor) -> None:
        """Accept a message of hidden states ("F") or gradients ("I"), each once and in order."""
        with self._changed:
            assert number == self._num_arrived[kind], f"{kind} {number} is out of order"
            self._num_arrived[kind] += 1
            self._arrived[kind].append(tensor)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record that no message comes any more: a sweep that waits for one raises `error`."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def sweep(self, loads: Sequence[Load], ops: StageOps, chooser: Chooser | None = None) -> None:
        """Run a sweep (all micro-batches once through the stages) of micro-batches of these sizes.
        `chooser` must have been told of them; None: forward passes without gradients only. Raises
        `TrainerError` if a message does not come in time, or the error given to `fail`."""
        sweep = Sweep(self, ops, FixedOrder() if chooser is None else chooser)
        if chooser is not None:
            sweep.add(loads)
        elif loads:
            sweep.scoring = Scoring(ops, len(loads))
        sweep.state.close()
        sweep.run()

    def open(self, ops: StageOps, chooser: SweepChooser) -> OpenSweep:
        """Open a sweep without micro-batches yet. No other sweep may run until this is drained."""
        return OpenSweep(self, ops, chooser)

    def _run(self, op: Op, ops: StageOps, load: Load | None) -> None:
        """Run one op. `load`: the micro-batch's size; None: a forward pass without gradients."""
        if op.kind == "F":
            arrived = self._take("F", self._place.is_first)
            with self.clock.op("F", load):
                left = ops.forward(op.micro_batch, arrived)
            self._send("F", self._to_next, left)
        elif op.kind == "I":
            arrived = self._take("I", self._place.is_last)
            with self.clock.op("I", load):
                left = ops.backward(op.micro_batch, arrived)
            self._send("I", self._to_previous, left)
        else:
            with self.clock.op("W", load):
                ops.weights(op.micro_batch)

    def _take(self, kind: Kind, nothing_comes: bool) -> Tensor | None:
        if nothing_comes:
            return None
        with self._changed:
            return self._arrived[kind].popleft()

    def _send(self, kind: Kind, sender: Sender | None, tensor: Tensor | None) -> None:
        if sender is None:
            return
        assert tensor is not None, f"{kind} of stage {self._place.index} gave nothing to send"
        sender.send(self._num_sent[kind], tensor)
        self._num_sent[kind] += 1


@dataclass(slots=True)
class Scoring:
    """Forward passes without gradients, run while a sweep with gradients is open. They run after
    the forwards of the micro-batches so far and before later ones, whatever the chooser says: they
    keep no activations."""

    ops: StageOps
    count: int
    num_done: int = 0


class Sweep:
    """One sweep (all micro-batches) on one stage. It runs in the thread that calls `run`."""

    def __init__(self, executor: Executor, ops: StageOps, chooser: Chooser) -> None:
        place = executor._place
        self.state = StageState(stage=place.index, num_stages=place.count)
        self.scoring: Scoring | None = None
        self.seconds = 0.0
        """Seconds that the ended sweep ran, without those in which it had no micro-batch left."""
        self._executor = executor
        self._place = place
        self._changed = executor._changed
        self._ops = ops
        self._chooser = chooser
        self._loads: list[Load] = []

    def add(self, loads: Sequence[Load]) -> None:
        """Add micro-batches of these sizes to the sweep."""
        self._loads += loads
        self.state.add([load.tokens for load in loads])

    def run(self) -> None:
        """Run ops until the sweep is closed and all are done. Raises the errors of
        `Executor.sweep`."""
        started_s = time.perf_counter()
        try:
            while (found := self._next_op()) is not None:
                op, ops = found
                is_scored = self.scoring is not None and ops is self.scoring.ops
                load = None if is_scored else self._loads[op.micro_batch]
                self._executor._run(op, ops, load)
                self._done(op, ops)
        finally:
            self.seconds += time.perf_counter() - started_s
            self._executor.clock.swept(self.seconds)

    def _next_op(self) -> tuple[Op, StageOps] | None:
        timeout_s = self._executor._timeout_s
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._count_arrived()
                if (found := self._ready_op()) is not None:
                    return found
                if self._nothing_left and self.state.closed:
                    return None
                if self._executor._failure is not None:
                    raise self._executor._failure
                if self._nothing_left:
                    since = time.perf_counter()
                    self._changed.wait()
                    self.seconds -= time.perf_counter() - since
                    until = time.monotonic() + timeout_s
                elif not self._changed.wait(until - time.monotonic()):
                    raise TrainerError(
                        f"nothing has reached pipeline stage {self._place.index} for "
                        f"{timeout_s:g} s, after {self._progress()}"
                    )

    def _ready_op(self) -> tuple[Op, StageOps] | None:
        """Return the next op that has its input, with its `StageOps`; None: there is none. Passes
        that only score come first where they may, since a caller waits for them."""
        scoring, state = self.scoring, self.state
        is_here = self._place.is_first or self._executor._arrived["F"]
        if scoring is not None and state.num_f == len(state.tokens) and is_here:
            return Op("F", scoring.num_done), scoring.ops
        op = self._chooser.choose(state)
        return None if op is None else (op, self._ops)

    def _done(self, op: Op, ops: StageOps) -> None:
        with self._changed:
            scoring = self.scoring
            if scoring is not None and ops is scoring.ops:
                scoring.num_done += 1
                if scoring.num_done == scoring.count:
                    self.scoring = None
            else:
                self.state.done(op)
            self._changed.notify_all()

    @property
    def _nothing_left(self) -> bool:
        """Whether all micro-batches added so far, and all passes without gradients, are done."""
        return self.scoring is None and self.state.num_w == len(self.state.tokens)

    def _count_arrived(self) -> None:
        """Count the messages that have arrived for this sweep's micro-batches. Messages beyond
        these are for a later sweep."""
        state, arrived = self.state, self._executor._arrived
        here = min(state.num_f + len(arrived["F"]), len(state.tokens))
        while not self._place.is_first and state.num_f_arrived < here:
            state.arrive("F")
        here = min(state.num_i + len(arrived["I"]), len(state.tokens))
        while not self._place.is_last and state.num_i_arrived < here:
            state.arrive("I")

    def _progress(self) -> str:
        state, scoring = self.state, self.scoring
        done = f"F{state.num_f} I{state.num_i} W{state.num_w} of {len(state.tokens)} micro-batches"
        scored = "" if scoring is None else f" and {scoring.num_done} of {scoring.count} scored"
        return done + scored


class OpenSweep:
    """A sweep (all micro-batches once) in a thread of its own. One thread makes the calls.

    An error in the sweep is raised by a call that waits, or by the next one: `TrainerError` if a
    message does not come in time, the error given to `Executor.fail`, or an op's own error.
    """

    def __init__(self, executor: Executor, ops: StageOps, chooser: SweepChooser) -> None:
        self._sweep = Sweep(executor, ops, chooser)
        self._chooser = chooser
        self._changed = executor._changed
        self._error: BaseException | None = None
        # Both are a thread's own.
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        self._device = torch.cuda.current_device() if on_cuda else None
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Seconds that the drained sweep ran, without those in which it had no micro-batch left."""
        return self._sweep.seconds

    def add(self, loads: Sequence[Load]) -> None:
        """Add micro-batches of these sizes. Returns once the forwards of those added earlier are
        done, so that the caller can prepare the next call's while these run. Also raises errors of
        the chooser, which is told of new micro-batches first."""
        state = self._sweep.state
        self._chooser.add(loads)  # it may ask the other stages, which need this one's ops meanwhile
        with self._changed:
            self._check()
            before = len(state.tokens)
            self._sweep.add(loads)
            self._changed.notify_all()
            self._wait(lambda: state.num_f >= before)

    def forward(self, ops: StageOps, count: int) -> None:
        """Run `count` forwards of `ops` without gradients, as soon as the forwards of the
        micro-batches added so far are done; backwards come before only where a forward waits for
        them. Returns when all `count` are done."""
        if count == 0:
            return
        with self._changed:
            self._check()
            self._sweep.scoring = Scoring(ops, count)
            self._changed.notify_all()
            self._wait(lambda: self._sweep.scoring is None)

    def drain(self) -> None:
        """Close the sweep and wait until all its ops are done. No further call may come."""
        with self._changed:
            self._sweep.state.close()
            self._changed.notify_all()
        self._thread.join()
        self._check()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._sweep.run()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait(self, holds: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: holds() or self._error is not None)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
