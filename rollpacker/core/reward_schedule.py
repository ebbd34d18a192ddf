"""When each check starts, on which of a kind's workers, and how long it may run.

A kind of check is the `source` of its prompts. A kind with a number of workers runs so many checks
at a time and keeps the rest waiting; a check that nobody needs any more leaves the queue without
having run. A kind that is not configured has no bound: its checks start when their sample is
generated.

    ask -> Score at once, or wait -> (free, start_waiting) -> Score
                                  -> drop: never started
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollpacker.core.commands import Command, Score
from rollpacker.core.deadlines import AdaptiveDeadline, AdaptiveDeadlineConfig
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import PromptId, SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKindConfig:
    """One kind of check."""

    workers: int | None = None
    """Checks at a time. None: no bound."""
    deadline: AdaptiveDeadlineConfig | None = None
    """None: the reward's own limit holds."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScheduleConfig:
    """How checks are scheduled."""

    overlap: bool = True
    """Check a response while others are still generated. False: all of a round's together, when
    the last one is generated."""
    order: Literal["fifo", "closest"] = "fifo"
    """Who is next when a worker becomes free. "closest": the prompt that lacks the fewest verdicts,
    so that a race on verdicts completes prompts instead of beginning all of them."""
    kinds: Mapping[str, RewardKindConfig] = field(default_factory=dict)
    """By the source of the prompt."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RewardScheduleConfig:
        kinds = {}
        for name, kind in plain["kinds"].items():
            limit = kind["deadline"]
            deadline = None if limit is None else AdaptiveDeadlineConfig(**limit)
            kinds[name] = RewardKindConfig(workers=kind["workers"], deadline=deadline)
        return cls(overlap=plain["overlap"], order=plain["order"], kinds=kinds)


class _Kind:
    __slots__ = ("by_prompt", "deadline", "dropped", "num_free", "queue")

    def __init__(self, config: RewardKindConfig) -> None:
        self.num_free = config.workers
        """None: no bound."""
        self.deadline = None if config.deadline is None else AdaptiveDeadline(config.deadline)
        self.queue: deque[SampleId] = deque()
        """First come, first served ..."""
        self.by_prompt: dict[PromptId, deque[SampleId]] = {}
        """... or by prompt, if the order is "closest"."""
        self.dropped: set[SampleId] = set()
        """Still in the queue, but not needed any more."""


_UNBOUND = RewardKindConfig()
_NOT_RUNNING = True


class RewardSchedule:
    """The checks that run and those that wait, over rounds: a slow one may outlive its round."""

    def __init__(self, config: RewardScheduleConfig) -> None:
        self.config = config
        self.running: dict[SampleId, bool | None] = {}
        """Handed over, verdict awaited, in order."""
        self.num_waiting = 0
        """In all queues, dropped ones that nobody has looked at since included."""
        self._kinds: dict[str, _Kind] = {}
        self._closest = config.order == "closest"

    def ask(self, sample: SampleId) -> list[Command]:
        """The sample needs a verdict: start the check, or let it wait for a worker."""
        source = sample[0][0]
        kind = self._kinds.get(source) or self._add_kind(source)
        if kind.num_free is None or kind.num_free > 0:
            return [self._start(kind, sample)]
        self.num_waiting += 1
        if self._closest:
            kind.by_prompt.setdefault(sample.prompt, deque()).append(sample)
        else:
            kind.queue.append(sample)
        return []

    def free(self, event: SampleScored) -> bool:
        """A verdict came: its worker is free, and the deadline learns. False if the sample was
        never handed over."""
        sample = event.sample
        if self.running.pop(sample, _NOT_RUNNING):
            return False
        kind = self._kinds[sample[0][0]]
        if kind.num_free is not None:
            kind.num_free += 1
        seconds, deadline = event.seconds, kind.deadline
        if deadline is not None and seconds is not None:
            deadline.observe(seconds, correct=event.value is not None and event.value > 0)
        return True

    def start_waiting(self, source: str, missing: Callable[[PromptId], int]) -> list[Command]:
        """Start as many waiting checks of this kind as there are free workers. `missing` tells how
        many verdicts a prompt still lacks."""
        kind = self._kinds[source]
        commands: list[Command] = []
        if not (kind.queue or kind.by_prompt):
            return commands
        while kind.num_free:
            sample = self._next_closest(kind, missing) if self._closest else self._next(kind)
            if sample is None:
                break
            commands.append(self._start(kind, sample))
        return commands

    def drop(self, samples: Iterable[SampleId]) -> None:
        """Nobody needs these verdicts any more. Checks under way go on."""
        for sample in samples:
            if sample in self.running:
                continue
            kind = self._kinds[sample.prompt.source]
            if self._closest:
                self.num_waiting -= len(kind.by_prompt.pop(sample.prompt, ()))
            else:
                kind.dropped.add(sample)

    def timeout_s(self, source: str) -> float | None:
        """The deadline in force for this kind."""
        kind = self._kinds.get(source)
        return None if kind is None or kind.deadline is None else kind.deadline.timeout_s

    def state(self) -> dict[str, Any]:
        """Deadlines; checks under way are nobody's after a restart."""
        return {
            source: kind.deadline.state()
            for source, kind in sorted(self._kinds.items())
            if kind.deadline is not None
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for source, learnt in state.items():
            deadline = self._add_kind(source).deadline
            if deadline is not None:
                deadline.restore(learnt)

    def _add_kind(self, source: str) -> _Kind:
        kind = self._kinds[source] = _Kind(self.config.kinds.get(source, _UNBOUND))
        return kind

    def _start(self, kind: _Kind, sample: SampleId) -> Score:
        self.running[sample] = None
        if kind.num_free is not None:
            kind.num_free -= 1
        deadline = kind.deadline
        return Score(sample=sample, timeout_s=None if deadline is None else deadline.timeout_s)

    def _next(self, kind: _Kind) -> SampleId | None:
        while kind.queue:
            sample = kind.queue.popleft()
            self.num_waiting -= 1
            if sample not in kind.dropped:
                return sample
            kind.dropped.remove(sample)
        return None

    def _next_closest(self, kind: _Kind, missing: Callable[[PromptId], int]) -> SampleId | None:
        if not kind.by_prompt:
            return None
        prompt = min(kind.by_prompt, key=missing)  # the first of several: arrival breaks ties
        waiting = kind.by_prompt[prompt]
        sample = waiting.popleft()
        self.num_waiting -= 1
        if not waiting:
            del kind.by_prompt[prompt]
        return sample
