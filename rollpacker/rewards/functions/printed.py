"""Shows the lines that the workers of one reward or environment print: the first ones, then a
count.

The lines come from `workers/output.py`, which makes control characters visible and drops what
exceeds its quota of bytes. They are logged as warnings, which are seen without any set-up; lines
beyond `MAX_LINES` are logged as information (`--verbose`).
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_LINES = 20
"""Most lines of one reward that are shown; more would hide the run's own messages."""


class Printed:
    """Counts and shows the lines of one reward or environment, whose workers share this object."""

    def __init__(self, kind: str = "reward") -> None:
        """`kind`: the word used in messages, "reward" or "environment"."""
        self._kind = kind
        self._num_lines = 0

    def line(self, name: str, line: str) -> None:
        """Show a line that the reward or environment `name` printed; after `MAX_LINES` count it."""
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            logger.warning("%s %s: %s", self._kind, name, line)
        else:
            logger.info("%s %s: %s", self._kind, name, line)
        if self._num_lines == MAX_LINES:
            logger.warning(
                "%s %s: what it prints from here on is counted, not shown (--verbose shows it)",
                self._kind,
                name,
            )

    def close(self, name: str) -> None:
        """Log the number of lines that were not shown. Printing again begins a new count."""
        if self._num_lines > MAX_LINES:
            num_more = self._num_lines - MAX_LINES
            logger.warning("%s %s printed %d more lines", self._kind, name, num_more)
        self._num_lines = 0
