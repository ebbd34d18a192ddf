"""Which engine has which sample, and what each engine did. Where a run has one engine, it tells
nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.core.commands import NOWHERE
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
    """What one engine did, all its incarnations together."""

    samples: int = 0
    """That ended there."""
    tokens: int = 0
    """Of these; those that they brought along as well."""
    busy_s: float = 0.0
    """It had samples."""
    losses: int = 0
    away_s: float = 0.0
    """From losses until another engine was in its place."""


def engines_of(job: Mapping[str, Any]) -> int:
    """How many engines a session had, of which this is the `Session.job`."""
    number: int = (job.get("fleet") or {}).get("num_engines", 1)
    return number


class EngineBook:
    """Belongs to the history, which feeds it."""

    def __init__(self) -> None:
        self.counts: dict[int, EngineCounts] = {}
        """By engine; empty where there is one."""
        self.any_busy_s = 0.0
        """One of them had samples."""
        self._at: dict[SampleId, int] = {}
        self._load = Counter[int]()
        """Samples by engine."""
        self.num_engines = 1
        """Of the session at hand."""
        self._num_busy = 0
        self._any_since = 0.0
        self._incarnation = Counter[int]()
        self._busy_since: dict[int, float] = {}
        self._lost_since: dict[int, float] = {}

    def begin_session(self, job: Mapping[str, Any]) -> None:
        """Its engines are new ones."""
        num_engines = engines_of(job)
        if num_engines > 1:
            for number in range(num_engines):
                self.counts.setdefault(number, EngineCounts())
        self.num_engines = num_engines
        self._incarnation.clear()
        self._lost_since.clear()
        self.clear()

    @property
    def idle_share(self) -> float:
        """Of the engines that have nothing to do while others do."""
        if not self._num_busy:
            return 0.0
        return 1.0 - self._num_busy / self.num_engines

    def is_zombie(self, event: SampleGenerated | SampleAborted | SampleFailed) -> bool:
        """It is said by an engine that is lost."""
        return event.incarnation != self._incarnation[event.engine]

    def place(self, samples: Sequence[SampleId], engines: Sequence[int], now: float) -> None:
        """They are given to these engines; no engines: to the first. Those that run elsewhere leave
        that."""
        if self.counts:
            for sample, number in zip(samples, engines or (0,) * len(samples), strict=True):
                self._leave(sample, now)
                if number != NOWHERE:
                    self._come(sample, number, now)

    def nowhere(self, samples: Iterable[SampleId]) -> list[SampleId]:
        """Those of them that no engine has."""
        return [s for s in samples if s not in self._at] if self.counts else []

    def end(self, event: SampleGenerated | SampleAborted | SampleFailed, now: float) -> None:
        if self.counts:
            self._leave(event.sample, now)
            counts = self.counts.setdefault(event.engine, EngineCounts())
            counts.samples += 1
            counts.tokens += 0 if isinstance(event, SampleFailed) else event.num_tokens

    def lose(self, event: EngineLost, now: float) -> list[SampleId]:
        """Return the samples that it had."""
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
        if self.counts:
            self.counts[event.engine].away_s += now - self._lost_since.pop(event.engine, now)

    def clear(self) -> None:
        """The round is over, as far as the log says."""
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
