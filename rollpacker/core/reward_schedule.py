"""When each check starts, on which of a kind's workers, and how long it may run.

A kind of check is the `source` of its prompts. A kind with a number of workers runs so many checks
at a time and keeps the rest waiting; a check that nobody needs any more leaves the queue without
having run, or is cancelled. A kind that is not configured has no bound: its checks start when their
sample is generated.

    ask -> Score at once, or wait -> (free, start_waiting) -> Score
                                  -> drop: never started
    Score -> free -> the verdict counts
                  -> ask_again: the machinery failed, Score once more
          -> drop: CancelScore, then free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollpacker.core.commands import CancelScore, Command, Score
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
    order: Literal["fifo", "closest", "longest"] = "fifo"
    """Who is next when a worker becomes free. "closest": the prompt that lacks the fewest verdicts,
    so that a race on verdicts completes prompts instead of beginning all of them. "longest": the
    check that is expected to take longest, so that it does not end up last and alone; expected is
    what the longest check of the same prompt took, before that the kind's mean, and among equals
    the longest response comes first."""
    cancel: bool = True
    """End checks that run for samples which are not needed any more, so that their workers are
    free."""
    max_retries: int = 1
    """How often a check is asked for again when the machinery failed (not the response); then there
    is no verdict."""
    kinds: Mapping[str, RewardKindConfig] = field(default_factory=dict)
    """By the source of the prompt."""

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must not be negative, not {self.max_retries}")


class _Kind:
    __slots__ = (
        *("by_prompt", "deadline", "dropped", "longest_s", "num_free", "num_seen", "queue"),
        "total_s",
    )

    def __init__(self, config: RewardKindConfig) -> None:
        self.num_free = config.workers
        """None: no bound."""
        self.deadline = None if config.deadline is None else AdaptiveDeadline(config.deadline)
        self.queue: deque[SampleId] = deque()
        """First come, first served ..."""
        self.by_prompt: dict[PromptId, deque[SampleId]] = {}
        """... or by prompt, in the other orders."""
        self.dropped: set[SampleId] = set()
        """Still in the queue, but not needed any more."""
        self.longest_s: dict[PromptId, float] = {}
        """Longest check so far of each prompt of this round."""
        self.num_seen = 0
        self.total_s = 0.0
        """Checks that ended, and their seconds."""

    def observe(self, event: SampleScored) -> None:
        """A check ended by itself; learn from how long it took."""
        seconds = event.seconds
        if seconds is None or event.cause:
            return
        prompt = event.sample[0]
        self.num_seen += 1
        self.total_s += seconds
        self.longest_s[prompt] = max(seconds, self.longest_s.get(prompt, 0.0))
        if self.deadline is not None:
            correct = event.correct
            if correct is None:
                correct = event.value is not None and event.value > 0
            self.deadline.observe(seconds, correct=correct and not event.timed_out)

    def expected_s(self, prompt: PromptId) -> float:
        mean = self.total_s / self.num_seen if self.num_seen else 0.0
        return self.longest_s.get(prompt, mean)


_UNBOUND = RewardKindConfig()
_NOT_RUNNING = -1


class RewardSchedule:
    """The checks that run and those that wait, over rounds: a slow one may outlive its round."""

    def __init__(self, config: RewardScheduleConfig) -> None:
        self.config = config
        self.running: dict[SampleId, int] = {}
        """Handed over, verdict awaited, in order; how often they were handed over before."""
        self.num_waiting = 0
        """In all queues, dropped ones that nobody has looked at since included."""
        self._kinds: dict[str, _Kind] = {}
        self._by_prompt = config.order != "fifo"
        self._longest = config.order == "longest"
        self._cancelled: set[SampleId] = set()
        """Running, and not needed any more."""
        self._tokens: dict[SampleId, int] = {}
        """Length of each waiting response, where the order goes by it."""

    def begin_round(self) -> None:
        """Forget what was learnt of the last round's prompts."""
        for kind in self._kinds.values():
            kind.longest_s.clear()

    def ask(self, sample: SampleId, num_tokens: int = 0) -> list[Command]:
        """The sample, a response of so many tokens, needs a verdict: start the check, or let it
        wait for a worker."""
        source = sample[0][0]
        kind = self._kinds.get(source) or self._add_kind(source)
        if kind.num_free is None or kind.num_free > 0:
            return [self._start(kind, sample)]
        self.num_waiting += 1
        if self._longest:
            self._tokens[sample] = num_tokens
        if self._by_prompt:
            kind.by_prompt.setdefault(sample.prompt, deque()).append(sample)
        else:
            kind.queue.append(sample)
        return []

    def free(self, event: SampleScored) -> int | None:
        """A verdict came: its worker is free, and the deadline learns. How often the check had been
        handed over before, or None if it was not handed over at all."""
        sample = event.sample
        retry = self.running.pop(sample, _NOT_RUNNING)
        if retry == _NOT_RUNNING:
            return None
        kind = self._kinds[sample[0][0]]
        if kind.num_free is not None:
            kind.num_free += 1
        self._cancelled.discard(sample)
        kind.observe(event)
        return retry

    def may_ask_again(self, event: SampleScored, retry: int) -> bool:
        """Whether the machinery failed, rather than the response, and may get another try."""
        return event.cause == "infrastructure" and retry < self.config.max_retries

    def ask_again(self, sample: SampleId, retry: int) -> Command:
        """The check once more, at once: its worker has just become free."""
        return self._start(self._kinds[sample[0][0]], sample, retry + 1)

    def start_waiting(self, source: str, missing: Callable[[PromptId], int]) -> list[Command]:
        """Start as many waiting checks of this kind as there are free workers. `missing` tells how
        many verdicts a prompt still lacks."""
        kind = self._kinds[source]
        commands: list[Command] = []
        if not (kind.queue or kind.by_prompt):
            return commands
        while kind.num_free:
            sample = self._next_of_prompts(kind, missing) if self._by_prompt else self._next(kind)
            if sample is None:
                break
            commands.append(self._start(kind, sample))
        return commands

    def drop(self, samples: Iterable[SampleId]) -> list[Command]:
        """Nobody needs these verdicts any more. Checks under way are cancelled."""
        to_cancel = []
        for sample in samples:
            if sample in self.running:
                if self.config.cancel and sample not in self._cancelled:
                    self._cancelled.add(sample)
                    to_cancel.append(sample)
            elif self._by_prompt:
                self._leave_queue(sample)
            else:
                self._kinds[sample.prompt.source].dropped.add(sample)
        return [CancelScore(samples=tuple(to_cancel))] if to_cancel else []

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

    def _start(self, kind: _Kind, sample: SampleId, retry: int = 0) -> Score:
        self.running[sample] = retry
        if kind.num_free is not None:
            kind.num_free -= 1
        deadline = kind.deadline
        timeout_s = None if deadline is None else deadline.timeout_s
        return Score(sample=sample, timeout_s=timeout_s, retry=retry)

    def _next(self, kind: _Kind) -> SampleId | None:
        while kind.queue:
            sample = kind.queue.popleft()
            self.num_waiting -= 1
            if sample not in kind.dropped:
                return sample
            kind.dropped.remove(sample)
        return None

    def _next_of_prompts(self, kind: _Kind, missing: Callable[[PromptId], int]) -> SampleId | None:
        if not kind.by_prompt:
            return None
        # The first of several: arrival breaks ties.
        if self._longest:
            prompt = max(kind.by_prompt, key=lambda prompt: self._expected(kind, prompt))
        else:
            prompt = min(kind.by_prompt, key=missing)
        sample = kind.by_prompt[prompt][0]
        if self._longest:
            sample = max(kind.by_prompt[prompt], key=self._tokens.__getitem__)
        self._leave_queue(sample)
        return sample

    def _expected(self, kind: _Kind, prompt: PromptId) -> tuple[float, int]:
        return kind.expected_s(prompt), max(map(self._tokens.__getitem__, kind.by_prompt[prompt]))

    def _leave_queue(self, sample: SampleId) -> None:
        """Of an order by prompts."""
        by_prompt = self._kinds[sample.prompt.source].by_prompt
        waiting = by_prompt[sample.prompt]
        waiting.remove(sample)
        self._tokens.pop(sample, None)
        self.num_waiting -= 1
        if not waiting:
            del by_prompt[sample.prompt]
