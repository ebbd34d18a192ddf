"""The engines of the tests' world: as many as a run has, and what goes wrong with them.

Each incarnation of an engine is a `Life`. A life that ends either is dead, and says nothing more,
or was only stopped: it says what it had to say after somebody has noticed, as a zombie.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from rollpacker.bus import Routes
from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Continue,
    Launch,
    LetGo,
    Move,
    Place,
    Release,
    Replace,
    Resize,
)
from rollpacker.core.events import (
    EngineLost,
    EngineReady,
    Event,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
    StopRequested,
)
from rollpacker.core.ids import SampleId
from rollpacker.core.job.phases import Phase

if TYPE_CHECKING:
    from tests.core.world import World


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often what goes wrong with engines, by chance."""

    loss_rate: float = 0.0
    """Before so large a share of all events an engine is lost ..."""
    during: tuple[Phase, ...] = tuple(Phase)
    """... in these phases of the job."""
    most: int = 20
    """Losses in all; then faults stop."""
    most_between_commits: int = 2
    """With more the run gives up."""
    zombie_rate: float = 0.5
    """Of the lost ones: those that speak again."""
    stillborn_rate: float = 0.2
    """Of the replacements: those that are lost before they are ready."""
    notice_s: float = 3.0
    """A loss is noticed after up to so many seconds, often at once."""
    ready_s: float = 30.0
    """A replacement takes up to so long."""
    move_s: float = 5.0


@dataclass(frozen=True)
class Request:
    """What a launch asks for."""

    noise: SampleId
    carried: int
    length: int
    """Of the message at hand."""
    is_cut_off: bool = False
    num_kept: int | None = None
    """Of the carried tokens, so many come out the same; None: there are none."""


@dataclass
class Run:
    """A sample in an engine."""

    began_s: float
    """When it would have had no token yet."""
    event: Event
    """What will be said of it."""

    def tokens(self, now_s: float) -> int:
        """That it has, whenever in the run it began."""
        return int(round(now_s - self.began_s, 6))


@dataclass
class Life:
    """One incarnation of one engine."""

    engine: int
    incarnation: int
    version: int
    state: Literal["up", "dead", "stopped"] = "up"
    ready: bool = False
    """The core was told so, and was not told of its end."""
    lost: bool = False
    """The core was told."""
    runs: dict[SampleId, Run] = field(default_factory=dict)

    @property
    def name(self) -> dict[str, int]:
        return {"engine": self.engine, "incarnation": self.incarnation}


