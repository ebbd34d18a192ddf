"""Nodes on which jobs cannot be started, since they have no host: it is away, or was never there.

a start fails for it -> ... -> HOSTLESS_S later the node is drained: its jobs go elsewhere, or
wait -> it has a host again -> it is restored
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable

from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.service.runner import Runner

HOSTLESS_S = 300.0
"""So long jobs wait for a node's host, which may be starting, before they go elsewhere."""
_LOOK_S = 1.0


class Hostless:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._since_s: dict[Node, float] = {}
        self._failed = set[Node]()
        """Of them, those of which it was said last time, too."""
        self._looked_s = 0.0

    def tried(self, failed: Iterable[Node], unknown: Collection[Node]) -> None:
        """Whoever is due was to be started, and these nodes have no host. `unknown`: others on
        which a job has still to be started, of which nothing can be said now: what was said of them
        before stands."""
        now_s = time.monotonic()
        before = self._since_s
        self._since_s = {node: before[node] for node in before if node in unknown}
        self._failed = set(failed)
        self._since_s |= {node: before.get(node, now_s) for node in self._failed}

    @property
    def nodes(self) -> Collection[Node]:
        """On which somebody is to start who cannot."""
        return self._since_s.keys()

    def overdue(self) -> list[Node]:
        """Without a host for too long."""
        now_s = time.monotonic()
        return [node for node in self._failed if now_s - self._since_s[node] > HOSTLESS_S]

    def back(self, nodes: Collection[Node]) -> list[Node]:
        """Those of the drained ones that have a host again, as far as it can be asked now."""
        if not nodes or time.monotonic() - self._looked_s < _LOOK_S:
            return []
        self._looked_s = time.monotonic()
        with contextlib.suppress(OSError):
            return [node for node in sorted(nodes) if self._runner.has_host(node)]
        return []
