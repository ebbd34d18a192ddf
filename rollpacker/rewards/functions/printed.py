"""What the workers of one reward print, as its author sees it: the first lines, then a count.

The lines come from `processes/output.py`, which makes control characters visible and drops what
exceeds its quota of bytes. They are told as warnings, which are seen without any set-up; what is
beyond `MAX_LINES` is logged as information (`--verbose`).
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_LINES = 20
"""So many lines of one reward are shown: more would hide what the run itself has to say."""


class Printed:
    """Belongs to one reward; its workers share it."""

    def __init__(self) -> None:
        self._num_lines = 0

    def line(self, reward: str, line: str) -> None:
        """A worker printed it."""
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            logger.warning("reward %s: %s", reward, line)
        else:
            logger.info("reward %s: %s", reward, line)
        if self._num_lines == MAX_LINES:
            logger.warning(
                "reward %s: what it prints from here on is counted, not shown (--verbose shows it)",
                reward,
            )

    def close(self, reward: str) -> None:
        """Tell how many lines were not shown. Printing again begins a new count."""
        if self._num_lines > MAX_LINES:
            num_more = self._num_lines - MAX_LINES
            logger.warning("reward %s printed %d more lines", reward, num_more)
        self._num_lines = 0
