"""How the checks of a step went (a check is the execution of a reward on one response), by kind:
seconds, waits, deadline, timeouts, failures, and the ten slowest with their samples. The kind of a
check is the data source of its prompt."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker.core.commands import Score
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import SampleId
from rollpacker.report.step_history import StepChecks, StepHistory, Verdict

NUM_SLOWEST = 10

Value = float | int | str


class CheckBook:
    """Follows the checks of responses that are under way, while `History` reads a log."""

    def __init__(self) -> None:
        self._asked: dict[SampleId, tuple[float, float]] = {}
        """Start time of each sample's check, and the seconds from the response's end to it."""

    def begin_session(self) -> None:
        """Forget all checks that are under way: the process that asked for them is gone."""
        self._asked.clear()

    def ask(self, command: Score, step: StepHistory, now: float) -> None:
        """Note that `command` begins the check of a sample of `step` at `now` (seconds)."""
        step.checks.asked.append(command)
        queue_s = 0.0
        if not command.retry:
            sample = step.samples.get(command.sample)
            if sample is not None and sample.end_s is not None:
                queue_s = max(0.0, now - sample.end_s)
        self._asked[command.sample] = (now, queue_s)

    def scored(self, event: SampleScored, step: StepHistory, now: float) -> None:
        """Note at time `now` that a check has ended, for the step and for the sample."""
        asked_s, queue_s = self._asked.pop(event.sample, (None, 0.0))
        verdict = Verdict(event, now, asked_s, queue_s)
        step.checks.verdicts.append(verdict)
        if event.value is None and event.cause != "cancelled":
            step.prompts.lose(event.sample, event.reason)
        sample = step.samples.get(event.sample)
        if sample is not None:
            sample.verdict = verdict


@dataclass(slots=True)
class KindChecks:
    """Counts and seconds of the checks of one kind (data source) in one step, or in several."""

    num_checks: int = 0
    """Number of checks that ended with a verdict or failed. Cancelled checks do not count."""
    total_s: float = 0.0
    """Sum of the seconds that the checks took to execute."""
    longest_s: float = 0.0
    queue_s: float = 0.0
    """Sum of the seconds from the end of each response to the start of its check."""
    longest_queue_s: float = 0.0
    deadline_s: float | None = None
    """Deadline in seconds that the last check of this kind was given. None: it was given none, so
    that only the reward function's own limit holds."""
    num_timed_out: int = 0
    """Number of checks that reached the deadline; their responses count as wrong."""
    num_retries: int = 0
    """Number of checks that were tried again, since the machinery of the reward had failed."""
    num_cancelled: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Number of checks that gave no verdict, by cause, including checks that were tried again."""
    slowest: list[tuple[float, str]] = field(default_factory=list)
    """The slowest checks as pairs (seconds, sample id), slowest first."""

    def add(self, other: KindChecks) -> None:
        """Add the checks of another step to these counts."""
        self.num_checks += other.num_checks
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)
        self.queue_s += other.queue_s
        self.longest_queue_s = max(self.longest_queue_s, other.longest_queue_s)
        self.deadline_s = self.deadline_s if other.deadline_s is None else other.deadline_s
        self.num_timed_out += other.num_timed_out
        self.num_retries += other.num_retries
        self.num_cancelled += other.num_cancelled
        self.failed.update(other.failed)
        self.slowest = sorted(self.slowest + other.slowest, key=_slowest_first)[:NUM_SLOWEST]

    @property
    def mean_s(self) -> float | None:
        return self.total_s / self.num_checks if self.num_checks else None

    @property
    def mean_queue_s(self) -> float | None:
        return self.queue_s / self.num_checks if self.num_checks else None

    def plain(self) -> dict[str, object]:
        """The counts and mean seconds, as a mapping that `summary.json` can hold."""
        return {
            "checks": self.num_checks,
            "mean_s": self.mean_s,
            "longest_s": self.longest_s,
            "mean_queue_s": self.mean_queue_s,
            "longest_queue_s": self.longest_queue_s,
            "deadline_s": self.deadline_s,
            "timed_out": self.num_timed_out,
            "retries": self.num_retries,
            "cancelled": self.num_cancelled,
            "failed": dict(sorted(self.failed.items())),
            "slowest": [{"sample": sample, "seconds": seconds} for seconds, sample in self.slowest],
        }


def _slowest_first(entry: tuple[float, str]) -> tuple[float, str]:
    return -entry[0], entry[1]


def step_checks(checks: StepChecks) -> dict[str, KindChecks]:
    """Counts and seconds of the checks of one step, by kind (data source)."""
    kinds: defaultdict[str, KindChecks] = defaultdict(KindChecks)
    seconds: defaultdict[str, list[tuple[float, SampleId]]] = defaultdict(list)
    for command in checks.asked:
        kind = kinds[command.sample.prompt.source]
        kind.deadline_s = command.timeout_s
        kind.num_retries += command.retry > 0
    for verdict in checks.verdicts:
        event = verdict.event
        source = event.sample.prompt.source
        if event.cause == "cancelled":
            kinds[source].num_cancelled += 1
        else:
            _count(kinds[source], verdict)
            seconds[source].append((event.seconds or 0.0, event.sample))
    for source, of_kind in seconds.items():
        kinds[source].slowest = _slowest_of(of_kind)
    return dict(sorted(kinds.items()))


def _count(kind: KindChecks, verdict: Verdict) -> None:
    event, waited_s = verdict.event, verdict.queue_s
    seconds = event.seconds or 0.0
    kind.num_checks += 1
    kind.total_s += seconds
    kind.longest_s = max(kind.longest_s, seconds)
    kind.queue_s += waited_s
    kind.longest_queue_s = max(kind.longest_queue_s, waited_s)
    kind.num_timed_out += event.timed_out
    if event.value is None:
        kind.failed[event.cause or "unknown"] += 1


def _slowest_of(checks: Sequence[tuple[float, SampleId]]) -> list[tuple[float, str]]:
    # Only those that can be among them are given their names: a step has thousands of checks.
    least = heapq.nlargest(NUM_SLOWEST, (seconds for seconds, _ in checks))[-1]
    named = [(seconds, str(sample)) for seconds, sample in checks if seconds >= least]
    return sorted(named, key=_slowest_first)[:NUM_SLOWEST]


def check_metrics(kinds: Mapping[str, KindChecks]) -> dict[str, Value | None]:
    """Metrics of a step by name (`perf/checks/KIND/...`), and a text that names the slowest checks.
    `kinds` has the step's checks by kind (data source)."""
    metrics: dict[str, Value | None] = {}
    for name, kind in kinds.items():
        prefix = f"perf/checks/{name}"
        metrics |= {
            f"{prefix}/count": kind.num_checks,
            f"{prefix}/time_s/mean": kind.mean_s,
            f"{prefix}/time_s/max": kind.longest_s if kind.num_checks else None,
            f"{prefix}/queue_s/mean": kind.mean_queue_s,
            f"{prefix}/queue_s/max": kind.longest_queue_s if kind.num_checks else None,
            f"{prefix}/deadline_s": kind.deadline_s,
            f"{prefix}/timed_out": kind.num_timed_out,
            f"{prefix}/retries": kind.num_retries,
            f"{prefix}/cancelled": kind.num_cancelled,
            **{f"{prefix}/failed/{cause}": num for cause, num in sorted(kind.failed.items())},
        }
    slowest = _slowest(kinds.values())
    if slowest:
        metrics["perf/checks/slowest"] = "; ".join(f"{s} {seconds:.3f} s" for seconds, s in slowest)
    return metrics


def add_up(steps: Iterable[Mapping[str, KindChecks]]) -> dict[str, KindChecks]:
    """The sums of the checks of several steps, by kind (data source)."""
    total: dict[str, KindChecks] = {}
    for step in steps:
        for name, kind in step.items():
            total.setdefault(name, KindChecks()).add(kind)
    return dict(sorted(total.items()))


def _slowest(kinds: Iterable[KindChecks]) -> list[tuple[float, str]]:
    return sorted((one for kind in kinds for one in kind.slowest), key=_slowest_first)[:NUM_SLOWEST]
