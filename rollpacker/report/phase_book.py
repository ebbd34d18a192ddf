"""The phases of a run's steps (training, sync, ...), and their times. Phases do not overlap."""

from __future__ import annotations

from rollpacker.core.records import CALLBACK_SECONDS, POOL_SWITCH, Note
from rollpacker.report.step_history import POOL_WAIT, Phase, StepHistory
from rollpacker.report.time_book import WHILE_AWAY


class PhaseBook:
    """Keeps the current phase of the run while `History` reads a log, and adds every phase that
    ends to the step under way."""

    def __init__(self) -> None:
        self._doing = "controller"
        self._since_s = 0.0
        self._waits_since_s: float | None = None
        """Time at which the run began to wait for a pool of devices. None if it does not wait."""
        self._evaluates_in: str | None = None
        """The phase that an evaluation under way has interrupted. None: there is no evaluation."""

    @property
    def now(self) -> str:
        """The current phase. A wait for a device pool interrupts another phase for a time."""
        return self._doing if self._waits_since_s is None else POOL_WAIT

    def begin_session(self) -> None:
        """Note that a new session (process of the run) begins: a wait or an evaluation of the
        session before is over, and the phase that the evaluation interrupted is current again."""
        self._waits_since_s = None
        self._doing, self._evaluates_in = self._evaluates_in or self._doing, None

    def begin(self) -> None:
        """Begin the phase `controller`: no engine, reward, environment or trainer is at work."""
        self._doing = "controller"

    def turn(self, step: StepHistory, phase: str, now: float) -> None:
        """End the current phase at the time `now`, add it to `step`, and begin `phase`."""
        self._end(step, now)
        self._doing, self._since_s = phase, now

    def evaluate(self, step: StepHistory, now: float) -> None:
        """Begin an evaluation at time `now`, at first to ask for its pool of devices. It lasts
        until `span` is called with the evaluation's note (a log entry on a span of time)."""
        if self._evaluates_in is None:
            self._evaluates_in = self._doing
            self.turn(step, "evaluation", now)

    def span(self, step: StepHistory, note: Note) -> None:
        """Add the phases that a note (a log entry on a span of time) stands for. They interrupt the
        current phase, which goes on afterwards."""
        told_s = min(note.metrics.get(CALLBACK_SECONDS, 0.0), note.seconds)  # they came last
        if note.name == "evaluation" and self._evaluates_in is not None:  # it was begun
            self.turn(step, self._evaluates_in, note.time_s - told_s)
            self._evaluates_in, self._since_s = None, note.time_s
        elif note.name == POOL_SWITCH and self.now in WHILE_AWAY:
            return
        else:
            self._book(step, note, note.time_s - told_s)
        if told_s:
            step.phases.append(Phase("callbacks", note.time_s - told_s, note.time_s))

    def _book(self, step: StepHistory, note: Note, end_s: float) -> None:
        """Add to the step a phase named after the note (a log entry on a span of time), which ends
        at the time `end_s`. The current phase goes on after it."""
        start_s = note.time_s - note.seconds
        if note.name == POOL_SWITCH:
            since_s = self._since_s if self._waits_since_s is None else self._waits_since_s
            start_s = min(max(start_s, since_s), note.time_s)
        self._end(step, start_s)
        if self._waits_since_s is not None:
            self.end_wait(step, max(start_s, self._waits_since_s))
            self._waits_since_s = note.time_s
        self._since_s = max(self._since_s, note.time_s)
        step.phases.append(Phase(note.name, start_s, end_s))

    def wait(self, step: StepHistory, now: float) -> None:
        """Begin at time `now` to wait for a pool of devices that other jobs use too."""
        self._end(step, now)
        self._waits_since_s = now

    def end_wait(self, step: StepHistory, now: float, switch_s: float = 0.0) -> None:
        """End the wait for a device pool at time `now`, if there is one. Its last `switch_s`
        seconds are a phase of their own: parked processes woke up on the pool."""
        since_s, self._waits_since_s = self._waits_since_s, None
        if since_s is not None:
            woke_s = max(since_s, now - switch_s)
            spans = (POOL_WAIT, since_s, woke_s), (POOL_SWITCH, woke_s, now)
            step.phases += [Phase(*span) for span in spans if span[2] > span[1]]
            self._since_s = now

    def _end(self, step: StepHistory, now: float) -> None:
        was = self.now
        if was not in ("rollout", "controller", POOL_WAIT) and now > self._since_s:
            step.phases.append(Phase(was, self._since_s, now))
