"""The clock of a simulation: what comes next, and when that is.

    at once     events of the present moment, in the order in which they were said
    the heap    everything later; equal times in the order in which they were said

Time stands still while an event is handled and jumps to the next one after that.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from rollpacker.core.events import Event


class Moving(Protocol):
    """Something whose next event may change its time while it is awaited, such as an engine."""

    @property
    def next_finish(self) -> float:
        """When that event happens, in seconds; inf: there is none."""
        ...


class VirtualClock:
    """A `bus.Clock` that also says which event is next."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.last: Event | None = None
        """`run` returns when this event has been taken."""
        self.passes_over: Callable[[Event], bool] | None = None
        """Called with every event of the heap; true for an event that does not happen. None: all
        happen."""
        self._at_once: deque[Event] = deque()
        self._heap: list[tuple[float, int, Moving | None, Any]] = []
        """(time, counter, None, event), or (time, counter, the moving thing, what makes its
        event). Of a moving thing only the entry at its present `next_finish` counts."""
        self._counter = 0
        self._stopped = False

    def now(self) -> float:
        """Seconds since the run began."""
        return self.time_s

    def stamp(self) -> float:
        """Seconds since the run began, as an event carries them. The core rounds them as the event
        log does wherever it learns from a time."""
        return self.time_s

    def after(self, seconds: float, event: Event) -> None:
        """Let the event happen so many seconds later, or at once if that is not above 0."""
        if seconds <= 0.0:
            self._at_once.append(event)
            return
        self._counter += 1
        heapq.heappush(self._heap, (self.time_s + seconds, self._counter, None, event))

    def expect(self, moving: Moving, event: Callable[[], Event | None]) -> None:
        """Await the next event of a moving thing, made by `event` at its time; None is passed over.
        To be called again whenever that time has changed, but not after the event itself."""
        when = moving.next_finish
        if when != math.inf:
            self._counter += 1
            heapq.heappush(self._heap, (when, self._counter, moving, event))

    def stop(self) -> None:
        """Let `run` return as soon as the current event is handled."""
        self._stopped = True

    def next_s(self) -> float:
        """Time of the next event, in seconds; inf if there is none yet."""
        if self._at_once:
            return self.time_s
        heap = self._heap
        while heap and heap[0][2] is not None and heap[0][2].next_finish != heap[0][0]:
            heapq.heappop(heap)  # it moved since
        return heap[0][0] if heap else math.inf

    def run(self, take: Callable[[Event], None], until_s: float | None = None) -> None:
        """Hand out one event after the other, until `last` or `stop`, or up to this time and with
        it."""
        # One call per event and one heap entry per engine: benchmarks/sim_speed.py.
        heap, at_once = self._heap, self._at_once
        while not self._stopped:
            if at_once:
                event = at_once.popleft()
            else:
                if until_s is not None and self.next_s() > until_s:
                    return
                assert heap, "nothing comes any more"
                self.time_s, _, moving, thing = heap[0]
                if moving is None:
                    heapq.heappop(heap)
                    if self.passes_over is not None and self.passes_over(thing):
                        continue
                    event = thing
                elif moving.next_finish != self.time_s:  # it moved since
                    heapq.heappop(heap)
                    continue
                else:
                    event = thing()
                    when = moving.next_finish
                    if when != math.inf:
                        self._counter += 1
                        heapq.heapreplace(heap, (when, self._counter, moving, thing))
                    else:
                        heapq.heappop(heap)
                    if event is None:
                        continue
            take(event)
            if event is self.last:
                return
