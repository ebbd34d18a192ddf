"""The engines of a run: which one each sample runs on, and what becomes of it if that is lost.

The fleet stands between the job and the engines. The job decides *what* is launched and aborted;
here it gets its engine, and what engines say is heeded only if it is theirs to say:

    from the job           to the engines
    Launch                 the same with `engines`; of another degree: Resize first
    Abort                  the same; who waits for an engine has stopped
    Release                the same, and Move of what the released engines have

    from the engines       to the job             to the engines
    a sample ended         the same, or nothing: the engine does not have it (any more)
    EngineLost             its aborted samples    Replace, and Place of the others
    EngineReady                                   Place of those that waited, Move of some
    SampleMoved

Samples keep their ids: a loss uses up no retry, and nobody is launched twice. Each is in one engine
at most, of one incarnation; what an earlier incarnation still says is counted and forgotten. A
released engine is given nothing until the next round, whatever becomes of the others: where all of
these are lost, samples wait for a replacement; and one that is lost while it is released is
replaced when its devices are the engines' again. Fed with the same events it says the same: no
clock, no chance, ties by number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Command,
    Launch,
    Move,
    Place,
    Release,
    Replace,
    Resize,
)
from rollpacker.core.devices import Devices
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
from rollpacker.core.ids import SampleId
from rollpacker.core.plain import OMIT_DEFAULT, absent
from rollpacker.core.routing import CARRIED_COST, Engine, Known, Router, Seat

Routing = Literal["spread", "group"]

ZOMBIE = "zombie"
"""Under this name `Job.num_late` counts what engines say of samples that they do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Engines that can be lost, and replaced."""

    num_engines: int = 1
    routing: Routing = "spread"
    """`spread`: each sample goes to the engine with the least work. `group`: samples of one prompt
    go together, so that its prefill is made once, as long as their engine is not overloaded."""
    max_losses: int = 3
    """So many losses of one engine without a committed step between them end the run."""
    losses_of_all: bool = field(default=False, metadata=absent(True))
    """Losses of all engines together count, as they did in older logs."""
    moves: bool = False
    """Samples under way may move to an engine that has joined, and from one that is released; the
    engines can go on with each other's tokens."""
    num_devices: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Devices that `num_engines` engines share at first, and others at another degree of tensor
    parallelism. None: the engines stay as they are."""

    def __post_init__(self) -> None:
        for name in ("num_engines", "max_losses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_devices is not None and (
            self.num_devices < 1 or self.num_devices % self.num_engines
        ):
            raise ValueError(
                f"num_devices must be a multiple of num_engines ({self.num_engines}), not "
                f"{self.num_devices}"
            )


class Fleet:
    """Tell it every event (`heeds`) and every command (`direct`); `on_engine` answers to events of
    engines."""

    def __init__(
        self,
        config: FleetConfig,
        late: Counter[str] | None = None,
        train_group: int = 1,
        *,
        trainer_apart: bool = False,
    ) -> None:
        """`late` counts zombies. `train_group`: devices of a training replica."""
        self.config = config
        self.engines = [Engine(number) for number in range(config.num_engines)]
        """Those that there are, at the degree of the round."""
        self.given_up = ""
        """Why the run cannot go on, in words; nothing is heeded any more."""
        self._slots = list(self.engines)
        """Those of all degrees that there were."""
        self._degree = (config.num_devices or config.num_engines) // config.num_engines
        """Devices of one engine."""
        self.devices = Devices(
            *(config.num_engines, self._degree),
            train_group=train_group,
            trainer_apart=trainer_apart,
        )
        self._router = Router(together=config.routing == "group")
        self._late = Counter[str]() if late is None else late
        self._seats: dict[SampleId, Seat] = {}
        """Of the round, by sample, in launch order."""
        self._unanswered = deque[SampleAborted]()
        """What the job is to hear of samples that were aborted and that nobody will answer for."""
        self._gathering: set[int] = set()
        """Engines of a new layout that are still to come; all samples wait for them."""
        self._round = 0
        self._known = Known()
        """Of the last round that brought something."""
        self._seen = Known()
        """Of this round."""
        self._losses: list[tuple[int, str]] = []
        """Since the last commit: the engine, and why."""

    @property
    def num_ready(self) -> int:
        """Engines that are there."""
        return sum(engine.ready for engine in self.engines)

    def nobody(self) -> str:
        """In words, for a deadline's message; empty while an engine takes samples."""
        if self._gathering:
            return f"{len(self._gathering)} of {len(self.engines)} engines to be laid out anew"
        if self._takers():
            return ""
        count = len(self.engines)
        which = "the only engine" if count == 1 else f"any of the {count} engines, all lost,"
        if any(engine.released for engine in self.engines):
            which = "an engine whose devices were not released"
        return f"{which} to be replaced ({_listed(self._losses) or 'it was lost'})"

    def why_kept(self) -> str:
        """Why no engine can be released now, in words; or nothing."""
        if not self.config.moves:
            return "samples under way cannot move to another engine"
        if self.num_ready < len(self.engines):
            return "an engine was being replaced"
        return ""

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
        if event.incarnation != self._slots[number].incarnation or (
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
        incarnation = self._slots[event.engine].incarnation
        if (
            seat is None
            or (seat.ended or seat.source is None)
            or (seat.engine, incarnation) != (event.engine, event.incarnation)
        ):
            self._late[ZOMBIE] += 1
            return
        seat.source = None

    def _on_lost(self, event: EngineLost, version: int) -> list[Command]:
        engine = self._slots[event.engine]
        if event.incarnation != engine.incarnation:
            return []  # known already, or its layout is no more
        number = engine.number
        self._losses.append((number, event.reason))
        counted = [one for one in self._losses if self.config.losses_of_all or one[0] == number]
        if len(counted) >= self.config.max_losses:
            who = f"engine {number} was lost {len(counted)} times"
            if self.config.losses_of_all:
                who = f"{len(counted)} engines were lost"
            why = _listed(counted)
            self.given_up = f"{who} without a committed step between them ({why})"
            return []
        engine.incarnation += 1
        engine.ready = False
        replacing = [] if engine.released else [self._replace(engine, version)]
        if engine.number in self._gathering:
            return [*replacing, *self._gather(engine)]
        return [*replacing, *self._place_again(engine.number)]

    def _replace(self, engine: Engine, version: int) -> Replace:
        return Replace(engine=engine.number, incarnation=engine.incarnation, version=version)

    def _place_again(self, lost: int) -> list[Command]:
        """The samples that the lost engine had, or that were on their way to it or from it. What
        was on its way to it goes on, where its source has it still."""
        homeless: list[SampleId] = []
        going_on: list[SampleId] = []
        anyone = bool(self._takers())
        for sample, seat in self._seats.items():
            if seat.ended or lost not in (seat.engine, seat.source):
                continue
            self.engines[seat.engine].tokens -= seat.tokens
            has_left = seat.source in (None, lost)
            if seat.aborted and not has_left:
                assert seat.source is not None
                seat.engine, seat.source = seat.source, None  # it will answer
                self.engines[seat.engine].tokens += seat.tokens
                continue
            if not has_left and anyone:
                going_on.append(sample)
                continue
            seat.engine, seat.source = NOWHERE, None
            if seat.aborted:
                self._settle(sample, seat)
            else:
                homeless.append(sample)
        return [*self._place(homeless), *self._send(going_on)]

    def _on_ready(self, event: EngineReady, version: int) -> list[Command]:
        engine = self._slots[event.engine]
        if engine.ready or event.incarnation != engine.incarnation:
            return []
        assert event.version <= version, f"{event} with version {version}"
        assert not engine.released, f"{event}: its devices are the trainer's"
        if event.version < version:  # the step ended while it was made
            return [self._replace(engine, version)]
        engine.ready = True
        if engine.number in self._gathering:
            return self._gather(engine)
        placed = self._place_waiting()
        return [*placed, *self._share_with(engine)] if self.config.moves else placed

    def _gather(self, engine: Engine) -> list[Command]:
        """This one of the new layout is there, or was lost. After the last one all begin."""
        self._gathering.remove(engine.number)
        return self._place_waiting()

    def _share_with(self, engine: Engine) -> list[Command]:
        """An engine that has joined is given a share of what others have: the last ones first, who
        have the fewest tokens to take along."""
        takers = self._takers()
        mean = sum(one.tokens for one in takers) / max(len(takers), 1)
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
        """The job's commands as they go to the engines. `on_aborted` is told of samples that nobody
        will answer for, and its commands are added."""
        commands = self._assign(commands)
        while self._unanswered:
            commands += self._assign(on_aborted(self._unanswered.popleft()))
        for command in commands:
            self.devices.obey(command)
        return commands

    def _assign(self, commands: list[Command]) -> list[Command]:
        assigned: list[Command] = []
        for command in commands:
            if type(command) is Launch:
                assigned += self._launch(command)
                continue
            assigned.append(command)
            if type(command) is Abort:
                self._abort(command)
            elif type(command) is Release:
                assigned += self._release(command)
        return assigned

    def _launch(self, command: Launch) -> list[Command]:
        before, after = self._begin_round(command) if command.round != self._round else ([], [])
        mean = self._known.mean_tokens()
        carried = command.carried or (0,) * len(command.samples)
        for sample, tokens in zip(command.samples, carried, strict=True):
            self._seats[sample] = Seat(mean + tokens // CARRIED_COST, tokens)
        engines = self._route(command.samples)
        if len(self.engines) > 1 or not self._takers():
            command = replace(command, engines=engines)
        return [*before, command, *after]

    def _begin_round(self, command: Launch) -> tuple[list[Command], list[Command]]:
        """All devices are the engines' again. What is to be said before the launch, and after."""
        self._round = command.round
        self._seats.clear()
        self._router.begin_round()
        if self._seen.num_finished:
            self._known, self._seen = self._seen, Known()
        back = [engine for engine in self.engines if engine.released]
        for engine in back:
            engine.released = False
        degree, self._degree = self._degree, command.tensor_parallel
        if self.config.num_devices is not None and degree != self._degree:
            return [self._resize(command.version)], []
        return [], [self._replace(engine, command.version) for engine in back if not engine.ready]

    def _resize(self, version: int) -> Resize:
        """The engines of the new degree are new ones, and nothing that was said of any holds."""
        assert self.config.num_devices is not None
        count = self.config.num_devices // self._degree
        self._slots += [Engine(number) for number in range(len(self._slots), count)]
        for engine in self._slots:
            engine.incarnation += 1
            engine.ready = False
        self.engines = self._slots[:count]
        self._gathering = set(range(count))
        incarnations = tuple(engine.incarnation for engine in self.engines)
        return Resize(tensor_parallel=self._degree, incarnations=incarnations, version=version)

    def _release(self, command: Release) -> list[Command]:
        """What the released engines have, or were to be given, goes on in others."""
        for number in {device // self._degree for device in command.devices}:
            self.engines[number].released = True
        leaving: list[SampleId] = []
        for sample, seat in self._live():
            engine = self.engines[seat.engine]
            if engine.released and not seat.aborted:
                engine.tokens -= seat.tokens
                leaving.append(sample)
        return self._send(leaving)

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

    # -- where samples go --------------------------------------------------------------

    def _live(self) -> list[tuple[SampleId, Seat]]:
        return [(sample, seat) for sample, seat in self._seats.items() if not seat.ended]

    def _takers(self) -> list[Engine]:
        """Engines that may be given samples now."""
        return [] if self._gathering else [engine for engine in self.engines if engine.takes]

    def _route(self, samples: Sequence[SampleId]) -> tuple[int, ...]:
        """Give these samples, whose work is nobody's, their engines."""
        seats = [self._seats[sample] for sample in samples]
        return self._router.route(samples, seats, self._takers())

    def _place(self, samples: Sequence[SampleId]) -> list[Command]:
        """Have these started again, if an engine is there; otherwise they wait for one."""
        if not samples or not self._takers():
            return []
        return [Place(samples=tuple(samples), engines=self._route(samples))]

    def _place_waiting(self) -> list[Command]:
        return self._place([sample for sample, seat in self._live() if seat.engine == NOWHERE])

    def _send(self, samples: Sequence[SampleId]) -> list[Command]:
        """Have these, whose work is nobody's, go on elsewhere with what they have: where they come
        from if they are under way and that engine takes samples, else by the routing."""
        routed: list[SampleId] = []
        for sample in samples:
            seat = self._seats[sample]
            if seat.source is None:
                seat.source = seat.engine
            source = self.engines[seat.source]
            if source.takes:
                seat.engine = source.number
                source.tokens += seat.tokens
            else:
                routed.append(sample)
        self._route(routed)
        by_engine: dict[int, list[SampleId]] = {}
        for sample in samples:
            by_engine.setdefault(self._seats[sample].engine, []).append(sample)
        return [Move(samples=tuple(by_engine[n]), engine=n) for n in sorted(by_engine)]

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Engines are not in it: those of a run that is taken up again are new."""
        known = self._seen if self._seen.num_finished else self._known
        return {"num_finished": known.num_finished, "num_tokens": known.num_tokens}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._known = Known(state["num_finished"], state["num_tokens"])


def _listed(losses: Sequence[tuple[int, str]]) -> str:
    return "; ".join(f"engine {number}: {reason}" for number, reason in losses)
