"""Drives a run in real time: the core decides, ports carry out its commands, and one task on the
event loop, the main task, does the slow work.

      engine's thread           event loop: checks            event loop: main task
           |                         |                              |
           | outputs                 | verdicts                     | PromptsFetched, Trained,
           v                         v                              v WeightsSynced, Committed
        +------------- bus.take(event): one lock, one total order ----------------------+
        |        stamp -> job.handle(event) -> the port of each command -> log          |
        +------+--------------------+----------------------+----------------------------+
               | Launch, Abort      | Score, CancelScore   | FetchPrompts, StartGradients,
               | at once            | on the event loop    | TrainOn, SyncWeights, Commit,
               v                    v                      v Finish: main task, in order
           Generation            Scoring     Fetching, Training, HandingOver, Commits
               |                    |                      |
            engine               rewards         cursor, trainer, engine, disk

    who waits            for what                              unblocked by
    engine's thread      the core's answer to what finished    `take` returning (microseconds)
    checks               reward functions                      their verdicts or their time limit
    main task            the next command of the slow kind     the bus, or a deadline (`Watch`)

The main task does one thing at a time, in order. While it computes gradients of groups before the
step is complete (`StartGradients`), verdicts still come in. What the core commands when a sample
has finished is done inside the engine's call, so that an abort takes effect at the same decode step
in every run. No decision is made here. The `Desk` keeps what is known of each sample.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rollpacker.bus import Bus, Port, Recorded, Routes, Unsaid
from rollpacker.cluster.seats.seat import Seat
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import OF_TURNS, Drop, FetchPrompts, Finish
from rollpacker.core.events import Committed, PromptsFetched, RunStarted, StopRequested
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.records import Entry, Observer, Session
from rollpacker.data.dataset import Cursor, PromptSet
from rollpacker.rewards.reward import Reward
from rollpacker.run.errors import BuildSamples, Decode
from rollpacker.run.folder.event_log import LogWriter
from rollpacker.run.folder.sample_rows import EvaluationRows, PromptColumns, SampleRows
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.ports.audience import Audience, nobody
from rollpacker.run.ports.carried import CarriedTokens
from rollpacker.run.ports.clock import RealClock
from rollpacker.run.ports.commits import Commits
from rollpacker.run.ports.desk import Desk
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.episodes import Episodes
from rollpacker.run.ports.evaluation import Evaluator
from rollpacker.run.ports.generation import Generation
from rollpacker.run.ports.hand_over import HandingOver, Publish
from rollpacker.run.ports.main_task import Deed, MainTask
from rollpacker.run.ports.player import Player
from rollpacker.run.ports.pools import open_pools
from rollpacker.run.ports.reasons import Reasons
from rollpacker.run.ports.recovery import Recovery
from rollpacker.run.ports.salvage import Salvage
from rollpacker.run.ports.scoring import Scoring
from rollpacker.run.ports.shared import Shared
from rollpacker.run.ports.shared_devices import SharedDevices
from rollpacker.run.ports.training import Training
from rollpacker.run.ports.watch import Watch
from rollpacker.trainer.trainer import Trainer

TICK_S = 0.25
"""Seconds between two looks at the deadlines of what the run waits for (engines, rewards), while
the main task has nothing to do. At each look, observers are also shown the new log entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A run's engines, trainer, rewards and so on, for its controller to connect and drive."""

    job: Job
    engines: Engines
    trainer: Trainer
    reward: Reward
    prompts: PromptSet
    eval_prompts: PromptSet | None
    cursor: Cursor
    build_samples: BuildSamples
    decode: Decode
    render: Decode
    """Turns prompt tokens into text, special tokens included, as the model sees the prompt."""
    log: LogWriter
    samples: SampleWriter | None
    carried: CarriedTokens | None = None
    """Keeps tokens generated for prompts put off to a later step. None: an empty store is made."""
    tokenizer: str = ""
    """SHA-256 of the tokenizer's vocabulary, for checkpoints. Empty if it is not known."""
    player: Player | None = None
    """Plays samples that take turns with environments. None if each sample is one response."""
    observers: Sequence[Observer] = ()
    audience: Audience = field(default_factory=nobody)


