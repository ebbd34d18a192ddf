"""The engines of a run: which one each sample runs on, and what follows when an engine is lost.

The fleet stands between the job and the engines. The job decides *what* is launched and aborted;
the fleet chooses the engines, and passes on what engines report only if they have the sample.

To the engines, `Launch` and `Continue` go with `engines`; a sample continues on the engine of its
last turn, if that takes samples. `Resize` comes before the `Launch` of a round with another number
of devices per engine. After `Release` comes `Move` for the samples of the released engines. `Abort`
goes on unchanged, but a sample that waits for an engine has stopped at once.

To the job, the end of a sample goes on if the reporting engine has the sample. `EngineLost` brings
the ends of its aborted samples, `Replace`, and `Place` for its other samples; `EngineReady` brings
`Place` for samples that waited, and `Move` for some others.

Samples keep their ids: a loss uses up no retry, and no sample is launched twice. A sample is in one
engine at most, of one incarnation; what an earlier incarnation still reports is counted and
ignored. A released engine gets no samples until the next round: if all others are lost, samples
wait for a replacement. One that is lost while released is replaced when the engines have its
devices again. The same events bring the same commands: no clock, no chance, ties by number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from rollpacker.bounds import check_at_least
from rollpacker.codec import OMIT_DEFAULT, absent
from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Command,
    Continue,
    Launch,
    Move,
    Place,
    Release,
    Replace,
    Resize,
)
from rollpacker.core.events import (
    Committed,
    EngineLost,
    EngineReady,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
)
from rollpacker.core.fleet.devices import MOVERS, Devices
from rollpacker.core.fleet.lost_processes import EngineLosses
from rollpacker.core.fleet.routing import Engine, Known, Router, Routing
from rollpacker.core.fleet.sample_places import Seats
from rollpacker.core.ids import SampleId

ZOMBIE = "zombie"
"""Key under which `Job.num_late` counts events from engines that do not have the sample."""

HEEDED = frozenset({SampleGenerated, SampleAborted, SampleFailed, Committed})
"""Kinds of event given to `Fleet.heeds`, which returns whether the job handles the event."""

DIRECTED = frozenset({Abort, *MOVERS})
"""Kinds of command that `Fleet.direct` acts on: those that concern engines or their devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Settings of engines that can be lost and replaced."""

    num_engines: int = 1
    routing: Routing = "spread"
    """How a sample's engine is chosen. "spread": the one with the least work. "group": the one that
    has the prompt's last sample, unless it has too much to do. "turns": one after the other."""
    max_losses: int = 3
    """Number of losses of one engine, without a committed step between them, that ends the run."""
    losses_of_all: bool = field(default=False, metadata=absent(True))
    """True if `max_losses` bounds the losses of all engines together. False: of each engine."""
    moves: bool = False
    """True if unfinished samples may move to another engine when one has joined or is released,
    since engines can go on from each other's tokens."""
    num_devices: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Number of devices that `num_engines` engines share at first; if a round has more devices per
    engine, it has fewer engines. None: the number of engines does not change."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_engines", "max_losses")
        if self.num_devices is not None and (
            self.num_devices < 1 or self.num_devices % self.num_engines
        ):
            raise ValueError(
                f"num_devices must be a multiple of num_engines ({self.num_engines}), not "
                f"{self.num_devices}"
            )


