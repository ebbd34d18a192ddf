"""Choice of the kind of links that a pipeline uses, where it may choose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

LinkKind = Literal["host", "direct"]
PATIENCE = 8
"""Steps in which all links must be well before the first return to direct ones."""


class LinkChoice:
    """Direct links while all are well: they cost less. Host links, which hold nobody up, from the
    step after one was found slow until all have been well for some steps.

    What is slow over direct links alone would be found so again at each return to them, so that the
    wait before a return doubles whenever the last one did not outlive the wait before it.
    """

    def __init__(self) -> None:
        self.kind: LinkKind = "direct"
        self._patience = PATIENCE
        self._steps_well = 0
        """Steps without a gap in which all links of this kind were well."""
        self._returned = False

    def observe(self, slow_links: Collection[int], *, direct_lost: bool = False) -> LinkKind:
        """After a step: the kind for the next one. `slow_links`: all that count as slow now.
        `direct_lost`: a direct link was lost while host links were in use; it comes back no more.
        """
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
