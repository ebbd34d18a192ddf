"""The clock of a simulation: it holds the events to come and says which is next, and when.

Events of the present moment come first, in the order in which they were scheduled. All later events
are in a heap by time; those of equal time come in the order in which they were scheduled. Time
stands still while an event is handled, and then jumps to the next event.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from rollpacker.core.events import Event


class Moving(Protocol):
    """Something, such as an engine, whose next event may move to another time while awaited."""

    @property
    def next_finish(self) -> float:
        """Time in seconds at which this thing's next event happens; inf if there is none."""
        ...


class VirtualClock:
    """The clock of a simulation, in simulated seconds, with all later events in their order."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.last: Event | None = None
        """Event after which `run` returns. None: no event ends the run."""
        self.passes_over: Callable[[Event], bool] | None = None
        """Function that returns True for an event that must not happen, such as the verdict of a
        cancelled check. None: every event happens."""
        self._at_once: deque[Event] = deque()
        self._heap: list[tuple[float, int, Moving | None, Any]] = []
        """Heap of later events: (time, counter, None, event), or (time, counter, moving thing,
        function that makes its event). An entry of a moving thing counts only while its time is
        the thing's `next_finish`."""
        self._counter = 0
        self._stopped = False

    def now(self) -> float:
        """Simulated seconds since the run began."""
        return self.time_s

    def stamp(self) -> float:
        """Simulated seconds since the run began, for an event's time stamp. Not rounded: the
        scheduling core rounds time stamps itself, as the event log does, where it uses them."""
        return self.time_s

    def after(self, seconds: float, event: Event) -> None:
        """Schedule the event `seconds` from now, or at the present moment if that is 0 or less."""
        if seconds <= 0.0:
            self._at_once.append(event)
            return
        self._counter += 1
        heapq.heappush(self._heap, (self.time_s + seconds, self._counter, None, event))

    def expect(self, moving: Moving, event: Callable[[], Event | None]) -> None:
        """Schedule the next event of `moving` at its `next_finish`. The function `event` then makes
        the event; if it returns None, nothing happens. Call this again whenever `next_finish` has
        changed for another reason than that event."""
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
        """Call `take` with each event in turn, until the event `last` was handled or `stop` was
        called. Events later than `until_s` seconds stay in the clock; None: there is no limit."""
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
