"""Prompts of the next step that are begun early, in slots that the round under way leaves empty.

Which prompts the next step begins with is fixed before anything is known of their lengths: they are
the first that were fetched, and nobody selects among them. What they have when the round is over is
kept, and counts as tokens of an earlier launch: the next weights draw them again, with the same
random numbers, and keep those before the first that differs. So nothing of a response depends on
how early it was begun.

    a sample of the round ends -> begin     slots are empty: `Launch` of further prompts
    the last one has ended     -> stop      `Abort` of those under way, and `Defer`
    the round is closed        -> take      the prompts, with what each response has
"""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.core.commands import Abort, Command, Defer, Launch, RoundKind
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.lifecycle import SampleState, check
from rollpacker.core.rounds.groups import UNDER_WAY, Group, RoundPlan, Waiting


class Ahead:
    """State machine of the prompts that are begun during one round at a time."""

    def __init__(self, look_ahead: float, num_samples: int) -> None:
        """`look_ahead`: share of the responses that a round began with which is kept under way.
        `num_samples`: number of samples per prompt."""
        self._look_ahead = look_ahead
        self._num_samples = num_samples
        self._groups: dict[PromptId, Group] = {}
        self._is_stopped = False
        self.num_under_way = 0
        """Number of samples begun early that have not ended."""

    def has(self, sample: SampleId) -> bool:
        """Whether this sample was begun early during the round under way."""
        group = self._groups.get(sample.prompt)
        return group is not None and group.attempt == sample.attempt

    def begin(
        self, plan: RoundPlan, num_begun: int, num_under_way: int, fresh: Sequence[Waiting]
    ) -> list[Command]:
        """Begins as many prompts of `fresh` as slots stand empty for, each once. The round of this
        `plan` began with `num_begun` samples, of which `num_under_way` have not ended."""
        free = int(self._look_ahead * num_begun) - num_under_way - self.num_under_way
        samples: list[SampleId] = []
        for waiting in fresh:
            if len(samples) + self._num_samples > free:
                break
            if not waiting.attempt and waiting.prompt not in self._groups:
                group = self._groups[waiting.prompt] = Group(waiting, None, None)
                launched = check(SampleState.PLANNED, SampleState.LAUNCHED)
                samples += group.add(self._num_samples, launched)
        if not samples:
            return []
        self.num_under_way += len(samples)
        launch = Launch(
            round=plan.number,
            kind=RoundKind.AHEAD,
            samples=tuple(samples),
            version=plan.version,
            tensor_parallel=plan.tensor_parallel,
            speculate=plan.speculate,
        )
        return [launch]

    def on_ended(self, event: SampleGenerated | SampleAborted | SampleFailed) -> None:
        """Records the end of a sample that was begun early."""
        group, index = self._groups[event.sample.prompt], event.sample.index
        assert group.lengths[index] == UNDER_WAY, f"{event.sample} ended twice"
        self.num_under_way -= 1
        if isinstance(event, SampleFailed):
            group.lengths[index] = 0
            group.states[index] = check(SampleState.LAUNCHED, SampleState.FAILED)
            return
        group.lengths[index] = event.num_tokens
        if isinstance(event, SampleGenerated):
            group.whole[index] = True
            group.states[index] = check(SampleState.LAUNCHED, SampleState.GENERATED)

    def stop(self) -> list[Command]:
        """Stops the samples that are under way, once, since the round's own have all ended."""
        if self._is_stopped or not self._groups:
            return []
        self._is_stopped = True
        running = [
            sample
            for group in self._groups.values()
            for sample, length in zip(group.samples, group.lengths, strict=True)
            if length == UNDER_WAY
        ]
        abort: list[Command] = [Abort(samples=tuple(running))] if running else []
        return [*abort, Defer(prompts=tuple(self._groups))]

    def take(self, fresh: Sequence[Waiting]) -> list[Waiting]:
        """Returns `fresh`, in which the prompts that were begun have what they have, and forgets
        them: the round is closed."""
        begun = {
            prompt: Waiting(prompt, group.attempt + 1, group.to_carry())
            for prompt, group in self._groups.items()
        }
        self._groups, self._is_stopped = {}, False
        return [begun.get(one.prompt, one) for one in fresh]

    def waiting_for(self) -> str:
        """What the round waits for, in words, once it is over but for these samples."""
        return f"{self.num_under_way} responses begun early to be stopped by the engine"
