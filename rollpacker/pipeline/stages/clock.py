"""Times the ops of a pipeline stage. On CUDA it uses events on the stream, so that nothing waits
for the GPU until the step is over; that is written, but has not run so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rollpacker.pipeline.links.link import ArrivalTimes
from rollpacker.pipeline.plan.choosers import KINDS, Kind
from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.times import Messages, StageTimes

_Moment = float | torch.cuda.Event
_Op = tuple[Kind, Load | None, _Moment, _Moment]
_CPU = torch.device("cpu")


class StageClock:
    """Times the ops of one pipeline stage. `op` must be called around every op, since a message is
    matched to its op by number."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._device = device
        self._ops: list[_Op] = []
        self._num_ops: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        """Number of ops since the start, by kind. Op number n of a kind takes message number n."""
        self._sweeps_s = 0.0
        self._live_tokens = 0
        self._peak_live_tokens = 0
        self._with_gradients: dict[Kind, set[int]] = {kind: set() for kind in KINDS}
        """By kind, the numbers of the ops in sweeps with gradients since the last `take`."""

    def swept(self, seconds: float) -> None:
        """Record that a sweep is over. `seconds`: time with ops left to run, waits included."""
        self._sweeps_s += seconds

    @contextmanager
    def op(self, kind: Kind, load: Load | None) -> Iterator[None]:
        """Time the op inside the block. `load`: the micro-batch's size; None: without gradients."""
        began = self._now()
        yield
        self._ops.append((kind, load, began, self._now()))
        if load is not None:
            self._with_gradients[kind].add(self._num_ops[kind])
            self._live_tokens += {"F": load.tokens, "I": 0, "W": -load.tokens}[kind]
            self._peak_live_tokens = max(self._peak_live_tokens, self._live_tokens)
        self._num_ops[kind] += 1

    def take(
        self, stage: int, num_layers: int, arrivals: Mapping[Kind, Sequence[ArrivalTimes]]
    ) -> StageTimes:
        """Return the stage's times since the last call. `arrivals`: times of hidden states (F) and
        gradients (I) that arrived since, numbered from the start of the run."""
        ops: dict[Kind, list[tuple[Load, float]]] = {kind: [] for kind in KINDS}
        busy_s = 0.0
        for kind, load, began, ended in self._ops:
            seconds = _seconds(began, ended)
            busy_s += seconds
            if load is not None:
                ops[kind].append((load, seconds))
        times = StageTimes(
            stage=stage,
            num_layers=num_layers,
            ops={kind: tuple(timed) for kind, timed in ops.items()},
            from_previous=self._messages("F", arrivals),
            from_next=self._messages("I", arrivals),
            peak_live_tokens=self._peak_live_tokens,
            busy_s=busy_s,
            waiting_s=max(self._sweeps_s - busy_s, 0.0),
        )
        self._ops, self._sweeps_s, self._peak_live_tokens = [], 0.0, self._live_tokens
        self._with_gradients = {kind: set() for kind in KINDS}
        return times

    def _messages(self, kind: Kind, arrivals: Mapping[Kind, Sequence[ArrivalTimes]]) -> Messages:
        wanted = self._with_gradients[kind]
        found = (one for one in arrivals.get(kind, ()) if one.number in wanted)
        return tuple((one.num_bytes, one.seconds) for one in found)

    def _now(self) -> _Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        moment.record()
        return moment


def _seconds(began: _Moment, ended: _Moment) -> float:
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
