"""Schedule of reward checks and environments' answers: when each starts, how long it may take.

Checks or answers for prompts of one `source` are of one kind. A kind with a number of workers runs
so many at a time and keeps the rest waiting. A kind that is not configured has no bound: its checks
or answers start when they are asked for.

`ask` starts a check or answer, or makes it wait until `free` (the end of another) and
`start_waiting` bring its turn. `ask_again` repeats one whose machinery failed. `forget` is for
those that nobody needs any more: a waiting one never starts, and a running one is to be cancelled,
but keeps its worker until `free`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from rollpacker.bounds import check_at_least
from rollpacker.core.checks.deadlines import AdaptiveDeadline, AdaptiveDeadlineConfig
from rollpacker.core.checks.prompt_queue import PromptQueue
from rollpacker.core.commands import Command
from rollpacker.core.ids import PromptId, SampleId

Order = Literal["fifo", "closest", "longest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindConfig:
    """Limits of one kind of reward check, or of one kind of environments' answers."""

    workers: int | None = None
    """Number of checks or answers that run at a time. None: no bound."""
    deadline: AdaptiveDeadlineConfig | None = None
    """Least and greatest time limit, between which it follows the longest right answer so far.
    None: the reward function's or environment's own time limit applies."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "workers")


class Ended(Protocol):
    """Interface of an event that ends a reward check or an environment's answer."""

    @property
    def sample(self) -> SampleId: ...

    @property
    def seconds(self) -> float | None: ...

    @property
    def cause(self) -> str: ...


E = TypeVar("E", bound=Ended)


class _Kind:
    __slots__ = (
        *("by_prompt", "deadline", "dropped", "num_free", "num_seen", "queue", "ranks", "total_s"),
    )

    def __init__(self, config: KindConfig) -> None:
        self.num_free = config.workers
        """Number of workers of this kind that are free. None: their number is not bounded."""
        self.deadline = None if config.deadline is None else AdaptiveDeadline(config.deadline)
        self.queue: deque[SampleId] = deque()
        """Samples that wait for a worker, the oldest first. It is used with the order "fifo" alone;
        with the others they wait in `by_prompt`."""
        self.by_prompt = PromptQueue()
        """Samples that wait for a worker, by prompt. It is used with every order but "fifo"."""
        self.dropped: set[SampleId] = set()
        """Samples in `queue` whose check or answer is not needed any more; they are skipped."""
        self.ranks: dict[PromptId, float] = {}
        """Minus the seconds of the longest check or answer so far of each prompt of this round: the
        longest comes first. Empty unless the order is "longest"."""
        self.num_seen = 0
        """Number of checks or answers that ended by themselves. 0 unless the order is "longest"."""
        self.total_s = 0.0
        """Seconds that the checks or answers counted in `num_seen` took together."""

    def saw(self, prompt: PromptId, seconds: float) -> None:
        """Records the seconds of a reward check, or environment's answer, that did not fail."""
        self.num_seen += 1
        self.total_s += seconds
        self.ranks[prompt] = min(-seconds, self.ranks.get(prompt, 0.0))

    @property
    def mean_s(self) -> float:
        """Mean seconds of checks or answers that did not fail; 0 before there is one."""
        return self.total_s / self.num_seen if self.num_seen else 0.0


_UNBOUND = KindConfig()


