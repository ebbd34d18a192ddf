"""Checks of responses: every check keeps a worker for the seconds that the workload has drawn. The
core limits how many run at once (`core/checks/reward_schedule.py`), so each begins at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rollpacker.bus import Routes
from rollpacker.core.commands import CancelScore, Score
from rollpacker.core.events import Event, SampleScored
from rollpacker.core.ids import SampleId
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.machine import Machine
from rollpacker.sim.responses import Responses
from rollpacker.sim.workload import Workload

_NO_PARTS: Mapping[str, float | None] = {}


class Rewards:
    """Carries out the commands `Score` (check a response) and `CancelScore`: gives verdicts."""

    def __init__(
        self,
        clock: VirtualClock,
        machine: Machine,
        workload: Workload,
        responses: Responses,
        max_response_tokens: int | None,
    ) -> None:
        self.delay_s: Callable[[SampleId], float] | None = None
        """Function from a sample to seconds by which its check is prolonged; None: none is."""
        self._clock = clock
        self._workload = workload
        self._responses = responses
        self._slowdown = {s: f for s, f in machine.check_slowdown.items() if f != 1.0}
        self._skips = workload.skip_truncated
        self._cap = math.inf if max_response_tokens is None else max_response_tokens
        self._cancelled: set[SampleId] = set()
        """Samples whose check was cancelled while its verdict, to be ignored, is still to come."""

    def routes(self) -> Routes:
        return {Score: self._score, CancelScore: self._cancel}

    def _score(self, command: Score) -> None:
        sample = command.sample
        responses = self._responses
        key = responses.keys[sample]
        seconds, correct = self._workload.verdict(responses.noises[key])
        if responses.lengths[key] >= self._cap and sample.prompt.source in self._skips:
            seconds, correct = 0.0, False
        value = 1.0 if correct else 0.0
        if not seconds:
            event = SampleScored(time_s=0.0, sample=sample, value=value, parts=_NO_PARTS)
            self._clock.after(0.0, event)
            return
        if self._slowdown:
            seconds *= self._slowdown.get(sample.prompt.source, 1.0)
        if self.delay_s is not None:
            seconds += self.delay_s(sample)
        timeout_s, timed_out = command.timeout_s, False
        if timeout_s is not None and seconds >= timeout_s:
            seconds, value, timed_out = timeout_s, 0.0, True
        scored = SampleScored(
            time_s=0.0,
            sample=sample,
            value=value,
            parts=_NO_PARTS,
            seconds=seconds,
            timed_out=timed_out,
        )
        self._clock.after(seconds, scored)

    def _cancel(self, command: CancelScore) -> None:
        """End these checks now. The verdicts that are still on the clock will be ignored."""
        self._cancelled.update(command.samples)
        self._clock.passes_over = self._was_cancelled
        for sample in command.samples:
            self._clock.after(
                0.0,
                SampleScored(
                    time_s=0.0,
                    sample=sample,
                    value=None,
                    parts=_NO_PARTS,
                    reason="not needed any more",
                    cause="cancelled",
                ),
            )

    def _was_cancelled(self, event: Event) -> bool:
        if not isinstance(event, SampleScored) or event.sample not in self._cancelled:
            return False
        self._cancelled.remove(event.sample)
        return True