class Engines:
    """Obeys to the letter; `meet` says whether what was expected still comes."""

    def __init__(self, world: World, faults: Faults | None) -> None:
        self.world = world
        self.faults = faults or Faults()
        fleet = world.config.fleet
        num_engines = 1 if fleet is None else fleet.num_engines
        self.lives = {(n, 0): Life(n, 0, world.version, ready=True) for n in range(num_engines)}
        self.rng = random.Random(f"faults {world.seed}")
        self.requests: dict[SampleId, Request] = {}
        """Of all samples that were launched."""
        self.where: dict[SampleId, Life | None] = {}
        """Of those that have not ended; None: no engine was there."""
        self.moving: dict[SampleId, SampleMoved] = {}
        self.last: dict[SampleId, Life] = {}
        """Of those that have ended: in which engine."""
        self.let_go_of: set[tuple[SampleId, int]] = set()
        """And after which message."""
        self.stopping: set[SampleId] = set()
        """That were told to stop."""
        self.num_losses = 0
        self.num_recent = 0
        """Since the last commit."""
        self.num_unheard = 0
        self.round = 0
        devices = None if fleet is None else fleet.num_devices
        self.degree = (devices or num_engines) // num_engines
        self.released: set[int] = set()
        """Engines whose devices are the trainer's."""
        self.gathering: set[int] = set()
        """Engines of a new layout that nothing was heard of."""

    def routes(self) -> Routes:
        return {
            Launch: self.launch,
            Abort: self.abort,
            Continue: self.continue_,
            LetGo: self.let_go,
            Place: self.place,
            Move: self.move,
            Replace: self.replace,
            Release: self.release,
            Resize: self.resize,
        }

    # -- what the core says ------------------------------------------------------------

    def launch(self, command: Launch) -> None:
        world = self.world
        assert command.version == world.version
        if command.round != self.round:
            assert not self.running, "samples of another round are left"
            self.where.clear()
            self.round, self.degree = command.round, command.tensor_parallel
            self.released.clear()
        carried = command.carried or (0,) * len(command.samples)
        replaced = command.replaces or command.samples
        engines = command.engines or (0,) * len(command.samples)
        for sample, tokens, origin, number in zip(
            command.samples, carried, replaced, engines, strict=True
        ):
            assert sample not in self.requests, "launched twice"
            before = self.requests.get(origin)
            noise = before.noise if before else world.config.tail_batching.noise_of(origin)
            self.requests[sample] = self.request(sample, noise, tokens)
            world.environments.goes_on(sample)
            self.where[sample] = None
            if number != NOWHERE:
                self.start(sample, number, self.requests[sample].carried)
        if command.round == world.stop_at_round:
            world.push(0.0, StopRequested(time_s=0.0))

    def continue_(self, command: Continue) -> None:
        world = self.world
        engines = command.engines or (0,) * len(command.samples)
        for sample, number in zip(command.samples, engines, strict=True):
            assert sample not in self.where and sample not in self.stopping
            world.environments.goes_on(sample)
            turn = world.environments.played[sample].messages + 1
            noise, given = self.requests[sample].noise, world.environments.played[sample].given
            length, num_kept = world.walking.go_on(sample, given)
            is_cut_off = self.cuts_off(sample, turn)
            self.requests[sample] = Request(noise, num_kept or 0, length, is_cut_off, num_kept)
            before, self.where[sample] = self.last.get(sample), None
            if number != NOWHERE:
                takes = before is not None and before.ready and before.engine not in self.released
                assert not takes or number == before.engine, "another has what came before"
                self.start(sample, number, num_kept or 0)

    def request(self, sample: SampleId, noise: SampleId, carried: int) -> Request:
        """Of a launch."""
        world = self.world
        if world.config.acting is None:
            assert carried in (0, world.left.get(noise)), "carried is what was left"
            length = max(carried, world.length(noise, world.rng("length", noise)))
            return Request(noise, carried, length, num_kept=carried or None)
        assert carried in (0, len(world.trails.get(noise, ()))), "carried is what was left"
        length, num_kept = world.walking.begin(sample, noise, carried > 0)
        is_cut_off = self.cuts_off(sample, 1)
        return Request(noise, num_kept or 0, length, is_cut_off, num_kept)

    def let_go(self, command: LetGo) -> None:
        played = self.world.environments.played
        for sample in command.samples:
            assert sample not in self.where, "an engine has it"
            kept = sample, played[sample].messages
            assert kept not in self.let_go_of, "let go of twice"
            self.let_go_of.add(kept)

    def room(self, sample: SampleId) -> dict[str, int]:
        """What an engine says that keeps this one when its message has ended, by chance."""
        rng = self.world.rng("room", sample, self.world.environments.played[sample].messages)
        held = self.requests[sample].length
        return {"num_held": held, "room": rng.randint(-30, 30)} if rng.random() < 0.5 else {}

    def cuts_off(self, sample: SampleId, turn: int) -> bool:
        """Whether this message runs into the limit of a turn."""
        if self.world.config.acting is None:
            return False
        rate = self.world.dialogues.cut_off_rate
        who = self.world.environments.who(sample)
        return self.world.rng("cut off", who, turn).random() < rate

    def start(self, sample: SampleId, number: int, tokens: int) -> None:
        life = self.current(number)
        assert self.world.has("rollout"), f"{sample} on another job's pool"
        assert life.ready and not life.lost, f"{sample} on an engine that is not there"
        assert not self.gathering, "some begin before others"
        assert life.version == self.world.version, f"{sample} on an engine of old weights"
        assert sample not in life.runs, "twice in one engine"
        request = self.requests[sample]
        keeps = self.world.config.acting is not None and not request.is_cut_off
        event = SampleGenerated(
            time_s=0.0,
            sample=sample,
            num_tokens=request.length,
            finish_reason="length" if request.is_cut_off else "stop",
            version=life.version,
            preemptions=self.world.preemptions(sample),
            num_kept=request.num_kept,
            **(self.room(sample) if keeps else {}),
            **life.name,
        )
        life.runs[sample] = Run(self.world.time_s - tokens, event)
        self.where[sample] = life
        self.world.push(float(request.length - tokens), event)

    def abort(self, command: Abort) -> None:
        assert command.samples
        self.stopping.update(command.samples)
        for sample in command.samples:
            life = self.where[sample]
            moving = self.moving.pop(sample, None)
            if moving is not None and self.lives[moving.engine, moving.incarnation].lost:
                assert life is not None and not self.takers
                del self.where[sample], life.runs[sample]
                continue
            if life is None or life.lost:
                assert not self.takers, "it waits for nobody"
                del self.where[sample]
                continue
            run = life.runs[sample]
            event = SampleAborted(
                time_s=0.0,
                sample=sample,
                num_tokens=run.tokens(self.world.time_s),
                num_kept=self.requests[sample].num_kept,
                **life.name,
            )
            run.event = event
            self.world.push(0.0, event)

    def place(self, command: Place) -> None:
        assert command.samples
        for sample, number in zip(command.samples, command.engines, strict=True):
            before = self.where[sample]
            moved = self.moving.pop(sample, None)
            if before is not None:
                assert before.lost or moved is not None, f"{sample} is in an engine that works"
                if not before.lost:
                    del before.runs[sample]
            self.start(sample, number, self.requests[sample].carried)

    def move(self, command: Move) -> None:
        assert command.samples
        target = self.current(command.engine)
        for sample in command.samples:
            source = self.where[sample]
            before = self.moving.get(sample)
            assert source is not None and not source.lost
            if before is None:
                assert source is not target
            else:
                assert self.is_gone(before), "it was under way to an engine that takes it"
            event = SampleMoved(time_s=0.0, sample=sample, **target.name)
            self.moving[sample] = event
            self.world.push(self.rng.random() * self.faults.move_s, event)

    def is_gone(self, event: SampleMoved) -> bool:
        """Where it moves to takes nothing any more."""
        lost = self.lives[event.engine, event.incarnation].lost
        return lost or event.engine in self.released

    def release(self, command: Release) -> None:
        assert command.devices
        self.released = {device // self.degree for device in command.devices}
        assert len(self.released) * self.degree == len(command.devices), "an engine is split"
        assert self.takers, "nobody stays"

    def resize(self, command: Resize) -> None:
        assert not self.running and command.version == self.world.version
        assert command.tensor_parallel != self.degree
        for life in self.lives.values():
            life.ready, life.lost, life.state = False, True, "dead"
        self.released.clear()
        self.gathering = set(range(len(command.incarnations)))
        for number, incarnation in enumerate(command.incarnations):
            self.begin(Life(number, incarnation, command.version))

    def begin(self, life: Life) -> None:
        """It says that it is ready, or is lost before that."""
        self.lives[life.engine, life.incarnation] = life
        seconds = self.rng.random() * self.faults.ready_s
        if self.may_lose() and self.rng.random() < self.faults.stillborn_rate:
            self.lose(life, seconds)
        else:
            self.world.push(seconds, EngineReady(time_s=0.0, version=life.version, **life.name))

    def replace(self, command: Replace) -> None:
        key = (command.engine, command.incarnation)
        life = self.lives.get(key)
        assert command.version == self.world.version
        if life is None:
            assert self.lives[command.engine, command.incarnation - 1].lost
            life = Life(*key, command.version)
        else:
            assert not life.ready and life.version < command.version
            life.version = command.version
        assert command.engine not in self.released, "its devices are the trainer's"
        self.begin(life)

    def sync(self, version: int) -> None:
        """Engines that are there take the new weights."""
        for life in self.lives.values():
            if life.ready:
                life.version = version

    def current(self, number: int) -> Life:
        return max(
            (life for life in self.lives.values() if life.engine == number),
            key=lambda life: life.incarnation,
        )

    @property
    def running(self) -> list[SampleId]:
        """Samples in engines that the core counts on."""
        return [s for life in self.lives.values() if not life.lost for s in life.runs]

    @property
    def takers(self) -> list[Life]:
        """Those that may be given samples."""
        if self.gathering:
            return []
        return [one for one in self.lives.values() if one.ready and one.engine not in self.released]

    # -- what happens ------------------------------------------------------------------

    def meet(self, event: Event) -> Event | None:
        """What the core hears, if anything."""
        match event:
            case SampleGenerated() | SampleAborted() | SampleFailed():
                return self.end(event)
            case SampleMoved():
                return self.moved(event)
            case EngineReady(engine=engine, incarnation=incarnation):
                life = self.lives[engine, incarnation]
                life.ready = event.version == self.world.version and not life.lost
                if life.ready:
                    self.gathering.discard(engine)
            case EngineLost(engine=engine, incarnation=incarnation):
                life = self.lives[engine, incarnation]
                if not life.lost:
                    self.gathering.discard(engine)
                life.ready, life.lost = False, True
                self.num_unheard -= 1
        return event

    def end(self, event: SampleGenerated | SampleAborted | SampleFailed) -> Event | None:
        life = self.lives[event.engine, event.incarnation]
        run = life.runs.get(event.sample)
        if run is None or run.event is not event or life.state == "dead":
            return None
        if life.state == "stopped":
            if not life.lost:
                self.world.push(1.0, event)
                return None
        else:
            moving = self.moving.pop(event.sample, None)
            if moving is not None and self.lives[moving.engine, moving.incarnation].lost:
                self.where[event.sample] = None  # the core waits for an engine to start it on
                del life.runs[event.sample]
                return None
            del self.where[event.sample]
            self.last[event.sample] = life
        del life.runs[event.sample]
        return event

    def leave(self, event: Event) -> None:
        """What the sample has is there for its next launch, unless a zombie said so."""
        if isinstance(event, SampleGenerated | SampleAborted):
            life = self.lives[event.engine, event.incarnation]
            if not life.lost and self.world.config.acting is not None:
                self.world.walking.heard(event)
            elif not life.lost:
                self.world.left[self.requests[event.sample].noise] = event.num_tokens

    def moved(self, event: SampleMoved) -> Event | None:
        if self.moving.get(event.sample) is not event:
            return None
        source = self.where[event.sample]
        assert source is not None
        if source.state != "up":
            return None
        del self.moving[event.sample]
        run = source.runs.pop(event.sample)
        if self.lives[event.engine, event.incarnation].lost:
            self.where[event.sample] = None
            return None
        tokens = run.tokens(self.world.time_s)
        self.start(event.sample, event.engine, tokens)
        return replace(event, num_tokens=tokens)

    # -- what goes wrong ---------------------------------------------------------------

    def misfortune(self) -> None:
        """Before each event."""
        if self.world.job.phase not in self.faults.during:
            return
        if not self.faults.loss_rate or self.rng.random() >= self.faults.loss_rate:
            return
        alive = [life for life in self.lives.values() if life.ready and life.state == "up"]
        if alive and self.may_lose():
            self.lose(self.rng.choice(alive))

    def may_lose(self) -> bool:
        faults = self.faults
        recent = self.num_recent < faults.most_between_commits
        return bool(faults.loss_rate) and recent and self.num_losses < faults.most

    def lose(self, life: Life, seconds: float = 0.0) -> None:
        zombie = self.rng.random() < self.faults.zombie_rate
        life.state = "stopped" if zombie else "dead"
        self.num_losses += 1
        self.num_recent += 1
        self.num_unheard += 1
        if self.rng.random() < 0.5:
            seconds += self.rng.random() * self.faults.notice_s
        lost = EngineLost(time_s=0.0, reason=f"it is {life.state}", **life.name)
        self.world.push(seconds, lost, first=True)

    def committed(self) -> None:
        self.num_recent = self.num_unheard
