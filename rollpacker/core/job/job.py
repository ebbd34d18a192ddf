"""The job: a whole run as one state machine. `job.handle(event) -> [command, ...]`.

    FetchPrompts -> Launch -> (Score, Abort and Defer, which one `Round` at a time decides)
    -> TrainOn -> SyncWeights -> Commit -> the next step

Controller and simulator drive the same code, by `handle` alone. What the job waits for is its
phase; `core/job/phases.py` has the list. Its parts decide:

    queues:       which prompts wait, and which round is next;
    Round:        which samples of the current round are kept, aborted or deferred;
    ahead:        which prompts of the next step are begun in slots that stand empty;
    rewards:      when each check of a response starts;
    acting:       when each environment is asked for its answer;
    parallelism:  how many devices an engine has, by kind of round;
    stream:       which gradients are begun before the round is over;
    carry_limit:  how many tokens of earlier launches an engine verifies at once;
    racing:       whether it pays to launch more prompts than a step needs;
    lengths:      how much more short rounds launch than they need, and loss weights;
    ledger:       whether each prompt was trained on once, or dropped for a reason;
    fleet:        which engine a sample runs on, and what follows when an engine is lost;
    trainer:      whether a lost trainer is started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.checks.acting import Acting
from rollpacker.core.checks.reward_schedule import RewardSchedule
from rollpacker.core.commands import (
    Command,
    FetchPrompts,
    Finish,
    Release,
    RoundKind,
    StartGradients,
    SyncWeights,
)
from rollpacker.core.events import (
    Acted,
    Committed,
    EngineLost,
    EngineReady,
    Event,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
    SampleScored,
    StopRequested,
    Trained,
    TrainerLost,
    TrainerReady,
    WeightsSynced,
)
from rollpacker.core.fleet.fleet import DIRECTED, HEEDED, Fleet
from rollpacker.core.fleet.lost_processes import TrainerLosses
from rollpacker.core.fleet.parallelism import ParallelismPlanner
from rollpacker.core.fleet.routing import Known
from rollpacker.core.fleet.stream_plan import StreamPlan
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.phases import WAITS_FOR, Phase, ProtocolError, expect
from rollpacker.core.job.progress import MAX_EMPTY_STEPS, Ledger, Progress
from rollpacker.core.lengths.learned import Learned
from rollpacker.core.rounds import saved_queues
from rollpacker.core.rounds.ahead import Ahead
from rollpacker.core.rounds.carry_limit import CarryLimit
from rollpacker.core.rounds.dynamic_sampling import StepGroups, split_by_signal
from rollpacker.core.rounds.groups import RoundPlan, Waiting
from rollpacker.core.rounds.queues import NextRound, Queues
from rollpacker.core.rounds.racing import Racing
from rollpacker.core.rounds.round import Round, StrayEventError
from rollpacker.core.rounds.tail_batching import NO_RACE, Factors
from rollpacker.core.rounds.turn_round import TurnRound


class Job:
    HANDLERS: ClassVar[dict[type, str]] = {
        RunStarted: "_on_started",
        PromptsFetched: "_on_fetched",
        SampleGenerated: "_on_generated",
        SampleAborted: "_on_aborted",
        SampleFailed: "_on_failed",
        **dict.fromkeys((SampleMoved, EngineReady, EngineLost), "_on_engine"),
        TrainerLost: "_on_trainer_lost",
        TrainerReady: "_on_trainer_ready",
        Acted: "_on_acted",
        SampleScored: "_on_scored",
        Trained: "_on_trained",
        WeightsSynced: "_on_synced",
        Committed: "_on_committed",
        StopRequested: "_on_stop",
    }
    """Name of the method that handles each kind of event."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.phase = Phase.NEW
        self.progress = Progress()
        self.ledger = Ledger()
        self.queues = Queues(config)
        self.ahead = Ahead(config.tail_batching.look_ahead, config.samples_per_prompt)
        follows = config.follows_carrying
        self.carry_limit = CarryLimit(config.max_response_tokens, follows=follows)
        self.racing = Racing(follows=follows)
        self.lengths = Learned(config)
        self.rewards = RewardSchedule(config.rewards)
        self.acting = None if config.acting is None else Acting(config.acting)
        self.parallelism = ParallelismPlanner(config.parallelism)
        self.num_late = Counter[str]()  # by event name, and zombies
        layout, apart = config.layouts[0], config.trainer_apart
        self.fleet: Fleet | None = None
        if config.fleet is not None:
            by_turn = config.acting is not None and config.acting.work_by_turn
            self.fleet = Fleet(
                config.fleet,
                self.num_late,
                layout.train_group,
                trainer_apart=apart,
                by_turn=by_turn,
            )
        self.stream = StreamPlan(
            config.stream,
            layout,
            max_response_tokens=config.max_response_tokens,
            trainer_apart=apart,
            why_kept=str if self.fleet is None else self.fleet.why_kept,
        )
        self.trainer = TrainerLosses(config.max_trainer_losses)
        self._round: Round | None = None
        self._gathered: StepGroups | None = None
        """Groups of samples (one group for each prompt) that the rounds of this step have brought
        so far. None between steps."""
        self._stop_reason: str | None = None

    def handle(self, event: Event) -> list[Command]:
        """Handles an event, and returns the commands that answer it. Raises `ProtocolError`,
        `StrayEventError` or another `AssertionError` for an event that cannot happen, which is a
        bug in the program that sends the events."""
        if self.lengths.is_timed:
            self.lengths.take_time(event.time_s)
        # Every response comes by here at least twice: benchmarks/sim_speed.py.
        fleet, kind = self.fleet, type(event)
        if fleet is not None:
            unheard = kind in HEEDED and not fleet.heeds(event)  # type: ignore[arg-type]
            if unheard or fleet.given_up:
                return []
        if self.trainer.given_up:
            return []
        answer: list[Command] = getattr(self, self.HANDLERS[kind])(event)
        if fleet is not None:
            if fleet.unanswered:
                return fleet.direct(answer, self._on_aborted)
            for command in answer:
                if type(command) in DIRECTED:
                    return fleet.direct(answer, self._on_aborted)
        return answer

    # -- what others ask between two events --------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps committed so far."""
        return self.progress.step

    @property
    def version(self) -> int:
        """Number of optimizer steps applied, which is the version of the weights."""
        return self.progress.version

    @property
    def num_queued(self) -> int:
        """Number of deferred prompts, which an earlier round left unfinished for a later one."""
        return len(self.queues)

    def waiting_for(self) -> str:
        """What the job waits for, in words, for the message when a deadline has passed."""
        if self._round is not None:
            nobody = self.fleet is not None and self._round.num_under_way and self.fleet.nobody()
            if self.ahead.num_under_way and not self._round.num_under_way:
                return self.ahead.waiting_for()
            return nobody or self._round.waiting_for()
        what = WAITS_FOR.get(self.phase, "nothing")
        return what.format(step=self.step, next_step=self.step + 1, version=self.version)

    @property
    def waits_for_rewards(self) -> bool:
        """Whether all samples of the round have left the engines and only verdicts are missing."""
        is_empty = self._round is not None and not self._round.num_under_way
        return is_empty and not self.ahead.num_under_way

    @property
    def evaluation_is_due(self) -> bool:
        """Whether an evaluation is due before the first step, or before a resumed run goes on.
        After later steps `Commit.evaluate` says whether one is due."""
        return self.progress.evaluation_is_due(self.config.cadence, last=self.nothing_left())

    def nothing_left(self) -> bool:
        """Whether the run is over: no fresh prompts follow, and none is left unfinished."""
        data_ended = self.progress.data_ended and not self.queues.fresh
        ends = data_ended or self.progress.out_of_steps(self.config.max_steps)
        return ends and not self.num_queued

    # -- choosing the next round -------------------------------------------------------

    def _next_step(self) -> list[Command]:
        if self.progress.num_empty_steps == MAX_EMPTY_STEPS:
            reason = f"{MAX_EMPTY_STEPS} steps in a row had no group to train on"
            return self._finish(reason, failed=True)
        out_of_steps = self.progress.out_of_steps(self.config.max_steps)
        if self.nothing_left():
            return self._finish("every step is done" if out_of_steps else "the data ended")
        self.queues.all_awaited = not self.racing.races
        deferred = self.queues.next_round(ending=out_of_steps)
        if deferred is not None:
            return self._start(deferred)
        self.lengths.choose_factors(self.step)
        return self._fetch()

    @property
    def _num_wanted(self) -> int:
        """Number of groups that the next round should bring: a whole step's, or as many as earlier
        rounds of this step failed to bring."""
        return self._gathered.missing if self._gathered else self.config.prompts_per_step

    @property
    def _factors(self) -> Factors:
        """How much more the next round of fresh prompts launches than it needs."""
        return self.lengths.factors if self.racing.races else NO_RACE

    @property
    def _num_to_race(self) -> int:
        return self._factors.num_prompts(self._num_wanted)

    def _num_to_fetch(self) -> int:
        num_waiting = self.queues.num_racing(self._num_to_race)
        num_ahead = self._num_to_race if self._may_look_ahead else 0
        return self._num_to_race - num_waiting + num_ahead - len(self.queues.fresh)

    @property
    def _may_look_ahead(self) -> bool:
        """Whether prompts of the next step are begun in slots that stand empty: there is a next
        step."""
        follows = not self.progress.out_of_steps(self.config.max_steps, after=1)
        return self.config.tail_batching.look_ahead > 0 and follows

    def _fetch(self) -> list[Command]:
        if self.queues.fetched_all:
            return self._race_or_drain()
        count = self._num_to_fetch()
        if count <= 0:
            return self._start_race()
        self.phase = Phase.FETCHING
        return [FetchPrompts(count=count)]

    def _on_fetched(self, event: PromptsFetched) -> list[Command]:
        expect(self.phase, event)
        tail, queues = self.config.tail_batching, self.queues
        self.ledger.fetch(event.prompts)
        queues.fresh += map(Waiting, event.prompts)
        self.progress.data_ended = event.data_ended
        epoch_flush = event.epoch_ended and (tail.flush_each_epoch or not tail.enabled)
        if not event.data_ended and not epoch_flush and self._num_to_fetch() > 0:
            if not event.prompts and not event.epoch_ended:
                raise ProtocolError("the cursor gave no prompt although its epoch goes on")
            return self._fetch()
        queues.fetched_all = event.data_ended or epoch_flush
        return self._race_or_drain()

    def _race_or_drain(self) -> list[Command]:
        """Starts a round of the fetched prompts. At the end of an epoch too few may be left for a
        race: they go through the queue of the deferred."""
        tail, queues = self.config.tail_batching, self.queues
        num_fresh = self._num_to_race - queues.num_racing(self._num_to_race)
        if queues.fetched_all and len(queues.fresh) <= num_fresh:
            queues.draining, queues.fetched_all = True, False
        if not tail.enabled and queues.fresh:
            return self._start_race()
        num_ready = len(queues.fresh) + queues.num_racing(self._num_to_race)
        if queues.fresh and num_ready >= self._num_wanted:
            return self._start_race()
        queues.long.extend(queues.take_fresh(len(queues.fresh)))
        return self._next_step() if self._gathered is None else self._train(self._gathered)

    def _start_race(self) -> list[Command]:
        races = self.config.tail_batching.enabled and self.racing.races
        kind = RoundKind.SHORT if races else RoundKind.PLAIN
        prompts = self.queues.take_racing(self._num_to_race)
        num_samples = self._factors.num_samples(self.config.samples_per_prompt)
        needed = min(self._num_wanted, len(prompts))
        return self._start(
            NextRound(kind=kind, prompts=prompts, num_samples=num_samples, prompts_needed=needed)
        )

    def _start(self, next_round: NextRound) -> list[Command]:
        config, kind = self.config, next_round.kind
        self.progress.num_rounds += 1
        degree = self.parallelism.degree(kind)
        plan = next_round.plan(
            config,
            number=self.progress.num_rounds,
            version=self.version,
            tensor_parallel=degree,
            most_verified=self.carry_limit.most_verified,
        )
        self.rewards.begin_round()
        self._round = self._round_for(plan)
        if self._gathered is None:
            self._gathered = StepGroups(plan.prompts_needed)
        self.phase = Phase.ROLLING
        self.lengths.begin_round()
        commands = self._round.launch()
        self.stream.begin_if_due(
            kind,
            num_samples=self._round.num_launched,
            num_to_train=plan.prompts_needed * config.samples_per_prompt,
            prompt_tokens=config.prompt_tokens,
            layout=config.layout(degree),
        )
        return commands

    def _round_for(self, plan: RoundPlan) -> Round:
        if self.acting is None:
            return Round(plan, self.rewards, self.num_late)
        self.acting.begin_round()
        return TurnRound(plan, self.rewards, self.num_late, self.acting, self.stream)

    # -- the round at hand -------------------------------------------------------------

    def _round_of(self, event: SampleGenerated | SampleAborted | SampleFailed) -> Round:
        if self._round is None:
            raise StrayEventError(f"{type(event).__name__} of {event.sample} between rounds")
        return self._round

    @property
    def _counts_ends(self) -> bool:
        """Whether the job must tell `stream` (the plan of gradients before a round's end) which
        samples have ended. A `TurnRound` tells it by itself."""
        return self.stream.may_release and self.acting is None

    def _on_generated(self, event: SampleGenerated) -> list[Command]:
        if self.ahead.num_under_way and self.ahead.has(event.sample):
            return self._on_early(event)
        round_, stream = self._round or self._round_of(event), self.stream
        commands = round_.on_generated(event)
        # Asked here and not by `_counts_ends`: every response comes by.
        if (
            stream.may_release
            and self.acting is None
            and (devices := stream.on_finished(event.num_tokens))
        ):
            commands.append(Release(devices=devices))
        return self._after(round_, commands)

    def _on_scored(self, event: SampleScored) -> list[Command]:
        retry = self.rewards.free(event)
        if retry is None:
            raise StrayEventError(f"a verdict on {event.sample}, which nobody asked for")
        round_ = self._round
        if event.cause:
            is_chance = event.cause == "infrastructure" and retry < self.rewards.max_retries
            if round_ is not None and is_chance:
                if round_.awaits(event.sample):
                    return [self.rewards.ask_again(event.sample, retry)]
            elif event.cause == "cancelled" and (round_ is None or not round_.awaits(event.sample)):
                if round_ is None:
                    return []
                return self.rewards.start_waiting(event.sample.prompt.source, round_.missing)
        if round_ is None:
            self.num_late["SampleScored"] += 1
            return []
        commands = round_.on_scored(event)
        if self.rewards.num_waiting:
            commands += self.rewards.start_waiting(event.sample.prompt.source, round_.missing)
        return self._after(round_, commands)

    def _on_acted(self, event: Acted) -> list[Command]:
        assert self.acting is not None, f"{event} in a run without turns"
        retry, round_ = self.acting.free(event), self._round
        if retry is None:
            raise StrayEventError(f"an answer to {event.sample}, which nobody asked for")
        if not isinstance(round_, TurnRound):
            self.num_late["Acted"] += event.cause != "cancelled"
            return []
        return self._after(round_, round_.on_acted(event, retry))

    def _on_early(self, event: SampleGenerated | SampleAborted | SampleFailed) -> list[Command]:
        self.ahead.on_ended(event)
        return self._after(self._round_of(event), [])

    def _on_aborted(self, event: SampleAborted) -> list[Command]:
        if self.ahead.num_under_way and self.ahead.has(event.sample):
            return self._on_early(event)
        round_ = self._round_of(event)
        commands = round_.on_aborted(event)
        if self._counts_ends:
            self.stream.on_stopped(event.num_tokens)
        return self._after(round_, commands)

    def _on_failed(self, event: SampleFailed) -> list[Command]:
        if self.ahead.num_under_way and self.ahead.has(event.sample):
            return self._on_early(event)
        round_ = self._round_of(event)
        launched = round_.num_launched
        commands = round_.on_failed(event)
        if self._counts_ends:
            self.stream.on_stopped(0)
            self.stream.on_added(round_.num_launched - launched)
        return self._after(round_, commands)

    def _on_engine(self, event: EngineLost | EngineReady | SampleMoved) -> list[Command]:
        assert self.fleet is not None, f"{event} in a run whose engines are not told apart"
        if self.phase is Phase.DONE:
            return []
        commands, why = self.fleet.on_engine(event, self.version), self.fleet.given_up
        return self._finish(why, failed=True) if why else commands

    def _on_trainer_lost(self, event: TrainerLost) -> list[Command]:
        if self.phase is Phase.DONE:
            return []
        commands, why = self.trainer.on_lost(event, self.version), self.trainer.given_up
        return self._finish(why, failed=True) if why else [*commands]

    def _on_trainer_ready(self, event: TrainerReady) -> list[Command]:
        self.trainer.on_ready(event, self.version)
        return []

    def _after(self, round_: Round, commands: list[Command]) -> list[Command]:
        """Adds to `commands`, which `round_` has given, the start of gradients that the trainer can
        compute before the round is over. If the round is over, adds what follows it."""
        if round_.num_under_way:
            if self._may_look_ahead:
                commands += self.ahead.begin(
                    round_.plan, round_.num_launched, round_.num_under_way, self.queues.fresh
                )
            return commands + self._stream(round_) if self.stream.may_stream_early else commands
        # Not with the last verdict, which comes at another moment in each run.
        commands += self.ahead.stop()
        if self.ahead.num_under_way:
            return commands
        self.lengths.engine_is_empty()
        if round_.closed:
            return commands + self._close_round(round_)
        return commands + self._stream(round_) if self.stream.active else commands

    def _stream(self, round_: Round) -> list[Command]:
        if not (round_.has_complete or self.stream.num_waiting):
            return []  # most verdicts complete no group: benchmarks/sim_speed.py
        engine_empty = not round_.num_under_way
        if not self.stream.may_stream(engine_empty=engine_empty):
            return []
        complete = round_.take_complete()
        if self.config.dynamic_sampling.enabled:
            complete = [group for group in complete if round_.has_signal(group)]
        groups = self.stream.take_up(complete, engine_empty=engine_empty)
        # All, where nothing is generated; and where no engines are known, none were ever named.
        devices = () if engine_empty or self.fleet is None else self.stream.released
        start = StartGradients(step=self.step + 1, groups=groups, devices=devices)
        return [start] if groups else []

    def _close_round(self, round_: Round) -> list[Command]:
        groups, drops = round_.close()
        plan = round_.plan
        self.queues.defer(round_.deferred(), plan.defers_to)
        self.queues.fresh = self.ahead.take(self.queues.fresh)
        if self.racing.follows:
            carried = round_.carried_counts()
            self.carry_limit.observe(carried)
            self.racing.observe(plan.prompts_needed, self.lengths.rollout_s, carried)
        self.parallelism.observe(
            plan.kind, preemptions=round_.preemptions, num_samples=round_.num_launched
        )
        if self.config.dynamic_sampling.enabled:
            groups, without_signal = split_by_signal(groups, round_.has_signal)
            drops += without_signal
        self._round = None
        for drop in drops:
            self.ledger.drop(drop.prompt, drop.reason)
        self.lengths.end_round(round_)
        gathered = self._gathered
        assert gathered is not None
        if self.stream.active:
            gathered.note_streamed(*self.stream.streamed())
        lengths: list[int] = []
        if self.lengths.window is not None:  # nobody else asks for them
            lengths = [round_.length_of(sample) for group in groups for sample in group]
        gathered.add(groups, lengths)
        ends = self.queues.draining or self.progress.data_ended
        if gathered.may_refill(self.config.dynamic_sampling) and not ends:
            gathered.num_refills += 1
            return [*drops, *self._fetch()]
        return [*drops, *self._train(gathered)]

    def _train(self, gathered: StepGroups) -> list[Command]:
        self._gathered = None
        for group in gathered.groups:
            self.ledger.train(group[0].prompt)
        self.ledger.check()
        if not gathered.groups:
            self.progress.num_empty_steps += 1
            return self._commit()
        self.progress.num_empty_steps = 0
        self.phase = Phase.TRAINING
        weights = self.lengths.weights(gathered.lengths)
        refills = self.config.dynamic_sampling.enabled
        return [gathered.train_on(self.step + 1, weights, says_missing=refills)]

    # -- after the round ---------------------------------------------------------------

    def _on_trained(self, event: Trained) -> list[Command]:
        expect(self.phase, event, step=self.step + 1, version=self.version + 1)
        self.progress.version = event.version
        self.phase = Phase.SYNCING
        return [SyncWeights(version=self.version)]

    def _on_synced(self, event: WeightsSynced) -> list[Command]:
        expect(self.phase, event, version=self.version)
        self.lengths.synced()
        return self._commit()

    def _commit(self, num_steps: int = 1) -> list[Command]:
        self.phase = Phase.COMMITTING
        self.progress.step += num_steps
        last, stopping = self.nothing_left(), self._stop_reason is not None
        return [self.progress.commit(self.config.cadence, last=last, stopping=stopping)]

    def _on_committed(self, event: Committed) -> list[Command]:
        expect(self.phase, event, step=self.step)
        self.trainer.committed()
        if self._stop_reason is None:
            return self._next_step()
        if not event.checkpointed:  # the wish to stop came while the commit was under way
            return self._commit(num_steps=0)
        return self._finish(self._stop_reason)

    def _on_stop(self, event: StopRequested) -> list[Command]:
        self._stop_reason = self._stop_reason or event.reason
        return []

    def _on_started(self, event: RunStarted) -> list[Command]:
        expect(self.phase, event)
        return self._next_step()

    def _finish(self, reason: str, *, failed: bool = False) -> list[Command]:
        self.phase = Phase.DONE
        return [Finish(reason=reason, failed=failed)]

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State of the job for a checkpoint, part by part, as plain JSON values. Raises
        `ProtocolError` except between `Commit` and `Committed`, when nothing is in flight."""
        if self.phase is not Phase.COMMITTING:
            raise ProtocolError(f"a job cannot be saved in phase {self.phase}")
        return {
            **to_plain(self.progress),
            **saved_queues.saved(self.queues, self.config),
            **self.lengths.state(),
            **self.carry_limit.state(),
            **self.racing.saved(),
            "rewards": self.rewards.state(),
            "parallelism": self.parallelism.state(),
            "stream": self.stream.state(),
            "num_late": dict(sorted(self.num_late.items())),
            "ledger": to_plain(self.ledger),
            **({} if self.acting is None else {"acting": self.acting.state()}),
            **({} if self.fleet is None else {"fleet": to_plain(self.fleet.known)}),
        }

    @classmethod
    def restore(
        cls, config: JobConfig, state: Mapping[str, Any], *, data_ended: bool | None = None
    ) -> Job:
        """Job in the state in which it gave `Commit`, with this configuration. It goes on when it
        is given `Committed` for that step. `data_ended`: whether the dataset has no more prompts,
        which a new number of epochs can change. None: as the state says."""
        job = cls(config)
        job.phase = Phase.COMMITTING
        job.progress = Progress.restore(state)
        saved_queues.restore(job.queues, config, state)
        job.lengths.restore(state)
        job.carry_limit.restore(state)
        job.racing.restore(state)
        job.rewards.restore(state["rewards"])
        if job.acting is not None and "acting" in state:
            job.acting.restore(state["acting"])
        job.parallelism.restore(state["parallelism"])
        job.stream.restore(state["stream"])
        job.num_late.update(state["num_late"])
        if job.fleet is not None and "fleet" in state:
            job.fleet.known = from_plain(Known, state["fleet"])
        job.ledger = from_plain(Ledger, state["ledger"])
        job.ledger.check()
        if data_ended is not None:
            job.progress.data_ended = data_ended
        return job
