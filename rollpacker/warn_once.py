"""Warnings that are logged once, and not again for every sample."""

from __future__ import annotations

import logging


class WarnOnce:
    """Logs a warning when called for the first time with this `message`; other arguments do not
    count, so a text that is to be logged again with other values is passed formatted. Make one
    object for each thing that warns (a reward, an endpoint), so that a second run in the process
    warns again."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def __call__(self, message: str, *arguments: object) -> None:
        if message not in self._said:
            self._said.add(message)
            self._logger.warning(message, *arguments, stacklevel=2)
