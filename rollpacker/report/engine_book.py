"""Accounting of engines: which engine has which sample, what each engine did, and when all engines
were replaced by engines of another size. Of a run with one engine nothing is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.core.commands import NOWHERE, Resize
from rollpacker.core.events import (
    EngineLost,
    EngineReady,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
)
from rollpacker.core.ids import SampleId


@dataclass(slots=True)
class EngineCounts:
    """Counts of one engine over the whole run, its replacements included."""

    samples: int = 0
    """Number of samples that ended in this engine."""
    tokens: int = 0
    """Response tokens of the samples that ended in this engine, including tokens of other engines
    and of earlier launches."""
    busy_s: float = 0.0
    """Seconds in which the engine had samples."""
    losses: int = 0
    away_s: float = 0.0
    """Sum of the seconds from each loss of the engine until its replacement was ready."""


def engines_of(job: Mapping[str, Any]) -> int:
    """The number of engines of the session that wrote this `Session.job`."""
    number: int = (job.get("fleet") or {}).get("num_engines", 1)
    return number


@dataclass(slots=True)
class Switch:
    """A change of all engines to another number of devices each."""

    tensor_parallel: int
    step: int
    """Number of the first step after the change."""
    start_s: float
    seconds: float | None = None
    """Seconds until the last of the new engines was ready. None if some never were ready."""


class EngineBook:
    """Counts what each engine did, while `History` reads a log."""

    def __init__(self) -> None:
        self.counts: dict[int, EngineCounts] = {}
        """Counts by engine. Empty if the run has one engine."""
        self.switches: list[Switch] = []
        self.any_busy_s = 0.0
        """Seconds in which at least one engine had samples."""
        self._at: dict[SampleId, int] = {}
        self._load = Counter[int]()
        """The number of samples that each engine has."""
        self.num_engines = 1
        """The number of engines of the current session."""
        self._released: frozenset[int] = frozenset()
        self._num_busy = 0
        self._any_since = 0.0
        self._incarnation = Counter[int]()
        self._busy_since: dict[int, float] = {}
        self._lost_since: dict[int, float] = {}
        self._awaited: set[int] = set()
        """Engines of the last switch that are not ready yet."""

    def begin_session(self, job: Mapping[str, Any]) -> None:
        """Begin a session, whose engines are new."""
        num_engines = engines_of(job)
        if num_engines > 1 or (job.get("fleet") or {}).get("num_devices"):
            for number in range(num_engines):
                self.counts.setdefault(number, EngineCounts())
        self.num_engines = num_engines
        self._incarnation.clear()
        self._lost_since.clear()
        self._awaited.clear()
        self.clear()

    def resize(self, command: Resize, step: int, now: float) -> None:
        """Note that all engines are replaced by engines with another number of devices."""
        for number in self.counts:
            self._incarnation[number] += 1
        self.num_engines = len(command.incarnations)
        for number, incarnation in enumerate(command.incarnations):
            self.counts.setdefault(number, EngineCounts())
            self._incarnation[number] = incarnation
        self._lost_since.clear()
        self._awaited = set(range(self.num_engines))
        self.switches.append(Switch(command.tensor_parallel, step, now))

    @property
    def idle_share(self) -> float:
        """Share of engines without samples while others have some, from 0 to 1. An engine whose
        devices are lent to the trainer counts as busy."""
        if not self._num_busy:
            return 0.0
        num_busy = self._num_busy + sum(not self._load[number] for number in self._released)
        return 1.0 - num_busy / self.num_engines

    def is_zombie(self, event: SampleGenerated | SampleAborted | SampleFailed) -> bool:
        """Whether the event comes from an engine that was lost and replaced before."""
        return event.incarnation != self._incarnation[event.engine]

    def place(self, samples: Sequence[SampleId], engines: Sequence[int], now: float) -> None:
        """Note that samples are in engines, with one engine for each sample (an empty list: the
        first engine for all). A sample leaves the engine that it was in before."""
        if self.counts:
            for sample, number in zip(samples, engines or (0,) * len(samples), strict=True):
                self._leave(sample, now)
                if number != NOWHERE:
                    self._come(sample, number, now)

    def release(self, engines: Iterable[int] = ()) -> None:
        """Note that the devices of these engines alone are lent to the trainer until the next
        round."""
        self._released = frozenset(engines)

    def nowhere(self, samples: Iterable[SampleId]) -> list[SampleId]:
        """Those of `samples` that no engine has."""
        return [s for s in samples if s not in self._at] if self.counts else []

    def end(self, event: SampleGenerated | SampleAborted | SampleFailed, now: float) -> None:
        if self.counts:
            self._leave(event.sample, now)
            counts = self.counts.setdefault(event.engine, EngineCounts())
            counts.samples += 1
            counts.tokens += 0 if isinstance(event, SampleFailed) else event.num_tokens

    def lose(self, event: EngineLost, now: float) -> list[SampleId]:
        """Note that an engine was lost. Returns the samples that the engine had."""
        number = event.engine
        if not self.counts or event.incarnation != self._incarnation[number]:
            return []
        gone = [sample for sample, at in self._at.items() if at == number]
        for sample in gone:
            self._leave(sample, now)
        self._incarnation[number] += 1
        self.counts[number].losses += 1
        self._lost_since.setdefault(number, now)
        return gone

    def ready(self, event: EngineReady, now: float) -> None:
        number = event.engine
        if not self.counts or event.incarnation != self._incarnation[number]:
            return
        self.counts[number].away_s += now - self._lost_since.pop(number, now)
        if number in self._awaited:
            self._awaited.remove(number)
            if not self._awaited:
                self.switches[-1].seconds = now - self.switches[-1].start_s

    def clear(self) -> None:
        """Forget which engine has which sample, at the end of a round."""
        self._at.clear()
        self._load.clear()
        self._busy_since.clear()
        self._num_busy = 0

    def _come(self, sample: SampleId, number: int, now: float) -> None:
        self._at[sample] = number
        self._load[number] += 1
        if self._load[number] == 1:
            if not self._num_busy:
                self._any_since = now
            self._num_busy += 1
            self._busy_since[number] = now

    def _leave(self, sample: SampleId, now: float) -> None:
        number = self._at.pop(sample, None)
        if number is None:
            return
        self._load[number] -= 1
        if not self._load[number]:
            self._num_busy -= 1
            self.counts[number].busy_s += now - self._busy_since.pop(number)
            if not self._num_busy:
                self.any_busy_s += now - self._any_since
