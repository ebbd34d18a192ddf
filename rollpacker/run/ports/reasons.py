"""Counts why samples could not be used: logs each new reason, and names the commonest at the
end."""

from __future__ import annotations

import logging
import re
from collections import Counter

from rollpacker.bus import Bus
from rollpacker.core.commands import Drop, Finish
from rollpacker.core.events import Acted, SampleFailed, SampleScored
from rollpacker.core.records import Entry, Record
from rollpacker.run.errors import EnginesLost, RewardsFailed
from rollpacker.trainer.trainer import TrainerProcessError

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?<=\bpid )\d+")
MAX_REASONS = 100
"""Number of different reasons after which new ones are not counted, to bound the memory."""

MAX_TOLD_REASONS = 3
"""Number of different reasons that are logged when they first come; later ones are only counted."""


class Reasons:
    """Counts why samples could not be used. Used under the bus's lock."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._counts: Counter[str] = Counter()
        """Number of samples that could not be used, by reason."""
        self._first: dict[str, str] = {}
        """First reason of each kind, by kind: reasons that differ in a process id only are one
        kind."""
        bus.add_sink(self._saw)

    def reason_of(self, finish: Finish) -> str:
        """Returns why the run ended. If it ended in failure, raises `EnginesLost` (no engine is
        left), `TrainerProcessError` (no trainer is left) or `RewardsFailed` (no usable samples)."""
        if not finish.failed:
            return finish.reason
        fleet = self._bus.job.fleet
        if fleet is not None and fleet.given_up:
            raise EnginesLost(finish.reason)
        if self._bus.job.trainer.given_up:
            raise TrainerProcessError(f"{finish.reason}. Mend that, then go on with --resume")
        with self._bus.lock:
            common = "; ".join(reason for reason, _ in self._counts.most_common(3))
        raise RewardsFailed(
            f"{finish.reason}. Why, most often: {common or 'unknown'}. Mend that (the reward, the"
            " environment, or the data), then go on with --resume"
        )

    def _saw(self, entry: Entry) -> None:
        if not isinstance(entry, Record):
            return
        match entry.event:
            case SampleFailed(reason=reason):
                self._tell(f"the engine: {reason}")
            case Acted(reason=reason, cause=cause) if cause not in ("", "cancelled"):
                self._tell(f"the environment: {reason}")
            case SampleScored(value=None, reason=reason, cause=cause) if cause != "cancelled":
                self._tell(reason)
        for command in entry.commands:
            if isinstance(command, Drop):
                self._count(command.reason)

    def _tell(self, reason: str) -> None:
        kind = _NUMBER.sub("0", reason)
        if kind in self._first or len(self._first) < MAX_REASONS:
            reason = self._first.setdefault(kind, reason)
        if reason not in self._counts and len(self._counts) < MAX_TOLD_REASONS:
            # It may quote what a model wrote, which a terminal must not obey.
            shown = "".join(one if one.isprintable() else "\ufffd" for one in reason)
            logger.warning("no use for a sample: %s (more of the same are only counted)", shown)
        self._count(reason)

    def _count(self, reason: str) -> None:
        if reason in self._counts or len(self._counts) < MAX_REASONS:
            self._counts[reason] += 1
