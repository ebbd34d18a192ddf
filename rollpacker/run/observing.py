"""The observers' share of the log: fed in its order, on the event loop, off the engine's path."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rollpacker.bus import Bus
from rollpacker.core.records import Entry, Observer


class Observing:
    """Gathers entries in whatever thread they are logged."""

    def __init__(self, bus: Bus, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._unobserved: deque[Entry] = deque()
        bus.add_sink(self._unobserved.append)

    def feed(self) -> None:
        """Show the observers what they have not seen yet."""
        while self._unobserved:
            entry = self._unobserved.popleft()
            for observer in self._observers:
                observer.feed(entry)
