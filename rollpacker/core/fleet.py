"""The engines of a run: which one each sample runs on, and what becomes of it if that is lost.

The fleet stands between the job and the engines. The job decides *what* is launched and aborted;
here it gets its engine, and what engines say is heeded only if it is theirs to say:

    from the job           to the engines
    Launch                 the same with `engines`
    Abort                  the same; who waits for an engine has stopped

    from the engines       to the job             to the engines
    a sample ended         the same, or nothing: the engine does not have it (any more)
    EngineLost             its aborted samples    Replace, and Place of the others
    EngineReady                                   Place of those that waited, Move of some
    SampleMoved

Samples keep their ids: a loss uses up no retry, and nobody is launched twice. Each is in one engine
at most, of one incarnation; what an earlier incarnation still says is counted and forgotten. Fed
with the same events it says the same: no clock, no chance, ties by number.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollpacker.core.commands import NOWHERE, Abort, Command, Launch, Move, Place, Replace
from rollpacker.core.events import (
    Committed,
    EngineLost,
    EngineReady,
    Event,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
)
from rollpacker.core.ids import PromptId, SampleId

Routing = Literal["spread", "group"]

ZOMBIE = "zombie"
"""Under this name `Job.num_late` counts what engines say of samples that they do not have."""

CARRIED_COST = 8
"""So many carried tokens are as much work as one that is drawn: they are looked at together."""

OVERLOAD = 1.5
"""An engine with more than this times the mean work gets no more of a group that it has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Engines that can be lost, and replaced."""

    num_engines: int = 1
    routing: Routing = "spread"
    """`spread`: each sample goes to the engine with the least work. `group`: samples of one prompt
    go together, so that its prefill is made once, as long as their engine is not overloaded."""
    max_losses: int = 3
    """So many losses of engines without a committed step between them end the run."""
    moves: bool = False
    """Samples under way may move to an engine that has joined; the engines can go on with each
    other's tokens."""

    def __post_init__(self) -> None:
        for name in ("num_engines", "max_losses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(slots=True)
class Engine:
    """One slot of the fleet."""

    number: int
    incarnation: int = 0
    """How often it was replaced. That of the one to come, from the moment of a loss on."""
    ready: bool = True
    """It is there, with the weights of the round, and takes samples."""
    tokens: int = 0
    """Work: what its samples are expected to take, in tokens."""


class Seat:
    """Where a sample of the round is."""

    __slots__ = ("aborted", "carried", "ended", "engine", "source", "tokens")

    def __init__(self, tokens: int, carried: int) -> None:
        self.engine = NOWHERE
        """The number of the engine that has it, or has been told to take it."""
        self.source: int | None = None
        """While it moves: the engine that it comes from, and that may still end it."""
        self.tokens = tokens
        """Work that is counted for it."""
        self.carried = carried
        """Tokens that its launch gave it."""
        self.aborted = False
        """It was told to stop, and the answer is awaited."""
        self.ended = False


@dataclass(slots=True)
class Known:
    """What the fleet knows of lengths, for the work of samples that have just begun."""

    num_finished: int = 0
    num_tokens: int = 0

    def mean_tokens(self) -> int:
        """At least 1: before anything has finished, all samples are alike."""
        return max(self.num_tokens // self.num_finished, 1) if self.num_finished else 1


class Fleet:
    """Tell it every event (`heeds`) and every command (`direct`); `on_engine` answers to events of
    engines."""

    def __init__(self, config: FleetConfig, late: Counter[str] | None = None) -> None:
        """`late` counts zombies."""
        self.config = config
        self.engines = [Engine(number) for number in range(config.num_engines)]
        self.given_up = ""
        """Why the run cannot go on, in words; nothing is heeded any more."""
        self._late = Counter[str]() if late is None else late
        self._seats: dict[SampleId, Seat] = {}
        """Of the round, by sample, in launch order."""
        self._homes: dict[PromptId, int] = {}
        """With `group`: the engine that took a prompt's last sample."""
        self._unanswered = deque[SampleAborted]()
        """What the job is to hear of samples that were aborted and that nobody will answer for."""
        self._round = 0
        self._known = Known()
        """Of the last round that brought something."""
        self._seen = Known()
        """Of this round."""
        self._losses: list[str] = []
        """Since the last commit, in words."""

    @property
    def num_ready(self) -> int:
        """Engines that take samples now."""
        return sum(engine.ready for engine in self.engines)

    def nobody(self) -> str:
        """In words, for a deadline's message; empty while an engine is there."""
        if self.num_ready:
            return ""
        count = len(self.engines)
        which = "the only engine" if count == 1 else f"any of the {count} engines, all lost,"
        return f"{which} to be replaced ({'; '.join(self._losses) or 'it was lost'})"

    # -- what engines say --------------------------------------------------------------

    def heeds(self, event: Event) -> bool:
        """Whether the job is to hear this event. Called once with every event, in order."""
        if self.given_up:
            return False
        if isinstance(event, (SampleGenerated, SampleAborted, SampleFailed)):
            return self._ends(event)
        if isinstance(event, Committed):
            self._losses.clear()
        return True

    def on_engine(
        self, event: EngineLost | EngineReady | SampleMoved, version: int
    ) -> list[Command]:
        """The answer; `version`: of the weights that engines should have now. Sets `given_up` where
        that is what follows."""
        match event:
            case EngineLost():
                return self._on_lost(event, version)
            case EngineReady():
                return self._on_ready(event, version)
            case SampleMoved():
                self._on_moved(event)
        return []

    def _ends(self, event: SampleGenerated | SampleAborted | SampleFailed) -> bool:
        number = event.engine
        seat = self._seats.get(event.sample)
        if event.incarnation != self.engines[number].incarnation or (
            seat is not None and number != seat.engine and number != seat.source
        ):
            self._late[ZOMBIE] += 1
            return False
        # One that has no seat, or had ended, is for the round to refuse: its engine is current.
        if seat is not None and not seat.ended:
            if type(event) is SampleGenerated:
                self._seen.num_finished += 1
                self._seen.num_tokens += event.num_tokens
            self.engines[seat.engine].tokens -= seat.tokens
            seat.ended = True
        return True

    def _on_moved(self, event: SampleMoved) -> None:
        seat = self._seats.get(event.sample)
        incarnation = self.engines[event.engine].incarnation
        if (
            seat is None
            or (seat.ended or seat.source is None)
            or (seat.engine, incarnation) != (event.engine, event.incarnation)
        ):
            self._late[ZOMBIE] += 1
            return
        seat.source = None

    def _on_lost(self, event: EngineLost, version: int) -> list[Command]:
        engine = self.engines[event.engine]
        if event.incarnation != engine.incarnation:
            return []  # known already
        self._losses.append(f"engine {engine.number}: {event.reason}")
        if len(self._losses) >= self.config.max_losses:
            self.given_up = (
                f"{len(self._losses)} engines were lost without a committed step between them "
                f"({'; '.join(self._losses)})"
            )
            return []
        engine.incarnation += 1
        engine.ready = False
        replacing = Replace(engine=engine.number, incarnation=engine.incarnation, version=version)
        return [replacing, *self._place_again(engine.number)]

    def _place_again(self, lost: int) -> list[Command]:
        """The samples that the lost engine had, or that were on their way to it or from it."""
        homeless: list[SampleId] = []
        for sample, seat in self._seats.items():
            if seat.ended or lost not in (seat.engine, seat.source):
                continue
            self.engines[seat.engine].tokens -= seat.tokens
            if seat.aborted and seat.source not in (None, lost):
                seat.engine, seat.source = seat.source, None  # it has not left, and will answer
                self.engines[seat.engine].tokens += seat.tokens
                continue
            seat.engine, seat.source = NOWHERE, None
            if seat.aborted:
                self._settle(sample, seat)
            else:
                homeless.append(sample)
        return self._place(homeless)

    def _on_ready(self, event: EngineReady, version: int) -> list[Command]:
        engine = self.engines[event.engine]
        if engine.ready or event.incarnation != engine.incarnation:
            return []
        assert event.version <= version, f"{event} with version {version}"
        if event.version < version:  # the step ended while it was made
            return [Replace(engine=engine.number, incarnation=engine.incarnation, version=version)]
        engine.ready = True
        live = self._live()
        waiting = [sample for sample, seat in live if seat.engine == NOWHERE]
        placed = self._place(waiting)
        return [*placed, *self._share_with(engine)] if self.config.moves else placed

    def _share_with(self, engine: Engine) -> list[Command]:
        """An engine that has joined is given a share of what others have: the last ones first, who
        have the fewest tokens to take along."""
        mean = sum(one.tokens for one in self.engines) / self.num_ready
        moved: list[SampleId] = []
        for sample, seat in reversed(self._live()):
            giver = self.engines[seat.engine]
            if giver is engine or seat.aborted or seat.source is not None:
                continue
            if engine.tokens + seat.tokens <= mean <= giver.tokens - seat.tokens:
                giver.tokens -= seat.tokens
                engine.tokens += seat.tokens
                seat.source, seat.engine = seat.engine, engine.number
                moved.append(sample)
        return [Move(samples=tuple(moved), engine=engine.number)] if moved else []

    # -- what the job says -------------------------------------------------------------

    def direct(
        self, commands: list[Command], on_aborted: Callable[[SampleAborted], list[Command]]
    ) -> list[Command]:
        """The job's commands as they go to the engines; the list may be changed. `on_aborted` is
        told of samples that nobody will answer for, and its commands are added."""
        commands = self._assign(commands)
        while self._unanswered:
            commands += self._assign(on_aborted(self._unanswered.popleft()))
        return commands

    def _assign(self, commands: list[Command]) -> list[Command]:
        for place, command in enumerate(commands):
            if type(command) is Launch:
                commands[place] = self._launch(command)
            elif type(command) is Abort:
                self._abort(command)
        return commands

    def _launch(self, command: Launch) -> Launch:
        if command.round != self._round:
            self._round = command.round
            self._seats.clear()
            self._homes.clear()
            if self._seen.num_finished:
                self._known, self._seen = self._seen, Known()
        mean = self._known.mean_tokens()
        carried = command.carried or (0,) * len(command.samples)
        for sample, tokens in zip(command.samples, carried, strict=True):
            self._seats[sample] = Seat(mean + tokens // CARRIED_COST, tokens)
        engines = self._route(command.samples)
        if len(self.engines) == 1 and self.num_ready:
            return command
        return replace(command, engines=engines)

    def _abort(self, command: Abort) -> None:
        for sample in command.samples:
            seat = self._seats[sample]
            seat.aborted = True
            if seat.engine == NOWHERE:
                self._settle(sample, seat)

    def _settle(self, sample: SampleId, seat: Seat) -> None:
        """Nobody will answer for it: it has what its launch gave it."""
        seat.ended = True
        self._unanswered.append(SampleAborted(time_s=0.0, sample=sample, num_tokens=seat.carried))

    # -- routing -----------------------------------------------------------------------

    def _live(self) -> list[tuple[SampleId, Seat]]:
        return [(sample, seat) for sample, seat in self._seats.items() if not seat.ended]

    def _place(self, samples: Sequence[SampleId]) -> list[Command]:
        """Have these started again, if an engine is there; otherwise they wait for one."""
        if not samples or not self.num_ready:
            return []
        return [Place(samples=tuple(samples), engines=self._route(samples))]

    def _route(self, samples: Sequence[SampleId]) -> tuple[int, ...]:
        """Give these samples, which are nowhere, their engines."""
        least = self._least_loaded()
        if least is None:
            return (NOWHERE,) * len(samples)
        seats = [self._seats[sample] for sample in samples]
        together = self.config.routing == "group"
        most = 0.0
        if together:
            work = sum(engine.tokens for engine in self.engines) + sum(s.tokens for s in seats)
            most = OVERLOAD * work / self.num_ready
        for sample, seat in zip(samples, seats, strict=True):
            engine = self._home(sample, seat, most) if together else None
            engine = next(least) if engine is None else engine
            engine.tokens += seat.tokens
            seat.engine = engine.number
            if together:
                self._homes[sample.prompt] = engine.number
        return tuple([seat.engine for seat in seats])

    def _home(self, sample: SampleId, seat: Seat, most: float) -> Engine | None:
        """Where samples of its prompt are, if that engine is there and not overloaded."""
        number = self._homes.get(sample.prompt)
        if number is None:
            return None
        engine = self.engines[number]
        return engine if engine.ready and engine.tokens + seat.tokens <= most else None

    def _least_loaded(self) -> Iterator[Engine] | None:
        """At each turn the engine with the least work, the first of several. Work may be added
        between turns, not taken away. None: no engine is there."""
        heap = [(engine.tokens, engine.number) for engine in self.engines if engine.ready]
        heapq.heapify(heap)

        def turns() -> Iterator[Engine]:
            while True:
                tokens, number = heap[0]
                engine = self.engines[number]
                if engine.tokens != tokens:
                    heapq.heapreplace(heap, (engine.tokens, number))
                else:
                    yield engine

        return turns() if heap else None

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Engines are not in it: those of a run that is taken up again are new."""
        known = self._seen if self._seen.num_finished else self._known
        return {"num_finished": known.num_finished, "num_tokens": known.num_tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._known = Known(state["num_finished"], state["num_tokens"])
