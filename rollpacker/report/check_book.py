"""Checks of responses: when each was asked for, and what came of it."""

from __future__ import annotations

from rollpacker.core.commands import Score
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import SampleId
from rollpacker.report.step_history import StepHistory, Verdict


class CheckBook:
    """The checks under way."""

    def __init__(self) -> None:
        self._asked: dict[SampleId, tuple[float, float]] = {}
        """When they were asked for, and how long they were queued before."""

    def begin_session(self) -> None:
        """Nobody who asked lives any more."""
        self._asked.clear()

    def ask(self, command: Score, step: StepHistory, now: float) -> None:
        """A check begins."""
        step.checks.asked.append(command)
        queue_s = 0.0
        if not command.retry:
            sample = step.samples.get(command.sample)
            if sample is not None and sample.end_s is not None:
                queue_s = max(0.0, now - sample.end_s)
        self._asked[command.sample] = (now, queue_s)

    def scored(self, event: SampleScored, step: StepHistory, now: float) -> None:
        """It has ended."""
        asked_s, queue_s = self._asked.pop(event.sample, (None, 0.0))
        verdict = Verdict(event, now, asked_s, queue_s)
        step.checks.verdicts.append(verdict)
        if event.value is None and event.cause != "cancelled":
            step.prompts.lose(event.sample, event.reason)
        sample = step.samples.get(event.sample)
        if sample is not None:
            sample.verdict = verdict