class Schedule(Generic[E]):
    """Reward checks, or environments' answers, that run or wait for a worker. A sample has at most
    one check or answer at a time, which may run on after the sample's round is over."""

    def __init__(
        self,
        kinds: Mapping[str, KindConfig],
        *,
        order: Order,
        max_retries: int,
        say: Callable[..., Command],
        is_right: Callable[[E], bool],
    ) -> None:
        """`say(sample=, timeout_s=, retry=)` makes the command that starts a reward check or
        environment's answer, which was started `retry` times before. `is_right` returns whether an
        event that is no failure was right; only then can its seconds raise the time limit."""
        self.running: dict[SampleId, int] = {}
        """Samples whose reward check or environment's answer runs, in order of starting, each with
        the number of times that it was started before."""
        self.num_waiting = 0
        """Number of checks or answers in all queues; unneeded ones may be among them."""
        self._configs = kinds
        self.max_retries = max_retries
        """How often a reward check or environment's answer is started again at most because a
        worker or an endpoint failed (cause "infrastructure"), rather than the response."""
        self._say = say
        self._is_right = is_right
        self._kinds: dict[str, _Kind] = {}
        self._by_prompt = order != "fifo"
        self._longest = order == "longest"
        self._cancelled: set[SampleId] = set()
        """Samples whose reward check or environment's answer runs on although nobody needs it."""

    def begin_round(self) -> None:
        """Forgets how long checks or environments' answers took for the last round's prompts."""
        for kind in self._kinds.values():
            kind.ranks.clear()
            kind.by_prompt.look_at_all()

    def ask(self, sample: SampleId, num_tokens: int = 0) -> list[Command]:
        """Command that starts the sample's reward check or environment's answer; none if it must
        wait for a worker. `num_tokens`: the sample's length, for the order of those that wait."""
        source = sample.prompt.source
        kind = self._kinds.get(source) or self._add_kind(source)
        if kind.num_free is None or kind.num_free > 0:
            return [self._start(kind, sample)]
        self.num_waiting += 1
        if self._by_prompt:
            kind.by_prompt.add(sample, num_tokens if self._longest else 0)
        else:
            kind.queue.append(sample)
        return []

    def free(self, event: E) -> int | None:
        """Records the end of a reward check or environment's answer: its worker is free, and the
        time limit adapts. Returns how often it was started before. None: it was not running."""
        sample = event.sample
        retry = self.running.pop(sample, None)
        if retry is None:
            return None
        prompt = sample.prompt
        kind = self._kinds[prompt.source]
        if kind.num_free is not None:
            kind.num_free += 1
        if self._cancelled:
            self._cancelled.discard(sample)
        if self._by_prompt:
            kind.by_prompt.look_again(prompt)
        seconds = event.seconds
        if seconds is not None and not event.cause:  # it ended by itself
            if self._longest:
                kind.saw(prompt, seconds)
            deadline = kind.deadline
            # Only what is longer than all right ones before can change the deadline.
            if deadline is not None and (deadline.anchor_s is None or seconds > deadline.anchor_s):
                deadline.observe(seconds, correct=self._is_right(event))
        return retry

    def look_again(self, prompt: PromptId) -> None:
        """Have the prompt's waiting samples put in order again by `start_waiting`, because the
        prompt needs fewer further samples than before."""
        kind = self._kinds.get(prompt.source)
        if kind is not None:
            kind.by_prompt.look_again(prompt)

    def ask_again(self, sample: SampleId, retry: int) -> Command:
        """Command that starts a failed reward check or environment's answer again on its worker.
        `retry`: how often it had been started before it failed, as `free` returned it."""
        return self._start(self._kinds[sample.prompt.source], sample, retry + 1)

    def start_waiting(self, source: str, missing: Callable[[PromptId], int]) -> list[Command]:
        """Commands that start waiting reward checks or environments' answers of this source, as
        many as workers are free. `missing` returns how many samples a prompt still needs, and is
        asked anew as that changes."""
        kind = self._kinds[source]
        commands: list[Command] = []
        waiting = kind.by_prompt if self._by_prompt else kind.queue
        while kind.num_free and waiting:
            if self._longest:
                sample = kind.by_prompt.pop(kind.ranks.get, -kind.mean_s)
            elif self._by_prompt:
                sample = kind.by_prompt.pop(missing, 0.0)
            else:
                sample = kind.queue.popleft()
            self.num_waiting -= 1
            if sample in kind.dropped:
                kind.dropped.remove(sample)
                continue
            commands.append(self._start(kind, sample))
        return commands

    def forget(self, samples: Iterable[SampleId]) -> list[SampleId]:
        """Drops the reward checks or environments' answers of samples that nobody needs any more.
        Returns those of the samples whose check or answer runs and must be cancelled."""
        running = []
        for sample in samples:
            if sample in self.running:
                if sample not in self._cancelled:
                    self._cancelled.add(sample)
                    running.append(sample)
            elif self._by_prompt:
                self._kinds[sample.prompt.source].by_prompt.remove(sample)
                self.num_waiting -= 1
            else:
                self._kinds[sample.prompt.source].dropped.add(sample)
        return running

    def timeout_s(self, source: str) -> float | None:
        """Time limit, in seconds, of checks or answers for this source. None: there is none."""
        kind = self._kinds.get(source)
        return None if kind is None or kind.deadline is None else kind.deadline.timeout_s

    def state(self) -> dict[str, Any]:
        """Time limits by source and what they follow from, for a checkpoint. Checks and answers
        that run or wait are not in it."""
        return {
            source: {"anchor_s": kind.deadline.anchor_s}
            for source, kind in sorted(self._kinds.items())
            if kind.deadline is not None
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for source, learnt in state.items():
            deadline = self._add_kind(source).deadline
            if deadline is not None:
                deadline.set_anchor(learnt["anchor_s"])

    def _add_kind(self, source: str) -> _Kind:
        kind = self._kinds[source] = _Kind(self._configs.get(source, _UNBOUND))
        return kind

    def _start(self, kind: _Kind, sample: SampleId, retry: int = 0) -> Command:
        self.running[sample] = retry
        if kind.num_free is not None:
            kind.num_free -= 1
        deadline = kind.deadline
        timeout_s = None if deadline is None else deadline.timeout_s
        return self._say(sample=sample, timeout_s=timeout_s, retry=retry)