class Fleet:
    """The engines of a run, and the engine of each sample. `heeds` and `on_engine` take events in,
    and `direct` takes the job's commands."""

    def __init__(
        self,
        config: FleetConfig,
        late: Counter[str] | None = None,
        train_group: int = 1,
        *,
        trainer_apart: bool = False,
        by_turn: bool = False,
    ) -> None:
        """`late` counts ignored events, under the key `ZOMBIE`. `train_group`: number of devices of
        one copy of the model in training. `by_turn`: as the work of a sample, at most as many of
        its tokens from an earlier launch count as a mean response has. False: all of them count."""
        self.config = config
        self.engines = [Engine(number) for number in range(config.num_engines)]
        """Engines of this round, each with as many devices as the round asks for."""
        self.given_up = ""
        """Why the run cannot go on, in words; empty while it can. Once set, events are ignored."""
        self._slots = list(self.engines)
        """All engines that the run has had, at any degree of tensor parallelism, by number."""
        self._degree = (config.num_devices or config.num_engines) // config.num_engines
        """Number of devices of each engine in this round."""
        self.devices = Devices(
            config.num_engines,
            self._degree,
            train_group=train_group,
            trainer_apart=trainer_apart,
        )
        self._router = Router(config.routing)
        self._late = Counter[str]() if late is None else late
        self._seats = Seats(by_turn=by_turn)
        """Engine of each sample of the round, and the tokens that each is expected to cost."""
        self.unanswered = deque[SampleAborted]()
        """Aborted samples that no engine will answer for, which `direct` reports to the job."""
        self._gathering: set[int] = set()
        """Engines still missing, by number, after devices were regrouped; all samples wait for
        them."""
        self._round = 0
        self._known = Known()
        """Number and tokens of responses finished in the last round that had any. Their mean length
        is the expected work of a new sample."""
        self._seen = Known()
        """Number and tokens of the responses finished in this round."""
        self._losses = EngineLosses(config.max_losses, of_all=config.losses_of_all)

    @property
    def num_ready(self) -> int:
        """Number of engines that have the current weights and generate."""
        return sum(engine.ready for engine in self.engines)

    @property
    def known(self) -> Known:
        """Number and tokens of finished responses, from which the work of new samples is estimated:
        all that a checkpoint holds of the fleet."""
        return self._seen if self._seen.num_finished else self._known

    @known.setter
    def known(self, known: Known) -> None:
        self._known = known

    def nobody(self) -> str:
        """What samples without an engine wait for, in words. Empty: an engine takes samples."""
        if self._gathering:
            return f"{len(self._gathering)} of {len(self.engines)} engines to be laid out anew"
        if self._takers():
            return ""
        count = len(self.engines)
        which = "the only engine" if count == 1 else f"any of the {count} engines, all lost,"
        if any(engine.released for engine in self.engines):
            which = "an engine whose devices were not released"
        return f"{which} to be replaced ({str(self._losses) or 'it was lost'})"

    def why_kept(self) -> str:
        """Why no engine can give up its devices to the trainer now, in words; empty if one can."""
        if not self.config.moves:
            return "samples under way cannot move to another engine"
        if self.num_ready < len(self.engines):
            return "an engine was being replaced"
        return ""

    # -- what engines say --------------------------------------------------------------

    def heeds(self, event: Committed | SampleGenerated | SampleAborted | SampleFailed) -> bool:
        """Whether the job is to handle this event; False if the event's engine does not have the
        sample. To be called once, in order, with every event of a kind in `HEEDED`."""
        # Every response comes by here: benchmarks/fleet_speed.py, benchmarks/sim_speed.py.
        if isinstance(event, Committed):
            self._losses.clear()
            return True
        sample, number, seats = event.sample, event.engine, self._seats
        seat = seats.engine.get(sample, number)
        if event.incarnation != self._slots[number].incarnation or (
            number != seat and number != seats.source.get(sample)
        ):
            self._late[ZOMBIE] += 1
            return False
        # One that was not launched, or had ended, is for the round to refuse: its engine is
        # current.
        tokens = seats.work.pop(sample, None)
        if tokens is not None:
            self.engines[seat].tokens -= tokens
            if number != seat:  # it was to move, and has ended before
                seats.engine[sample] = number
            if type(event) is SampleGenerated:
                seen = self._seen
                seen.num_finished += 1
                seen.num_tokens += event.num_tokens
        return True

    def on_engine(
        self, event: EngineLost | EngineReady | SampleMoved, version: int
    ) -> list[Command]:
        """Commands that answer an event about an engine or a move. `version`: version of the
        weights that engines should have now. Sets `given_up` if the run cannot go on."""
        match event:
            case EngineLost():
                return self._on_lost(event, version)
            case EngineReady():
                return self._on_ready(event, version)
            case SampleMoved():
                self._on_moved(event)
        return []

    def _on_moved(self, event: SampleMoved) -> None:
        sample, seats = event.sample, self._seats
        is_current = event.incarnation == self._slots[event.engine].incarnation
        if (
            not (is_current and sample in seats.work and sample in seats.source)
            or seats.engine[sample] != event.engine
        ):
            self._late[ZOMBIE] += 1
            return
        del seats.source[sample]

    def _on_lost(self, event: EngineLost, version: int) -> list[Command]:
        engine = self._slots[event.engine]
        if event.incarnation != engine.incarnation:
            return []  # known already, or its layout is no more
        self.given_up = self._losses.add(engine.number, event.reason)
        if self.given_up:
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
        """Commands that restart the samples that the lost engine had, or that were moving to or
        from it. A sample that was moving to it stays where it was, if it is still there."""
        homeless: list[SampleId] = []
        going_on: list[SampleId] = []
        anyone = bool(self._takers())
        seats = self._seats
        for sample, tokens in list(seats.work.items()):
            source = seats.source.get(sample)
            if lost not in (seats.engine[sample], source):
                continue
            self.engines[seats.engine[sample]].tokens -= tokens
            stays = source not in (None, lost)  # it has not left the engine that it comes from
            if stays and anyone and sample not in seats.stopping:
                going_on.append(sample)
                continue
            seats.source.pop(sample, None)
            if sample not in seats.stopping:
                seats.engine[sample] = NOWHERE
                homeless.append(sample)
            elif stays:
                assert source is not None
                seats.engine[sample] = source  # it will answer
                self.engines[source].tokens += tokens
            else:
                self._settle(sample)
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
        """Records that this engine, after a regrouping of devices, is ready or was lost. After the
        last one, returns the commands that start the waiting samples."""
        self._gathering.remove(engine.number)
        return self._place_waiting()

    def _share_with(self, engine: Engine) -> list[Command]:
        """Commands that move samples of other engines to one that has joined, until it has the mean
        work: the last launched first, since these have the fewest tokens to take along."""
        takers, seats = self._takers(), self._seats
        mean = sum(one.tokens for one in takers) / max(len(takers), 1)
        moved: list[SampleId] = []
        for sample, tokens in reversed(seats.work.items()):
            giver = self.engines[seats.engine[sample]]
            if giver is engine or sample in seats.stopping or sample in seats.source:
                continue
            if engine.tokens + tokens <= mean <= giver.tokens - tokens:
                giver.tokens -= tokens
                engine.tokens += tokens
                seats.source[sample], seats.engine[sample] = giver.number, engine.number
                moved.append(sample)
        return [Move(samples=tuple(moved), engine=engine.number)] if moved else []

    # -- what the job says -------------------------------------------------------------

    def direct(
        self, commands: list[Command], on_aborted: Callable[[SampleAborted], list[Command]]
    ) -> list[Command]:
        """The job's commands with engines assigned. `on_aborted` is called with the end of each
        sample that no engine will answer for, and the commands that it returns are added."""
        commands = self._assign(commands)
        while self.unanswered:
            commands += self._assign(on_aborted(self.unanswered.popleft()))
        for command in commands:
            self.devices.obey(command)
        return commands

    def _assign(self, commands: list[Command]) -> list[Command]:
        assigned: list[Command] = []
        for command in commands:
            if type(command) is Launch:
                assigned += self._launch(command)
                continue
            if type(command) is Continue:
                assigned.append(self._continue(command))
                continue
            assigned.append(command)
            if type(command) is Abort:
                self._abort(command)
            elif type(command) is Release:
                assigned += self._release(command)
        return assigned

    def _launch(self, command: Launch) -> list[Command]:
        before, after = self._begin_round(command) if command.round != self._round else ([], [])
        samples = command.samples
        work = self._seats.launch(samples, command.carried, self._known.mean_tokens())
        engines = self._route(samples, work)
        if len(self.engines) > 1 or not self._takers():
            command = replace(command, engines=engines)
        return [*before, command, *after]

    def _continue(self, command: Continue) -> Continue:
        """The command with engines: each sample's engine of the turn before, which may still have
        its keys and values, or, if that takes no samples, the one that the routing chooses."""
        # Every turn comes by here: no list of all engines is made for it.
        seats, engines = self._seats, self.engines
        tokens = self._known.mean_tokens()
        away = []
        for sample in command.samples:
            seats.work[sample] = tokens
            seats.source.pop(sample, None)
            seats.carried.pop(sample, None)
            home = seats.engine[sample]
            if home != NOWHERE and engines[home].takes and not self._gathering:
                engines[home].tokens += tokens
            else:
                away.append(sample)
        if away:
            self._route(away)
        if len(engines) > 1 or not self._takers():
            return replace(command, engines=tuple(map(seats.engine.__getitem__, command.samples)))
        return command

    def _begin_round(self, command: Launch) -> tuple[list[Command], list[Command]]:
        """Gives all devices back to the engines. Returns the commands that go before the launch,
        and those that go after it."""
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
        """Makes engines of the new number of devices. Returns the command that starts them."""
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
        """Marks engines as released. Returns commands that move away their unfinished samples."""
        for number in {device // self._degree for device in command.devices}:
            self.engines[number].released = True
        seats = self._seats
        leaving = seats.under_way({engine.number for engine in self.engines if engine.released})
        for sample in leaving:
            self.engines[seats.engine[sample]].tokens -= seats.work[sample]
        if self.config.routing == "turns":  # what one engine has before what the next one has
            leaving.sort(key=seats.engine.__getitem__)
        return self._send(leaving)

    def _abort(self, command: Abort) -> None:
        seats = self._seats
        seats.stopping.update(command.samples)
        for sample in command.samples:
            if seats.engine[sample] == NOWHERE:
                self._settle(sample)

    def _settle(self, sample: SampleId) -> None:
        """Adds to `unanswered` the end of a stopped sample that no engine has. Its tokens are those
        that an earlier launch had left it."""
        seats = self._seats
        del seats.work[sample]
        seats.engine[sample] = NOWHERE
        num_tokens = seats.carried.get(sample, 0)
        self.unanswered.append(SampleAborted(time_s=0.0, sample=sample, num_tokens=num_tokens))

    # -- where samples go --------------------------------------------------------------

    def _takers(self) -> list[Engine]:
        """Engines that may be given samples now; none while devices are being regrouped."""
        return [] if self._gathering else [engine for engine in self.engines if engine.takes]

    def _route(
        self, samples: Sequence[SampleId], work: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Chooses an engine for each of these samples, adds its work to that engine, and returns
        the engines' numbers: `NOWHERE` for all if no engine takes samples."""
        takers = self._takers()
        engines = (NOWHERE,) * len(samples)
        if takers:
            work = [self._seats.work[sample] for sample in samples] if work is None else work
            engines = self._router.route(samples, work, takers)
        self._seats.engine.update(zip(samples, engines, strict=True))
        return engines

    def _place(self, samples: Sequence[SampleId]) -> list[Command]:
        """The command to start these samples again; none while no engine takes samples."""
        if not samples or not self._takers():
            return []
        return [Place(samples=tuple(samples), engines=self._route(samples))]

    def _place_waiting(self) -> list[Command]:
        return self._place(self._seats.under_way({NOWHERE})) if self._takers() else []

    def _send(self, samples: Sequence[SampleId]) -> list[Command]:
        """Commands that move these samples, with their tokens, to other engines; a sample whose own
        engine takes samples (again) stays there. The caller has subtracted their work from their
        engines; this method adds it to the new ones."""
        routed: list[SampleId] = []
        seats = self._seats
        for sample in samples:
            source = self.engines[seats.source.setdefault(sample, seats.engine[sample])]
            if source.takes:
                seats.engine[sample] = source.number
                source.tokens += seats.work[sample]
            else:
                routed.append(sample)
        self._route(routed)
        by_engine: dict[int, list[SampleId]] = {}
        for sample in samples:
            by_engine.setdefault(seats.engine[sample], []).append(sample)
        return [Move(samples=tuple(by_engine[n]), engine=n) for n in sorted(by_engine)]
