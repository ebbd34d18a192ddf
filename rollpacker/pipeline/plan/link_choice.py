"""Choice of the kind of links that a pipeline uses, with `train.pipeline.links=auto` on a CPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

LinkKind = Literal["host", "direct"]
PATIENCE = 8
"""Number of steps in which all links must be well before the first return to direct links."""


class LinkChoice:
    """Chooses direct links while all are well, since they cost less. From the step after a link was
    found slow, host links are chosen, which hold no stage up, until all links have been well for
    some steps.

    A link that is slow only as a direct link would be found slow after each return, so the wait
    before a return doubles whenever the last return lasted no longer than the wait before it.
    """

    def __init__(self) -> None:
        self.kind: LinkKind = "direct"
        self._patience = PATIENCE
        self._steps_well = 0
        """Number of steps without a gap in which all links of this kind were well."""
        self._returned = False

    def observe(self, slow_links: Collection[int], *, direct_lost: bool = False) -> LinkKind:
        """Return the kind of links for the next step. `slow_links`: numbers of all links that are
        slow now. `direct_lost`: a direct link was lost while host links were in use, for good."""
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
