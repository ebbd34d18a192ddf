"""The run's own host, in a run whose trainer may be on another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollpacker.weights.between_hosts.host_weights import HostWeights
from rollpacker.weights.between_hosts.spread import Call, Spread
from rollpacker.weights.buffer import WeightSource
from rollpacker.workers.host import ThisHost


class OwnHost(ThisHost):
    """See `Host` (workers/host.py), and `Member` (spread.py)."""

    def __init__(
        self, spread: Spread, get: Callable[[Any], bytes], *, address: str = "127.0.0.1"
    ) -> None:
        """`get`: the bytes of what the spread has put for others. `address`: where other hosts
        reach this one."""
        self.address = address
        self._spread, self._get = spread, get
        self._weights = HostWeights()
        spread.add("", self)

    def weights(self, source: WeightSource) -> WeightSource:
        """See `Host`."""
        return self._spread.bring(source, self, self._do) if source.layout.host else source

    def agent(self) -> tuple[object, Call]:
        """See `Member`."""
        return self, self._do

    def close(self) -> None:
        """Close the port at which others take weights, if there is one. Idempotent."""
        self._weights.close()

    def _do(self, method: str, *arguments: Any) -> Any:
        """See `Call` (spread.py): what an agent does, done here."""
        if method == "write":
            layout, start, data = arguments
            arguments = layout, start, data if isinstance(data, bytes) else self._get(data)
        return getattr(self._weights, method)(*arguments)
