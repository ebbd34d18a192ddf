"""Warnings that are logged once and not at every sample."""

from __future__ import annotations

import logging


class WarnOnce:
    """Logs a warning the first time that the object is called with this `message`, whatever the
    arguments.

    Make one object for each thing that warns (a reward, an endpoint), so that a second run in the
    same process warns again. A text that differs each time counts as a new message: give it
    formatted.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[str] = set()

    def __call__(self, message: str, *arguments: object) -> None:
        if message not in self._said:
            self._said.add(message)
            self._logger.warning(message, *arguments, stacklevel=2)
