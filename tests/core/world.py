"""A world in virtual time for the core: an engine that knows every length, a reward, a cursor.

It is the bus of every run with small ports of its own, which obey to the letter, and with an
`Unkind` around them that makes of their answers what it is told to: engine failures, missing or
slow verdicts, lost environments, responses that finish in the same instant in which they are
aborted.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rollpacker.bus import Bus, OwnPools, Recorded, Routes
from rollpacker.core.commands import (
    CancelScore,
    Commit,
    Defer,
    Drop,
    FetchPrompts,
    Finish,
    RestoreTrainer,
    Score,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Acted,
    Committed,
    Event,
    PromptsFetched,
    RunStarted,
    SampleScored,
    StopRequested,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import PoolName, PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.pooled_job import PooledJob, make_job, restore_job
from rollpacker.core.records import Entry, Record
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.unkind import Unkind, UnkindConfig
from tests.core.engines import Engines, Faults
from tests.core.environments import Dialogues, Environments
from tests.core.pools import EVALUATION_S, Broker, Driver, check_now
from tests.core.trails import Trail, Trails
from tests.core.trainer import Trainer, TrainerFaults


def published(**keys: object) -> TailBatchingConfig:
    """Tail batching as in the paper, with these settings."""
    return TailBatchingConfig(selection="published", **keys)  # type: ignore[arg-type]


@dataclass
class World:
    config: JobConfig
    num_rows: int = 10
    epochs: int = 1
    seed: int = 0
    length: Callable[[SampleId, random.Random], int] = lambda sample, rng: rng.randint(1, 20)
    unkind: UnkindConfig = field(default_factory=UnkindConfig)
    faults: Faults | None = None
    trainer_faults: TrainerFaults = field(default_factory=TrainerFaults)
    dialogues: Dialogues = field(default_factory=Dialogues)
    preemption_rate: float = 0.0
    sources: tuple[str, ...] = ("train",)
    """Prompts take turns among them."""
    stop_at_step: int | None = None
    stop_at_round: int | None = None
    """A stop is asked for while this round is under way."""
    stop_at_event: int | None = None
    """A stop is asked for after so many events."""
    broker: Broker | None = None
    """Of pools that the job shares. None: it has them for itself."""
    log: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = make_job(self.config)
        self.time_s = 0.0
        self.cursor = (0, 0)
        self.heap: list[tuple[float, int, Event]] = []
        self.counter = 0
        self.left: dict[SampleId, int] = {}
        """Tokens that an aborted or finished sample had, by whose noise it had."""
        self.trails: dict[SampleId, Trail] = {}
        """The same of trajectories: the tokens."""
        self.checking: set[SampleId] = set()
        self.retried: set[SampleId] = set()
        self.version = 0
        self.finished: str | None = None
        self.failed = False
        self.longest_queue = 0
        self.streamed: list[tuple[SampleId, ...]] = []
        """Groups whose gradients were begun, of this step."""
        self.snapshots: dict[int, tuple[dict, tuple[int, int], int]] = {}
        self.left_at: dict[int, tuple[dict[SampleId, int], dict[SampleId, Trail]]] = {}
        """`left` and `trails`, as a checkpoint would hold them."""
        self.committed_s: dict[int, float] = {}
        """When each step was committed: a resumed run's clock goes on from there."""
        self.committed: Committed | None = None
        """Waits until the step is evaluated."""
        self.first: Event | None = None
        """The same of a run that begins, or goes on, with an evaluation."""

    # -- the clock, and what happens next ----------------------------------------------

    def now(self) -> float:
        return self.time_s

    def stamp(self) -> float:
        return round(self.time_s, 6)  # as logs keep it

    def push(self, delay: float, event: Event, *, first: bool = False) -> None:
        """`first`: before whatever else happens at that time."""
        self.counter += 1
        turn = -self.counter if first else self.counter
        heapq.heappush(self.heap, (self.time_s + delay, turn, event))

    def run(self, max_events: int = 100_000) -> World:
        self.begin(RunStarted(time_s=0.0))
        return self.go_on(max_events)

    def resume_from(self, step: int, config: JobConfig | None = None) -> World:
        """A new process that knows nothing but the checkpoint of `step`, and its configuration."""
        state, cursor, version = self.snapshots[step]
        world = copy_of(self, config=config or self.config)
        world.job = restore_job(world.config, state)
        world.cursor, world.version = cursor, version
        world.left, world.trails = map(dict, self.left_at[step])
        world.time_s = self.committed_s[step]
        world.begin(Committed(time_s=0.0, step=step, checkpointed=True))
        return world.go_on()

    def begin(self, event: Event) -> None:
        """Join the parts; the run begins with this event, or with an evaluation before it."""
        self.engines = Engines(self, self.faults)
        self.environments = Environments(self, self.dialogues)
        self.walking = Trails(self)
        self.misfortune = Unkind(self.unkind, self, self.engines, self.environments, seed=self.seed)
        self.trainer = Trainer(self, self.trainer_faults)
        self.driver = None if self.broker is None else Driver(self, self.broker)
        pools = self.driver or OwnPools(lambda event: self.push(0.0, event))
        ports = [self.misfortune, Recorded(Defer, Drop), pools]
        self.bus = Bus(self.job, self, ports, sinks=[self.keep])
        if self.driver is not None and self.job.evaluation_is_due:
            self.first = event
            self.evaluate()
        else:
            self.push(0.0, event)

    def go_on(self, max_events: int = 100_000) -> World:
        while self.heap and not self.failed:
            max_events -= 1
            assert max_events, f"no end: waiting for {self.job.waiting_for()}"
            self.advance()
        assert self.finished, f"stuck: waiting for {self.job.waiting_for()}"
        return self

    def advance(self) -> None:
        """The next event."""
        self.engines.misfortune()
        self.trainer.misfortune()
        self.time_s, _, due = heapq.heappop(self.heap)
        event = self.happens(due)
        if event is not None:
            event = self.misfortune.answer(event)
            self.engines.leave(event)
            self.environments.heard(event)
            self.bus.take(event)
            if self.driver is not None:
                self.driver.heard(event)
            self.longest_queue = max(self.longest_queue, self.job.num_queued)

    def has(self, pool: PoolName) -> bool:
        """Whether what runs there may run."""
        return self.driver is None or self.driver.held == pool

    def happens(self, event: Event) -> Event | None:
        """What is heard, if what was expected still comes: checks may be cancelled."""
        if isinstance(event, SampleScored):
            if event.sample not in self.checking:
                return None
            self.checking.remove(event.sample)
        if isinstance(event, Acted) and not self.environments.meets(event):
            return None
        if not self.trainer.meets(event):
            return None
        if self.driver is not None and not self.driver.meets(event):
            return None
        if isinstance(event, Committed):
            self.engines.committed()
            self.trainer.committed()
        return self.engines.meet(event)

    @property
    def running(self) -> list[SampleId]:
        return self.engines.running

    def keep(self, entry: Entry) -> None:
        assert isinstance(entry, Record)
        self.log.append(entry)
        if isinstance(self.job, PooledJob):
            check_now(self.job)
        if len(self.log) == self.stop_at_event:
            self.push(0.0, StopRequested(time_s=0.0))

    def rng(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, *map(str, key))))

    # -- the ports ---------------------------------------------------------------------

    def routes(self) -> Routes:
        return {
            FetchPrompts: self.fetch,
            Score: self.score,
            CancelScore: self.cancel,
            StartGradients: self.start_gradients,
            TrainOn: self.train,
            SyncWeights: self.sync,
            RestoreTrainer: lambda command: self.trainer.restore(command),
            Commit: self.commit,
            Finish: self.finish,
        }

    def fetch(self, command: FetchPrompts) -> None:
        epoch, position = self.cursor
        rows = range(position, min(position + command.count, self.num_rows))
        ended = rows.stop == self.num_rows
        self.cursor = (epoch + 1, 0) if ended else (epoch, rows.stop)
        prompts = tuple(PromptId(self.sources[row % len(self.sources)], epoch, row) for row in rows)
        data_ended = ended and epoch + 1 == self.epochs
        self.push(
            0.0,
            PromptsFetched(time_s=0.0, prompts=prompts, epoch_ended=ended, data_ended=data_ended),
        )

    def preemptions(self, sample: SampleId) -> int:
        return int(self.rng("preempted", sample).random() < self.preemption_rate)

    def score(self, command: Score) -> None:
        sample = command.sample
        assert sample not in self.checking, "checked twice at the same time"
        self.checking.add(sample)
        if command.retry:
            self.retried.add(sample)
        value = float(self.rng("verdict", sample).random() < 0.5)
        seconds = self.misfortune.delay_s(sample)
        if command.timeout_s is not None and seconds > command.timeout_s:
            seconds, value = command.timeout_s, 0.0
        self.push(seconds, SampleScored(time_s=0.0, sample=sample, value=value, seconds=seconds))

    def cancel(self, command: CancelScore) -> None:
        for sample in command.samples:
            self.push(0.0, SampleScored(time_s=0.0, sample=sample, value=None, cause="cancelled"))

    def start_gradients(self, command: StartGradients) -> None:
        assert command.step == self.job.step + 1
        apart = self.job.config.trainer_apart
        if command.devices:
            engines = {device // self.engines.degree for device in command.devices}
            assert engines <= self.engines.released, "an engine has that device"
        else:
            assert apart or not self.running, "all devices: gradients once the engines are empty"
        self.streamed += command.groups

    def train(self, command: TrainOn) -> None:
        groups, weights = command.groups, command.weights
        assert command.num_streamed == sum(map(len, self.streamed))
        if self.job.config.stream.enabled:
            assert bool(command.num_streamed) != bool(command.not_streamed), command
        else:
            assert not command.not_streamed
        assert not self.running, "trained while the engine was at work"
        assert len(set(self.streamed)) == len(self.streamed), "begun twice"
        assert set(self.streamed) <= set(groups), "begun, but not trained on"
        self.streamed = []
        if weights is not None:
            assert [len(w) for w in weights] == [len(g) for g in groups]
            assert all(w > 0 for group in weights for w in group)
        trained = Trained(time_s=0.0, step=command.step, version=self.version + 1)
        self.trainer.answer(1.0, trained)

    def sync(self, command: SyncWeights) -> None:
        self.version = command.version
        self.engines.sync(command.version)
        self.trainer.answer(0.1, WeightsSynced(time_s=0.0, version=command.version))

    def commit(self, command: Commit) -> None:
        self.snapshots[command.step] = (self.job.state(), self.cursor, self.version)
        self.left_at[command.step] = dict(self.left), dict(self.trails)
        self.committed_s[command.step] = self.time_s
        if command.step == self.stop_at_step:
            self.push(0.0, StopRequested(time_s=0.0))
        durable = command.last or command.stopping
        committed = Committed(time_s=0.0, step=command.step, checkpointed=durable)
        if command.evaluate and self.driver is not None:
            self.committed = committed
            self.evaluate()
        else:
            self.trainer.answer(0.0, committed)

    def evaluate(self) -> None:
        assert self.driver is not None
        driver = self.driver
        driver.need("rollout", "evaluation", lambda: driver.done(EVALUATION_S))

    def evaluated(self) -> None:
        if self.first is not None:
            self.push(0.0, self.first)
        else:
            assert self.committed is not None
            self.trainer.answer(0.0, self.committed)
        self.first = self.committed = None

    def finish(self, command: Finish) -> None:
        self.finished, self.failed = command.reason, command.failed


_SETTINGS = ("config", "broker", "num_rows", "epochs", "seed", "length", "unkind", "faults",
             "sources", "trainer_faults", "preemption_rate", "dialogues")  # fmt: skip


def copy_of(world: World, **changed: object) -> World:
    """The same world, before anything has happened."""
    return World(**{name: getattr(world, name) for name in _SETTINGS} | changed)  # type: ignore[arg-type]


def events_of(world: World, kind: type) -> list:
    return [record.event for record in world.log if isinstance(record.event, kind)]


def commands_of(world: World, kind: type) -> list:
    return [c for record in world.log for c in record.commands if isinstance(c, kind)]
