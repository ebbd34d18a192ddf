"""Chooses which kind of links pipeline stages use, direct or by way of host memory, with
`train.pipeline.links=auto` on a CPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

LinkKind = Literal["host", "direct"]
PATIENCE = 8
"""Number of steps in a row without a slow link before the first return to direct links."""


class LinkChoice:
    """Chooses direct links while none is slow, since they cost less. From the step after a link was
    found slow, host links are chosen, which hold no stage up, until no link has been slow for some
    steps. A link that is slow only as a direct link would be found slow after each return, so the
    wait before a return doubles whenever the last return lasted no longer than the wait before
    it."""

    def __init__(self) -> None:
        self.kind: LinkKind = "direct"
        self._patience = PATIENCE
        self._steps_well = 0
        """Number of last steps in a row in which no link was slow, since `kind` last changed."""
        self._returned = False

    def observe(self, slow_links: Collection[int], *, direct_lost: bool = False) -> LinkKind:
        """Return the kind of links for the next step. `slow_links`: numbers of all links that are
        slow now. `direct_lost`: whether a direct link broke while host links were in use."""
        if direct_lost:
            return self.kind
        if self.kind == "direct" and slow_links:
            soon = self._returned and self._steps_well <= self._patience
            self._patience = 2 * self._patience if soon else PATIENCE
            self.kind, self._steps_well = "host", 0
            return self.kind
        self._steps_well = 0 if slow_links else self._steps_well + 1
        if self.kind == "host" and self._steps_well >= self._patience:
            self.kind, self._steps_well, self._returned = "direct", 0, True
        return self.kind
