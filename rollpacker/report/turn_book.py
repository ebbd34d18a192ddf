"""Whose turn it is, where samples take turns with environments: a sample that acts is in no engine,
and may come back."""

from __future__ import annotations

from rollpacker.core.commands import LIMITS, Act, CancelAct, Conclude, Continue
from rollpacker.core.events import Acted
from rollpacker.core.ids import SampleId
from rollpacker.report.step_history import End, Outcome, RoundHistory, SampleHistory

ENVIRONMENT = "environment"
"""The phase, and the cause of time, in which the engine is empty because environments have the
turn."""
Samples = dict[SampleId, SampleHistory]


class TurnBook:
    """Which samples act, and how their trajectories end."""

    def __init__(self) -> None:
        self.acting: set[SampleId] = set()

    def take(self, command: Act | CancelAct | Conclude, samples: Samples) -> None:
        """What the core says of them."""
        match command:
            case Act():
                self._act(command, samples)
            case CancelAct():
                self._cancel(command, samples)
            case Conclude():
                self._conclude(command, samples)

    def _act(self, command: Act, samples: Samples) -> None:
        """The environment has the turn; once more, if its episode was lost."""
        self.acting.add(command.sample)
        found = samples.get(command.sample)
        if found is not None:
            found.end, found.outcome = End.FINISHED, Outcome.UNUSED

    def acted(self, event: Acted, samples: Samples) -> None:
        """It has answered, or will not."""
        self.acting.discard(event.sample)
        found = samples.get(event.sample)
        if found is not None and event.cause not in ("", "cancelled"):
            found.end, found.outcome = End.FAILED, Outcome.FAILED

    def _cancel(self, command: CancelAct, samples: Samples) -> None:
        """Nobody needs these; one that an engine has says itself that it was stopped."""
        for sample in self.acting.intersection(command.samples):
            self.acting.discard(sample)
            if sample in samples:
                samples[sample].end, samples[sample].outcome = End.STOPPED, Outcome.SURPLUS

    def _conclude(self, command: Conclude, samples: Samples) -> None:
        """How a trajectory ended, which its last turn alone does not tell."""
        found = samples.get(command.sample)
        if found is not None:
            found.end = End.AT_LIMIT if command.reason in LIMITS else End.FINISHED

    def go_on(self, command: Continue, samples: Samples, round_: RoundHistory) -> None:
        """These are generated further: what looked like their end was that of a turn."""
        back = {sample for sample in command.samples if sample in samples}
        round_.ends[:] = [one for one in round_.ends if one.sample not in back]
        for sample in back:
            samples[sample].end = samples[sample].end_s = None
        round_.end_s = None
