"""Reads a log with several engines, and knows of engines and samples only what that says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Enter,
    Finish,
    Launch,
    Move,
    Place,
    Release,
    Replace,
    Resize,
    StartGradients,
)
from rollpacker.core.events import (
    EngineLost,
    EngineReady,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
    Trained,
)
from rollpacker.core.ids import SampleId
from rollpacker.core.records import Record

ENDINGS = (SampleGenerated, SampleAborted, SampleFailed)


class Checker:
    """`read` raises `AssertionError` for what must not be."""

    def __init__(self, num_engines: int) -> None:
        self.incarnations = dict.fromkeys(range(num_engines), 0)
        """The highest of each number."""
        self.there = dict.fromkeys(range(num_engines), True)
        """By number, of the engines that there are at this degree."""
        self.degree = 1
        self.round = 0
        self.released: set[int] = set()
        self.owed: set[int] = set()
        """Lost while they were released, and not replaced yet."""
        self.gathering: set[int] = set()
        self.where: dict[SampleId, tuple[int, ...]] = {}
        """Engines that may end each sample: one; while it moves where it comes from and where it
        goes; none while it waits."""
        self.aborted: set[SampleId] = set()
        self.num_ends = Counter[SampleId]()
        self.num_zombies = 0
        self.num_failed = 0
        self.rounds = Counter[int]()
        """Launches of each."""
        self.version = 0
        self.holds_back = False
        """The job shares its pools: what an engine is told may come later."""
        self.is_over = False

    @property
    def takers(self) -> list[int]:
        if self.gathering:
            return []
        return [n for n, there in self.there.items() if there and n not in self.released]

    def read(self, log: list[Record]) -> None:
        self.holds_back = any(isinstance(c, Enter) for record in log for c in record.commands)
        for record in log:
            event = record.event
            if isinstance(event, Trained):
                self.version = event.version
            if isinstance(event, ENDINGS) and not self.ends(event):
                assert not record.commands, "a zombie was heeded"
                continue
            if isinstance(event, SampleMoved):
                self.moved(event)
            placed = {s for c in record.commands if isinstance(c, Place) for s in c.samples}
            moved = {s for c in record.commands if isinstance(c, Move) for s in c.samples}
            if isinstance(event, EngineLost):
                self.lost(event, placed, moved)
            if isinstance(event, EngineReady):
                self.ready(event, [c for c in record.commands if isinstance(c, Replace)], placed)
            for command in record.commands:
                self.obey(command)
            self.all_are_well()
            assert self.owed <= self.released, "a released engine that was lost is not replaced"

    def all_are_well(self) -> None:
        for sample, engines in self.where.items():
            if sample not in self.aborted:
                assert not set(engines[-1:]) & self.released, "left in a released engine"
                assert engines or not self.takers, "it waits although an engine takes samples"

    def ends(self, event: SampleGenerated | SampleAborted | SampleFailed) -> bool:
        is_current = event.incarnation == self.incarnations[event.engine]
        if not is_current or event.engine not in self.where.get(event.sample, ()):
            self.num_zombies += 1
            return False
        del self.where[event.sample]
        self.num_ends[event.sample] += 1
        self.num_failed += isinstance(event, SampleFailed)
        return True

    def moved(self, event: SampleMoved) -> None:
        assert event.incarnation == self.incarnations[event.engine]
        assert self.where[event.sample][1:] == (event.engine,)
        self.where[event.sample] = (event.engine,)

    def lost(self, event: EngineLost, placed: set[SampleId], moved: set[SampleId]) -> None:
        number = event.engine
        if event.incarnation != self.incarnations[number]:
            assert not placed and not moved, "an old layout's"
            return
        self.incarnations[number] += 1
        self.there[number] = False
        self.gathering.discard(number)
        if number in self.released:
            self.owed.add(number)
        anyone = bool(self.takers)
        for sample in [s for s, engines in self.where.items() if number in engines]:
            source, *target = self.where[sample]
            has_left = source == number
            if sample in self.aborted:
                if has_left or not target:
                    self.settle([sample])
                else:
                    self.where[sample] = (source,)  # it has not left, and will stop there
            elif has_left or not anyone:
                assert anyone == (sample in placed)
                self.where[sample] = ()
            else:
                assert sample in moved
                self.where[sample] = (source, NOWHERE)

    def ready(self, event: EngineReady, again: list[Replace], placed: set[SampleId]) -> None:
        if event.incarnation != self.incarnations[event.engine]:
            assert not again and not placed, "an old layout's"
            return
        if again or event.version < self.version:
            assert not placed
            assert again[0].version > event.version if again else self.holds_back or self.is_over
            return
        self.there[event.engine] = True
        self.gathering.discard(event.engine)
        waited = {s for s, engines in self.where.items() if not engines}
        assert placed == (set() if self.gathering else waited)

    def settle(self, stopped: Iterable[SampleId]) -> None:
        for sample in stopped:
            del self.where[sample]
            self.num_ends[sample] += 1

    def obey(self, command: object) -> None:
        match command:
            case Launch():
                self.launch(command)
            case Place(samples=samples, engines=engines):
                for sample, engine in zip(samples, engines, strict=True):
                    assert not self.where[sample], "it is in an engine"
                    assert engine in self.takers
                    self.where[sample] = (engine,)
            case Move(samples=samples, engine=engine):
                for sample in samples:
                    source, *target = self.where[sample]
                    assert sample not in self.aborted and engine in self.takers
                    assert engine != source if not target else target[0] not in self.takers
                    self.where[sample] = (source, engine)
            case Abort(samples=samples):
                self.aborted |= set(samples)
                self.settle(sample for sample in samples if not self.where[sample])
            case Replace(engine=engine, incarnation=incarnation):
                assert (incarnation, self.there[engine]) == (self.incarnations[engine], False)
                assert engine not in self.released
                self.owed.discard(engine)
            case Release(devices=devices):
                assert all(self.there.values()) and not self.gathering
                self.released = {device // self.degree for device in devices}
                assert self.takers
            case StartGradients(devices=devices):
                assert {device // self.degree for device in devices} in (set(), self.released)
            case Resize():
                self.resize(command)
            case Finish():
                self.is_over = True

    def resize(self, command: Resize) -> None:
        assert not self.where, "samples are left of the round before"
        num_devices = len(self.there) * self.degree
        self.degree = command.tensor_parallel
        assert len(command.incarnations) * self.degree == num_devices
        for number in self.incarnations:  # nothing of those of before counts
            self.incarnations[number] += 1
        for number, incarnation in enumerate(command.incarnations):
            assert incarnation == self.incarnations.setdefault(number, incarnation)
        self.there = dict.fromkeys(range(len(command.incarnations)), False)
        self.gathering = set(self.there)
        self.owed.clear()
        self.released.clear()

    def launch(self, command: Launch) -> None:
        number, samples = command.round, command.samples
        if number != self.round:
            assert not self.where, "samples are left of the round before"
            self.round, self.degree = number, command.tensor_parallel
            self.released.clear()
        self.rounds[number] += 1
        for sample, engine in zip(samples, command.engines or (0,) * len(samples), strict=True):
            assert sample not in self.num_ends and sample not in self.where
            assert engine in self.takers if engine != NOWHERE else not self.takers
            self.where[sample] = () if engine == NOWHERE else (engine,)
