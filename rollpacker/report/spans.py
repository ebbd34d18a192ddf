"""Chooses the steps of a log that a picture shows: a given range, or a few around a long round."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rollpacker.core.commands import RoundKind
from rollpacker.core.records import Entry
from rollpacker.report.history import iterate_steps
from rollpacker.report.step_history import StepHistory


def read_steps(entries: Iterable[Entry], *, steps: range | None = None) -> list[StepHistory]:
    """The committed steps of a log whose numbers are in `steps` (None: all of them)."""
    kept: list[StepHistory] = []
    for done in iterate_steps(entries):
        if steps is None or done.step in steps:
            kept.append(done)
        if steps is not None and (not steps or done.step >= steps[-1]):
            break
    return kept


class Excerpt:
    """Is fed the steps of a log, and chooses `count` consecutive ones: the first `count`, or, once
    a long round (of prompts put off before) comes, the steps that end with the first such round."""

    def __init__(self, count: int) -> None:
        self.steps: list[StepHistory] = []
        self._count = count
        self._recent: deque[StepHistory] = deque(maxlen=count)
        self._settled = False

    def feed(self, step: StepHistory) -> None:
        if self._settled:
            return
        self._recent.append(step)
        if len(self.steps) < self._count:
            self.steps.append(step)
        if step.kind is RoundKind.LONG and len(self._recent) == self._count:
            self.steps = list(self._recent)
            self._settled = True
