"""Follows conversations of samples with environments. A sample *acts* while its environment works
on an answer: it is then in no engine, and may come back to one."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.core.commands import LIMITS, Act, CancelAct, Conclude, Continue
from rollpacker.core.events import Acted
from rollpacker.core.ids import SampleId
from rollpacker.report.step_history import End, Outcome, SampleHistory, StepHistory

ENVIRONMENT = "environment"
"""Name of the phase, and of the cause of time, in which engines are empty because all samples await
answers of environments."""
Samples = dict[SampleId, SampleHistory]


@dataclass(slots=True)
class _Episode:
    """The conversation of one sample with its environment, so far."""

    turns: int = 0
    """Number of the model's messages (turns) that were generated."""
    begun_s: float | None = None
    """Time at which the model's current message began. None: it is the first message, which begins
    with the launch."""
    policy_s: float = 0.0
    asked_s: float = 0.0
    """Time at which the environment was last asked for an answer."""
    environment_s: float = 0.0

    def drawn(self, sample: SampleHistory | None) -> None:
        """Note that an engine has finished a message of the model. `sample`: the conversation's
        record in the step; None: there is none, so the seconds of the message are not counted."""
        self.turns += 1
        if sample is not None and sample.end_s is not None:
            begun_s = sample.start_s if self.begun_s is None else self.begun_s
            self.policy_s += max(0.0, sample.end_s - begun_s)


class TurnBook:
    """Follows samples that converse with environments, while `History` reads a log: the seconds of
    their turns, and how they end."""

    def __init__(self) -> None:
        self.acting: set[SampleId] = set()
        self._episodes: dict[SampleId, _Episode] = {}
        self._step: StepHistory | None = None

    def take(self, command: Act | CancelAct | Conclude, step: StepHistory, now: float) -> None:
        """Read a command about samples that converse with environments, given at the time `now`."""
        match command:
            case Act():
                self._act(command, step, now)
            case CancelAct():
                self._cancel(command, step.samples)
            case Conclude():
                self._conclude(command, step)

    def _of(self, sample: SampleId, step: StepHistory) -> _Episode:
        if step is not self._step:  # no episode goes on in another step
            self._episodes.clear()
            self._step = step
        return self._episodes.setdefault(sample, _Episode())

    def _act(self, command: Act, step: StepHistory, now: float) -> None:
        self.acting.add(command.sample)
        found = step.samples.get(command.sample)
        episode = self._of(command.sample, step)
        episode.asked_s = now
        if command.turn > episode.turns:
            episode.drawn(found)
        if found is not None:
            found.end, found.outcome = End.FINISHED, Outcome.UNUSED

    def acted(self, event: Acted, step: StepHistory, now: float) -> None:
        """Note, as `event` tells, that an environment has answered or failed, at time `now`."""
        self.acting.discard(event.sample)
        if event.cause == "cancelled":
            return
        if event.cause:
            step.episodes.lose(event)
            step.prompts.lose(event.sample, event.reason)
            found = step.samples.get(event.sample)
            if found is not None:
                found.end, found.outcome = End.FAILED, Outcome.FAILED
            return
        episode = self._of(event.sample, step)
        seconds = event.seconds or 0.0
        episode.environment_s += seconds
        waited_s = max(0.0, now - episode.asked_s - seconds)
        step.episodes.answered(event.sample, event.turn, seconds, waited_s, event.calls)

    def _cancel(self, command: CancelAct, samples: Samples) -> None:
        """Note that the samples in `command` were cancelled. Only those that await an environment
        end by this; an engine reports the end of its samples itself."""
        for sample in self.acting.intersection(command.samples):
            self.acting.discard(sample)
            if sample in samples:
                samples[sample].end, samples[sample].outcome = End.STOPPED, Outcome.SURPLUS

    def _conclude(self, command: Conclude, step: StepHistory) -> None:
        """Note how a conversation ended: by a limit (on tokens, turns or seconds), or by itself."""
        found = step.samples.get(command.sample)
        episode = self._of(command.sample, step)
        if found is not None and found.end is End.AT_LIMIT:
            episode.drawn(found)  # a message that was cut off, which no environment was given
        step.episodes.conclude(
            command.reason, episode.turns, episode.policy_s, episode.environment_s
        )
        del self._episodes[command.sample]
        if found is not None:
            found.end = End.AT_LIMIT if command.reason in LIMITS else End.FINISHED

    def go_on(self, command: Continue, step: StepHistory, now: float) -> None:
        """Note that the samples in `command` are in an engine again at time `now`, for their next
        message. The end of the message before was not theirs."""
        samples, round_ = step.samples, step.rounds[-1]
        back = {sample for sample in command.samples if sample in samples}
        for sample in command.samples:
            self._of(sample, step).begun_s = now
        round_.ends[:] = [one for one in round_.ends if one.sample not in back]
        for sample in back:
            samples[sample].end = samples[sample].end_s = None
        round_.end_s = None
