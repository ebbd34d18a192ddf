"""Warnings that are logged once, and not again for every sample."""

from __future__ import annotations

import logging


class WarnOnce:
    """Logs a warning when called for the first time with this `message`, whatever the arguments for
    its placeholders; to log it again for other values, pass a formatted text. Make one object for
    each thing that warns (a reward, an endpoint), so that a second run in the process warns
    again."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def __call__(self, message: str, *arguments: object) -> None:
        if message not in self._said:
            self._said.add(message)
            self._logger.warning(message, *arguments, stacklevel=2)
