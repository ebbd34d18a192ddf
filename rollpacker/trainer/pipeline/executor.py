"""One stage's loop: ask the chooser, run the op, send what it gave, wait for what is missing.

Ops of one kind run in the order of the micro-batches whatever arrives when, so that timing changes
no bit of a result. A message's number counts those of its direction since the start, over all
sweeps: what the next sweep sends early is not mistaken for this one's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from rollpacker.core.pipeline import Chooser, FixedOrder, Kind, Op, StageState
from rollpacker.trainer.pipeline.cut import Place
from rollpacker.trainer.trainer import TrainerError

TIMEOUT_S = 1800.0
"""As long as processes wait for one another elsewhere (`sharding.TIMEOUT_S`)."""


class Sender(Protocol):
    """One direction of one border, at its beginning."""

    def send(self, number: int, tensor: Tensor) -> None:
        """Returns at once; the tensor must not be changed until it is sent."""
        ...


class StageOps(Protocol):
    """What a sweep does on one stage. Tensors are messages: what came from the neighbour, and what
    goes to the other one (unused on the last stage going forward, on the first going back)."""

    def forward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None: ...

    def backward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None: ...

    def weights(self, micro_batch: int) -> None: ...


class Executor:
    """Of one stage. One thread calls `sweep`; others may call `arrive` and `fail`."""

    def __init__(self, place: Place, *, timeout_s: float = TIMEOUT_S) -> None:
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
        """Before the first sweep. None: there is no such stage."""
        assert (to_next is None) == self._place.is_last
        assert (to_previous is None) == self._place.is_first
        self._to_next, self._to_previous = to_next, to_previous

    def arrive(self, kind: Kind, number: int, tensor: Tensor) -> None:
        """Hidden states ("F") or gradients ("I") are here; in order, each once."""
        with self._changed:
            assert number == self._num_arrived[kind], f"{kind} {number} is out of order"
            self._num_arrived[kind] += 1
            self._arrived[kind].append(tensor)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing will arrive any more: a sweep that waits, now or later, raises this."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def sweep(self, tokens: Sequence[int], ops: StageOps, chooser: Chooser | None = None) -> None:
        """All ops of micro-batches of so many tokens. Without a chooser: forward only. Raises
        `TrainerError` if what is missing does not come, or what `fail` was given."""
        state = StageState(stage=self._place.index, num_stages=self._place.count)
        state.add(tokens)
        state.close()
        forward_only = chooser is None
        if chooser is None:
            chooser = FixedOrder([Op("F", number) for number in range(len(tokens))])
        while not (state.num_f == len(tokens) if forward_only else state.finished):
            op = self._next_op(state, chooser)
            self._run(op, ops)
            state.done(op)

    def _next_op(self, state: StageState, chooser: Chooser) -> Op:
        until = time.monotonic() + self._timeout_s
        with self._changed:
            while True:
                self._count_arrived(state)
                op = chooser.choose(state)
                if op is not None:
                    return op
                if self._failure is not None:
                    raise self._failure
                if not self._changed.wait(until - time.monotonic()):
                    raise TrainerError(
                        f"nothing has reached pipeline stage {self._place.index} for "
                        f"{self._timeout_s:g} s, after F{state.num_f} I{state.num_i} "
                        f"W{state.num_w} of {len(state.tokens)} micro-batches"
                    )

    def _count_arrived(self, state: StageState) -> None:
        """What arrived beyond this sweep is the next one's."""
        here = min(state.num_f + len(self._arrived["F"]), len(state.tokens))
        while not self._place.is_first and state.num_f_arrived < here:
            state.arrive("F")
        here = min(state.num_i + len(self._arrived["I"]), len(state.tokens))
        while not self._place.is_last and state.num_i_arrived < here:
            state.arrive("I")

    def _run(self, op: Op, ops: StageOps) -> None:
        if op.kind == "F":
            left = ops.forward(op.micro_batch, self._take("F", self._place.is_first))
            self._send("F", self._to_next, left)
        elif op.kind == "I":
            left = ops.backward(op.micro_batch, self._take("I", self._place.is_last))
            self._send("I", self._to_previous, left)
        else:
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