class Controller:
    """Drives a run to its end, from the present state of `parts.job` (the core, which decides)."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        *,
        checkpoints: Path,
        time_s: float,
        salvage: Salvage | None = None,
        seat: Seat | None = None,
        publish: Publish = lambda source: {},
    ) -> None:
        """`time_s`: what the run's clock shows at first (0 in a new run). `salvage`: responses that
        had finished when the run was interrupted; None: no resume. `seat`: connection to the
        scheduler of devices shared with other jobs; None: none are shared. `publish`: copies new
        weights to the engines' hosts while other jobs have the devices."""
        self.config = config
        self.parts = parts
        self.bus = bus = Bus(parts.job, RealClock(time_s), sinks=[parts.log.append])
        self._observing = Observing(bus, parts.observers)
        self._reasons = Reasons(bus)
        self._main = main = MainTask()
        self._watch = watch = Watch(bus, config.deadlines, parts.engines, parts.reward)
        self._devices = devices = self._make_devices(on_pools=seat is not None)
        tell = self._observing.feed
        self._pools = pools = open_pools(
            seat, publish, tell, bus, main, watch, devices=devices, engines=parts.engines
        )
        self._shared = shared = Shared(bus, main, Desk(), watch)
        self._carried = parts.carried or CarriedTokens(config.tail)
        self._salvage = salvage or Salvage(
            checkpoints.parent, in_order=config.rollout.is_repeatable
        )
        self._scoring = Scoring(
            shared,
            num_steps=config.num_steps(len(parts.prompts.rows)),
            reward=parts.reward,
            rows=parts.prompts.rows,
            decode=parts.decode,
        )
        self._generation = Generation(
            shared,
            self._scoring,
            engines=parts.engines,
            devices=self._devices,
            carried=self._carried,
            salvage=self._salvage,
            rows=parts.prompts.rows,
            sampling=config.sampling,
            checkpoints=checkpoints,
            episodes=self._make_episodes(),
        )
        self._evaluator = self._make_evaluator()
        self._recovery = Recovery(bus, shared.desk, watch, pools, parts.trainer, checkpoints)
        parts.audience.join(
            bus, parts.samples, stop=self.request_stop, observe=self._observing.feed
        )
        bus.connect(*self._ports())

    def _make_devices(self, *, on_pools: bool) -> SharedDevices:
        """Returns the object that lends shared devices to engines or trainer. `on_pools`: whether
        other jobs use these devices, too."""
        parts = self.parts
        return SharedDevices(
            self.bus,
            self._watch,
            on_pools,
            config=self.config,
            trainer=parts.trainer,
            engines=parts.engines,
        )

    def open(self, *, started_at: str, began_s: float, marks: tuple[str, ...] = ()) -> None:
        """Write this process's first log entries: the date (`started_at`), the run's step and
        settings, and the seconds since `began_s` (time of the run's clock) that loading took.
        `marks`: warnings for whoever reads the run's numbers, such as "unsandboxed"."""
        job = self.parts.job
        session = Session(
            started_at=started_at,
            time_s=began_s,
            step=job.step,
            job=job.config.to_plain(),
            slots=self.config.rollout.max_slots,
            marks=marks,
            data_ended=None if job.phase is Phase.NEW else self.parts.cursor.ended,
        )
        self.bus.write(session)
        self.bus.note("startup", self.bus.clock.now() - began_s, job.step, {})

    async def run(self) -> str:
        """Drive the run to its end. Returns the reason why it ended.

        Raises `RunError`, `EnginesLost`, `DeadlineExceeded`, `NonFiniteError`, `EngineError`,
        `LeaseLost`, `OSError` and whatever a part died of; the run can then be resumed from its
        last checkpoint.
        """
        self._main.open()
        self._generation.start()
        await self.parts.reward.open()
        if self.parts.player is not None:
            await self.parts.player.environments.open()
        try:
            await self.parts.audience.begin(self.parts.job.step)
            await self._begin()
            while True:
                todo = await self._next()
                self._main.post(self._observing.feed)
                if isinstance(todo, Finish):
                    return self._reasons.reason_of(todo)
                await self._recovery.through(todo)
        except asyncio.CancelledError:
            self._main.raise_why()
            raise
        finally:
            self._scoring.close()

    def request_stop(self, reason: str) -> None:
        """Ask the run to end after the current step, with a checkpoint. Thread-safe."""
        self.bus.take(StopRequested(time_s=0.0, reason=reason))

    def fail(self, error: BaseException) -> None:
        """End the run with this error after slow work at hand, such as training. Thread-safe."""
        self._main.post(self._main.fail, error)

    def end_at_once(self, error: BaseException) -> None:
        """End the run with this error; cancel slow work at hand, such as training. Thread-safe."""
        self._main.end_at_once(error)

    async def close(self) -> None:
        """Close engines, rewards, environments and trainer, and make the log durable."""
        self._pools.close()
        await self.parts.engines.close()
        await self.parts.reward.close()
        if self.parts.player is not None:
            await self.parts.player.environments.close()
        self.parts.trainer.close()
        with self.bus.lock:  # an engine may be about to say that the last one has ended
            self._salvage.close()
        self._observing.feed()
        self.parts.log.flush()

    def _ports(self) -> list[Port]:
        """Returns the ports, each of which carries out some kinds of the core's commands."""
        parts, shared = self.parts, self._shared
        bus, main = shared.bus, shared.main
        rows = None
        if parts.samples is not None:
            prompts = PromptColumns(parts.prompts.rows, parts.render)
            rows = SampleRows(shared.desk, parts.samples, prompts, parts.reward.names)
        training = Training(
            shared,
            config=self.config,
            devices=self._devices,
            engines=parts.engines,
            reward=parts.reward,
            asked=[one.metrics for one in (self._carried, self._generation.episodes) if one],
            build_samples=parts.build_samples,
            rows=rows,
        )
        commits = Commits(
            shared,
            self._scoring,
            self._evaluator,
            recovery=self._recovery,
            pools=self._pools,
            keep_last=self.config.checkpoint.keep_last,
            devices=self._devices,
            cursor=parts.cursor,
            carried=self._carried,
            salvage=self._salvage,
            tokenizer=parts.tokenizer,
            log=parts.log,
            samples=parts.samples,
            audience=parts.audience,
        )
        return [
            self._generation,
            self._scoring,
            Fetching(bus, main, parts.cursor),
            training,
            HandingOver(
                bus,
                main,
                shared.watch,
                trainer=parts.trainer,
                engines=parts.engines,
                devices=self._devices,
                publish=self._pools.publish,
            ),
            commits,
            self._recovery,
            main,
            self._carried,
            Recorded(Drop),
            *self._of_turns(),
            self._pools,
        ]

    def _make_evaluator(self) -> Evaluator:
        parts = self.parts
        return Evaluator(
            self.bus,
            self._watch,
            config=self.config,
            num_steps=self.config.num_steps(len(parts.prompts.rows)),
            prompts=parts.eval_prompts,
            generate=self._generation.collect,
            let_go=self._generation.let_go,
            pools=self._pools,
            reward=parts.reward,
            decode=parts.decode,
            audience=parts.audience,
            rows=self._evaluation_rows(),
            player=parts.player,
        )

    def _make_episodes(self) -> Episodes | None:
        player = self.parts.player
        if player is None:
            return None
        rows = self.parts.prompts.rows
        return Episodes(self._shared, self._scoring, player, rows=rows, carried=self._carried)

    def _of_turns(self) -> list[Port]:
        """Returns the port that carries out commands about turns with environments. Without
        environments, a stand-in that raises an error: the core gives no such command then."""
        episodes = self._generation.episodes
        return [Unsaid(*OF_TURNS)] if episodes is None else [episodes]

    def _evaluation_rows(self) -> EvaluationRows | None:
        parts = self.parts
        if parts.samples is None or parts.eval_prompts is None:
            return None
        prompts = PromptColumns(parts.eval_prompts.rows, parts.render)
        threshold = self.config.eval.pass_threshold
        return EvaluationRows(parts.samples, prompts, parts.reward.names, threshold)

    async def _begin(self) -> None:
        """Evaluate if that is due, then give the core its first event: `RunStarted` in a new run,
        else `Committed` for the step of the checkpoint."""
        job = self.parts.job
        if job.evaluation_is_due:
            await self._evaluator.evaluate(job.step)
        if job.phase is Phase.NEW:
            self.bus.take(RunStarted(time_s=0.0))
        else:
            self.bus.take(Committed(time_s=0.0, step=job.step, checkpointed=True))

    async def _next(self) -> Deed | Finish:
        """Wait for the next piece of slow work, or for the command `Finish`, which ends the run.
        Raises the error that a part of the run died of, or `DeadlineExceeded`."""
        while True:
            self.parts.log.raise_error()
            todo = await self._main.next(TICK_S)
            if todo is not None:
                return todo
            self._observing.feed()
            self._watch.check_rollout()
            await self._recovery.look()


class Observing:
    """Shows the log's entries to the observers. Entries are gathered in whatever thread logs them,
    and shown in order on the event loop, so that no engine waits for an observer."""

    def __init__(self, bus: Bus, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._unobserved: deque[Entry] = deque()
        bus.add_sink(self._unobserved.append)

    def feed(self) -> None:
        """Show the observers all log entries that they have not seen yet."""
        while self._unobserved:
            entry = self._unobserved.popleft()
            for observer in self._observers:
                observer.feed(entry)


@dataclass(frozen=True, slots=True)
class Fetching:
    """Carries out `FetchPrompts`: the next training prompts go to the core, as `PromptsFetched`."""

    bus: Bus
    main: MainTask
    cursor: Cursor

    def routes(self) -> Routes:
        return {FetchPrompts: lambda command: self.main.later(partial(self._fetch, command))}

    async def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self.cursor.take(command.count)
        self.bus.take(
            PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            )
        )
