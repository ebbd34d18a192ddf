"""The run's own host, in a run whose trainer may be on another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollpacker.processes.host import ThisHost
from rollpacker.remote.copies import Copies
from rollpacker.remote.spread import Spread
from rollpacker.weight_buffer import BufferLayout, WeightSource


class OwnHost(ThisHost):
    """See `Host` (processes/host.py)."""

    def __init__(self, spread: Spread, get: Callable[[Any], bytes]) -> None:
        """`get`: the bytes of what the spread has put for others."""
        self._spread, self._get = spread, get
        self._copies = Copies()

    def weights(self, source: WeightSource) -> WeightSource:
        """See `Host`."""
        return self._spread.bring(source, self, self._do) if source.layout.host else source

    def _do(self, method: str, layout: BufferLayout, *written: Any) -> Any:
        """See `Call` (spread.py): what an agent does, done here."""
        if method == "copy":
            return self._copies.layout(layout)
        start, data = written
        self._copies.write(layout, start, data if isinstance(data, bytes) else self._get(data))
        return None
