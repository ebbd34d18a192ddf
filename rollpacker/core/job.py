"""The job: a whole run as one state machine. `job.handle(event) -> [command, ...]`.

    FetchPrompts -> Launch -> (Score, Abort, Defer) -> TrainOn -> SyncWeights -> Commit -> next
                    ^ one Round at a time decides these

    phase       waits for                                   and is left by
    new         RunStarted                                  RunStarted
    fetching    prompts from the dataset cursor             PromptsFetched
    rolling     responses, then the verdicts on those kept  the Round is closed
    training    the optimizer step                          Trained
    syncing     the engines to take the new weights         WeightsSynced
    committing  the step to become durable                  Committed
    done        nothing

The job holds the long queue and the ledger, and decides which kind of round comes next. It is the
only thing that a driver talks to; controller and simulator drive the same code.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from rollpacker.core.commands import (
    Command,
    Commit,
    Drop,
    FetchPrompts,
    Finish,
    Release,
    RoundKind,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.debias import Debias
from rollpacker.core.dynamic_sampling import NO_SIGNAL, StepGroups
from rollpacker.core.events import (
    Committed,
    Event,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    StopRequested,
    Trained,
    WeightsSynced,
)
from rollpacker.core.factor_plan import FactorPlanner
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job_config import JobConfig
from rollpacker.core.ledger import Ledger
from rollpacker.core.parallelism import ParallelismPlanner
from rollpacker.core.reward_schedule import RewardSchedule
from rollpacker.core.rounds import Round, RoundPlan, StrayEventError
from rollpacker.core.stream_plan import DeviceLayout, StreamPlan
from rollpacker.core.tail_batching import Factors


class Phase(StrEnum):
    NEW = "new"
    FETCHING = "fetching"
    ROLLING = "rolling"
    TRAINING = "training"
    SYNCING = "syncing"
    COMMITTING = "committing"
    DONE = "done"


MAX_EMPTY_STEPS = 3
"""So many steps in a row without anything to train on end the run."""


CHOOSE_EVERY = 10
"""Steps after which the factors are chosen anew, if they are chosen at all."""


class ProtocolError(AssertionError):
    """The driver sent an event that does not fit the phase: a bug in the driver."""


class Job:
    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.phase = Phase.NEW
        self.step = 0
        """Steps committed."""
        self.version = 0
        """Optimizer steps applied; a step without any trainable group does not add one."""
        self.ledger = Ledger()
        self.queue: deque[tuple[PromptId, int]] = deque()
        """The long queue: deferred prompts and the attempt that comes next, first in, first out."""
        tail = config.tail_batching
        self.tier_queues: tuple[deque[tuple[PromptId, int]], ...] = tuple(
            deque() for _ in tail.tiers if tail.enabled
        )
        """Deferred prompts that wait for a further race, by tier."""
        self.factors = tail.factors
        """Of the short rounds, now."""
        self.rewards = RewardSchedule(config.rewards)
        self.parallelism = ParallelismPlanner(config.parallelism)
        self.stream = StreamPlan(
            config.stream,
            config.layouts[0],
            max_response_tokens=config.max_response_tokens,
            trainer_apart=config.trainer_apart,
        )
        self.lengths: Debias | None = None
        """The policy's own lengths, and the weights that undo the selection."""
        if tail.enabled and (tail.debias != "none" or tail.chooses):
            self.lengths = Debias(tail.debias, cap=config.max_response_tokens)
        self.planner: FactorPlanner | None = None
        """Chooses the factors."""
        if tail.chooses:
            self.planner = FactorPlanner(
                config.prompts_per_step,
                config.samples_per_prompt,
                max_length_shift=tail.max_length_shift,
                debiased=tail.debias != "none",
            )
        self.num_late = Counter[str]()
        """Late events, by event name."""
        self._num_rounds = 0
        self._fresh: list[PromptId] = []
        """Fetched for the round that is being put together."""
        self._draining = False
        """The epoch or the run ends: the queue is emptied before anything fresh is fetched."""
        self._data_ended = False
        self._round: Round | None = None
        self._round_tier = 0
        """Where prompts that the round defers go: a tier's queue, or beyond the last the long
        one."""
        self._gathered: StepGroups | None = None
        """What the rounds of this step have brought; None between steps."""
        self._streams = False
        """Something of this round may be streamed."""
        self._to_stream: list[tuple[SampleId, ...]] = []
        """Groups of the round that the trainer might start on."""
        self._now = 0.0
        """Time of the event at hand, to the microsecond as the log has it."""
        self._since = 0.0
        """When the phase began that a planner learns the duration of."""
        self._rollout_s = 0.0
        """How long the engine was busy with the round; 0 while it is."""
        self._num_empty_steps = 0
        self._stop_reason: str | None = None
        self._evaluated_step: int | None = None
        """The step that was evaluated last."""
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            SampleGenerated: self._on_generated,
            SampleScored: self._on_scored,
            SampleAborted: self._on_aborted,
            SampleFailed: self._on_failed,
            PromptsFetched: self._on_fetched,
            Trained: self._on_trained,
            WeightsSynced: self._on_synced,
            Committed: self._on_committed,
            StopRequested: self._on_stop,
            RunStarted: self._on_started,
        }

    def handle(self, event: Event) -> list[Command]:
        """The core's answer to what happened. Raises `ProtocolError`, `StrayEventError` or another
        `AssertionError` for what cannot happen: a bug in the driver."""
        if self.planner is not None:
            self._now = round(event.time_s, 6)
        return self._handlers[type(event)](event)

    def waiting_for(self) -> str:
        """What the job waits for, in words, for the message of a deadline."""
        match self.phase:
            case Phase.ROLLING:
                assert self._round is not None
                return self._round.waiting_for()
            case Phase.FETCHING:
                return "prompts from the dataset"
            case Phase.TRAINING:
                return f"the optimizer step of step {self.step + 1}"
            case Phase.SYNCING:
                return f"the engine to take version {self.version} of the weights"
            case Phase.COMMITTING:
                return f"the commit of step {self.step}"
            case Phase.NEW | Phase.DONE:
                return "nothing"

    @property
    def waits_for_rewards(self) -> bool:
        """The engine is done with the round; only verdicts are missing."""
        return self._round is not None and not self._round.num_in_engine

    # -- choosing the next round -------------------------------------------------------

    def _next_step(self) -> list[Command]:
        config = self.config
        if not self.num_queued:
            self._draining = False
        if self._out_of_steps():
            self._draining = True
        if self._num_empty_steps == MAX_EMPTY_STEPS:
            reason = f"{MAX_EMPTY_STEPS} steps in a row had no group to train on"
            return self._finish(reason, failed=True)
        if self._nothing_left():
            return self._finish("every step is done" if self._out_of_steps() else "the data ended")
        if self._draining:
            for waiting in self.tier_queues:
                self.queue.extend(waiting)
                waiting.clear()
        if len(self.queue) >= config.prompts_per_step:
            return self._start_queue_round(RoundKind.LONG)
        if self._draining and self.queue:
            return self._start_queue_round(RoundKind.FLUSH)
        for tier in reversed(range(len(self.tier_queues))):
            if len(self.tier_queues[tier]) >= self._num_racing(tier):
                return self._start_cascade(tier)
        self._fresh = []
        self._choose_factors()
        return self._fetch()

    def _choose_factors(self) -> None:
        """With "auto": now and then, and as soon as enough is known."""
        planner = self.planner
        if planner is None or not planner.ready or self.lengths is None:
            return
        model = self.lengths.model
        if model is not None and (planner.current is None or self.step % CHOOSE_EVERY == 0):
            self.factors = Factors(*planner.choose(model).factors)

    @property
    def num_queued(self) -> int:
        """Deferred prompts, whatever they wait for."""
        return len(self.queue) + sum(len(waiting) for waiting in self.tier_queues)

    def _num_racing(self, tier: int) -> int:
        """Prompts that a race of this tier launches."""
        factors = self.config.tail_batching.tiers[tier].factors
        return factors.num_prompts(self.config.prompts_per_step)

    def _out_of_steps(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def _nothing_left(self) -> bool:
        return not self.num_queued and (self._data_ended or self._out_of_steps())

    def _fetch(self) -> list[Command]:
        self.phase = Phase.FETCHING
        return [FetchPrompts(count=self._num_fresh() - len(self._fresh))]

    def _num_fresh(self) -> int:
        """Prompts that a round of fresh ones launches."""
        return self.factors.num_prompts(self._num_wanted)

    @property
    def _num_wanted(self) -> int:
        """Groups that the next round should bring: a whole step's, or what a refill replaces."""
        gathered = self._gathered
        return self.config.prompts_per_step if gathered is None else gathered.missing

    def _on_fetched(self, event: PromptsFetched) -> list[Command]:
        self._expect(Phase.FETCHING, event)
        tail = self.config.tail_batching
        self.ledger.fetch(event.prompts)
        self._fresh += event.prompts
        wanted = self._num_fresh()
        self._data_ended = event.data_ended
        epoch_flush = event.epoch_ended and (tail.flush_each_epoch or not tail.enabled)
        if not event.data_ended and not epoch_flush and len(self._fresh) < wanted:
            if not event.prompts and not event.epoch_ended:
                raise ProtocolError("the cursor gave no prompt although its epoch goes on")
            return self._fetch()
        if event.data_ended or epoch_flush:
            self._draining = True
        if not tail.enabled and self._fresh:
            return self._start_fresh_round(RoundKind.PLAIN)
        if self._fresh and len(self._fresh) >= self._num_wanted:
            return self._start_fresh_round(RoundKind.SHORT)
        # Too few for a race: what is left of the epoch goes through the queue with the stragglers.
        self.queue.extend((prompt, 0) for prompt in self._fresh)
        return self._next_step() if self._gathered is None else self._train(self._gathered)

    def _start_fresh_round(self, kind: RoundKind) -> list[Command]:
        config = self.config
        prompts, self._fresh = self._fresh, []
        return self._start(
            kind,
            [(prompt, 0) for prompt in prompts],
            num_samples=self.factors.num_samples(config.samples_per_prompt),
            prompts_needed=min(self._num_wanted, len(prompts)),
        )

    def _start_cascade(self, tier: int) -> list[Command]:
        config = self.config
        prompts = [self.tier_queues[tier].popleft() for _ in range(self._num_racing(tier))]
        return self._start(
            RoundKind.CASCADE,
            prompts,
            num_samples=config.tail_batching.tiers[tier].factors.num_samples(
                config.samples_per_prompt
            ),
            prompts_needed=config.prompts_per_step,
            tier=tier + 1,
        )

    def _start_queue_round(self, kind: RoundKind) -> list[Command]:
        count = min(self.config.prompts_per_step, len(self.queue))
        prompts = [self.queue.popleft() for _ in range(count)]
        return self._start(
            kind, prompts, num_samples=self.config.samples_per_prompt, prompts_needed=count
        )

    def _start(
        self,
        kind: RoundKind,
        prompts: list[tuple[PromptId, int]],
        *,
        num_samples: int,
        prompts_needed: int,
        tier: int = 0,
    ) -> list[Command]:
        config = self.config
        self._num_rounds += 1
        plan = RoundPlan(
            number=self._num_rounds,
            kind=kind,
            version=self.version,
            prompts=tuple(prompts),
            num_samples=num_samples,
            samples_needed=config.samples_per_prompt,
            prompts_needed=prompts_needed,
            race=config.tail_batching.race if config.rewards.overlap else "generated",
            balance_sources=config.tail_batching.balance_sources,
            max_retries=config.max_retries,
            tensor_parallel=self.parallelism.degree(kind),
            speculate=kind in config.speculate,
            min_verdicts=config.min_verdicts,
        )
        self._round = Round(plan, self.rewards, self.num_late)
        self.rewards.begin_round()
        if self._gathered is None:
            self._gathered = StepGroups(prompts_needed)
        self._round_tier = tier
        self.phase = Phase.ROLLING
        self._since, self._rollout_s = self._now, 0.0
        commands = self._round.launch()
        stream = config.stream
        self._streams = stream.enabled and (
            stream.reward_wait or kind in stream.kinds or config.trainer_apart
        )
        if self._streams:
            self._to_stream = []
            self.stream.begin(
                kind,
                num_samples=self._round.num_launched,
                num_to_train=prompts_needed * config.samples_per_prompt,
                prompt_tokens=config.prompt_tokens,
                layout=self._layout(plan.tensor_parallel),
            )
        return commands

    def _layout(self, tensor_parallel: int) -> DeviceLayout:
        layouts = self.config.layouts
        return next((x for x in layouts if x.tensor_parallel == tensor_parallel), layouts[0])

    # -- the round at hand -------------------------------------------------------------

    def _on_generated(self, event: SampleGenerated) -> list[Command]:
        round_ = self._round
        if round_ is None:
            raise _no_round("generation", event)
        commands = round_.on_generated(event)
        if self._streams:
            devices = self.stream.on_finished(event.num_tokens)
            if devices:
                commands.append(Release(devices=devices))
        return self._after(round_, commands)

    def _on_scored(self, event: SampleScored) -> list[Command]:
        retry = self.rewards.free(event)
        if retry is None:
            raise StrayEventError(
                f"a verdict on {event.sample}, which was not handed to the reward"
            )
        round_ = self._round
        if event.cause:
            if round_ is not None and self.rewards.may_ask_again(event, retry):
                if round_.awaits(event.sample):
                    return [self.rewards.ask_again(event.sample, retry)]
            elif event.cause == "cancelled" and (round_ is None or not round_.awaits(event.sample)):
                return [] if round_ is None else self._start_waiting(round_, event)
        if round_ is None:
            self.num_late["SampleScored"] += 1
            return []
        commands = round_.on_scored(event)
        if self.rewards.num_waiting:
            commands += self._start_waiting(round_, event)
        return self._after(round_, commands)

    def _start_waiting(self, round_: Round, event: SampleScored) -> list[Command]:
        """A worker of this kind has become free."""
        return self.rewards.start_waiting(event.sample[0][0], round_.missing)

    def _on_aborted(self, event: SampleAborted) -> list[Command]:
        round_ = self._round
        if round_ is None:
            raise _no_round("abort", event)
        commands = round_.on_aborted(event)
        if self._streams:
            self.stream.on_stopped(event.num_tokens)
        return self._after(round_, commands)

    def _on_failed(self, event: SampleFailed) -> list[Command]:
        round_ = self._round
        if round_ is None:
            raise _no_round("failure", event)
        launched = round_.num_launched
        commands = round_.on_failed(event)
        if self._streams:
            self.stream.on_stopped(0)
            self.stream.on_added(round_.num_launched - launched)
        return self._after(round_, commands)

    def _after(self, round_: Round, commands: list[Command]) -> list[Command]:
        """What every event of a round ends with: stream what can be, close it if it is over."""
        if not round_.num_in_engine:
            if not self._rollout_s:
                self._rollout_s = self._now - self._since
            if round_.closed:
                return commands + self._close_round(round_)
        if self._streams:
            commands += self._stream(round_)
        return commands

    def _stream(self, round_: Round) -> list[Command]:
        stream = self.stream
        engine_empty = not round_.num_in_engine
        if not stream.may_stream(engine_empty=engine_empty):
            return []
        complete = round_.take_complete()
        if self.config.dynamic_sampling.enabled:
            complete = [group for group in complete if round_.has_signal(group)]
        self._to_stream += complete
        if not self._to_stream:
            return []
        groups = stream.groups_to_stream(self._to_stream, engine_empty=engine_empty)
        if not groups:
            return []
        self._to_stream = self._to_stream[len(groups) :]
        return [StartGradients(step=self.step + 1, groups=groups)]

    def _close_round(self, round_: Round) -> list[Command]:
        groups, drops = round_.close()
        queues = (*self.tier_queues, self.queue)
        is_race = round_.plan.kind in (RoundKind.SHORT, RoundKind.CASCADE)
        queues[self._round_tier if is_race else -1].extend(round_.deferred())
        self.parallelism.observe(
            round_.plan.kind, preemptions=round_.preemptions, num_samples=round_.num_launched
        )
        if self.config.dynamic_sampling.enabled:
            drops += [
                Drop(prompt=group[0].prompt, reason=NO_SIGNAL)
                for group in groups
                if not round_.has_signal(group)
            ]
            groups = tuple(group for group in groups if round_.has_signal(group))
        self._round = None
        for drop in drops:
            self.ledger.drop(drop.prompt, drop.reason)
        self._learn(round_)
        gathered = self._gathered
        assert gathered is not None
        if self._streams:
            gathered.note_streamed(*self.stream.streamed())
        gathered.add(groups, (round_.length_of(sample) for group in groups for sample in group))
        if self._may_refill(gathered):
            gathered.num_refills += 1
            self._fresh = []
            return [*drops, *self._fetch()]
        return [*drops, *self._train(gathered)]

    def _may_refill(self, gathered: StepGroups) -> bool:
        config = self.config.dynamic_sampling
        ends = self._draining or self._data_ended
        left = gathered.num_refills < config.max_refills
        return config.enabled and left and gathered.missing > 0 and not ends

    def _learn(self, round_: Round) -> None:
        """Take in what the round showed."""
        if self.planner is not None:
            self.planner.observe_round(
                round_.plan.kind,
                steps=round_.steps,
                tokens=round_.tokens(),
                seconds=self._rollout_s,
            )
        if self.lengths is not None:
            for prompt, finished, stopped in round_.lengths():
                self.lengths.observe(prompt, finished, stopped)

    def _train(self, gathered: StepGroups) -> list[Command]:
        """The step's rounds are over: train on what they brought."""
        self._gathered = None
        groups = tuple(gathered.groups)
        for group in groups:
            self.ledger.train(group[0].prompt)
        self.ledger.check()
        self._num_empty_steps = 0 if groups else self._num_empty_steps + 1
        if not groups:
            return self._commit()
        self.phase = Phase.TRAINING
        self._since = self._now
        missing = gathered.missing if self.config.dynamic_sampling.enabled else 0
        streamed, why_not = gathered.streamed
        return [
            TrainOn(
                step=self.step + 1,
                groups=groups,
                weights=self._weights(gathered),
                num_missing=missing,
                num_streamed=streamed,
                not_streamed="" if streamed else why_not,
            )
        ]

    def _weights(self, gathered: StepGroups) -> tuple[tuple[float, ...], ...] | None:
        """Of the step's samples."""
        flat = None if self.lengths is None else self.lengths.step(gathered.lengths)
        if flat is None:
            return None
        weights = iter(flat)
        return tuple(tuple(next(weights) for _ in group) for group in gathered.groups)

    # -- after the round ---------------------------------------------------------------

    def _on_trained(self, event: Trained) -> list[Command]:
        self._expect(Phase.TRAINING, event)
        if event.step != self.step + 1 or event.version != self.version + 1:
            raise ProtocolError(
                f"trained step {event.step} to version {event.version}, expected step "
                f"{self.step + 1} and version {self.version + 1}"
            )
        self.version = event.version
        self.phase = Phase.SYNCING
        return [SyncWeights(version=self.version)]

    def _on_synced(self, event: WeightsSynced) -> list[Command]:
        self._expect(Phase.SYNCING, event)
        if event.version != self.version:
            raise ProtocolError(f"synced version {event.version} instead of {self.version}")
        if self.planner is not None:
            self.planner.observe_fixed(self._now - self._since)
        return self._commit()

    def _commit(self) -> list[Command]:
        self.phase = Phase.COMMITTING
        self.step += 1
        return [self._commit_step()]

    def _commit_step(self) -> Commit:
        last, stopping = self._nothing_left(), self._stop_reason is not None
        evaluate = self.evaluation_is_due and not stopping
        if evaluate:
            self._evaluated_step = self.step
        cadence = self.config.cadence
        return Commit(
            step=self.step,
            last=last,
            stopping=stopping,
            checkpoint=cadence is not None
            and cadence.checkpoint_is_due(self.step, ending=last or stopping),
            evaluate=evaluate,
        )

    @property
    def evaluation_is_due(self) -> bool:
        """Before the run goes on: it is about to begin, or its step is committed. A driver that
        starts or resumes a run asks; later `Commit` says it."""
        cadence = self.config.cadence
        return cadence is not None and cadence.evaluation_is_due(
            self.step, evaluated_step=self._evaluated_step, last=self._nothing_left()
        )

    def _on_committed(self, event: Committed) -> list[Command]:
        self._expect(Phase.COMMITTING, event)
        if event.step != self.step:
            raise ProtocolError(f"committed step {event.step} instead of {self.step}")
        if self._stop_reason is None:
            return self._next_step()
        if not event.checkpointed:  # the wish to stop came while the commit was under way
            return [self._commit_step()]
        return self._finish(self._stop_reason)

    def _on_stop(self, event: StopRequested) -> list[Command]:
        self._stop_reason = self._stop_reason or event.reason
        return []

    def _on_started(self, event: RunStarted) -> list[Command]:
        self._expect(Phase.NEW, event)
        return self._next_step()

    def _finish(self, reason: str, *, failed: bool = False) -> list[Command]:
        self.phase = Phase.DONE
        return [Finish(reason=reason, failed=failed)]

    def _expect(self, phase: Phase, event: Event) -> None:
        if self.phase is not phase:
            raise ProtocolError(f"{type(event).__name__} in phase {self.phase}")

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Only between `Commit` and `Committed`, when nothing is in
        flight."""
        if self.phase is not Phase.COMMITTING:
            raise ProtocolError(f"a job cannot be saved in phase {self.phase}")
        return {
            "step": self.step,
            "version": self.version,
            "num_rounds": self._num_rounds,
            "queue": _queue_to_plain(self.queue),
            "tier_queues": [_queue_to_plain(waiting) for waiting in self.tier_queues],
            "factors": list(self.factors),
            "rewards": self.rewards.state(),
            "parallelism": self.parallelism.state(),
            "stream": self.stream.state(),
            "lengths": None if self.lengths is None else self.lengths.state(),
            "planner": None if self.planner is None else self.planner.state(),
            "draining": self._draining,
            "data_ended": self._data_ended,
            "num_empty_steps": self._num_empty_steps,
            "evaluated_step": self._evaluated_step,
            "num_late": dict(sorted(self.num_late.items())),
            "ledger": self.ledger.state(),
        }

    @classmethod
    def restore(
        cls, config: JobConfig, state: Mapping[str, Any], *, data_ended: bool | None = None
    ) -> Job:
        """The job as it was when it said `Commit`; it goes on when it is given `Committed` for that
        step.

        `data_ended` is what the cursor says now, if the run was given more epochs since.
        """
        job = cls(config)
        job.phase = Phase.COMMITTING
        job.step = state["step"]
        job.version = state["version"]
        job._num_rounds = state["num_rounds"]
        job.queue.extend(_queue_from_plain(state["queue"]))
        for tier, plain in enumerate(state["tier_queues"]):
            # A tier that the configuration no longer has leaves its prompts to the long rounds.
            known = tier < len(job.tier_queues)
            (job.tier_queues[tier] if known else job.queue).extend(_queue_from_plain(plain))
        if job.planner is not None and state["planner"] is not None:
            job.planner.restore(state["planner"])
            job.factors = Factors(*state["factors"])
        job.rewards.restore(state["rewards"])
        job.parallelism.restore(state["parallelism"])
        job.stream.restore(state["stream"])
        if job.lengths is not None and state["lengths"] is not None:
            job.lengths.restore(state["lengths"])
        # Without races nothing is deferred any more: what is queued goes first, not at the end of
        # its epoch.
        waits_in_vain = not config.tail_batching.enabled and job.num_queued > 0
        job._draining = state["draining"] or waits_in_vain
        job._data_ended = state["data_ended"] if data_ended is None else data_ended
        # A run that ended for it gets another chance: its user may have mended the cause.
        job._num_empty_steps = state["num_empty_steps"] % MAX_EMPTY_STEPS
        job._evaluated_step = state.get("evaluated_step")
        job.num_late = Counter(state["num_late"])
        job.ledger = Ledger.restore(state["ledger"])
        return job


def _no_round(what: str, event: SampleGenerated | SampleAborted | SampleFailed) -> StrayEventError:
    return StrayEventError(f"{what} of {event.sample} while no round is under way")


def _queue_to_plain(queue: Iterable[tuple[PromptId, int]]) -> list[list[Any]]:
    return [[str(prompt), attempt] for prompt, attempt in queue]


def _queue_from_plain(plain: Iterable[Sequence[Any]]) -> list[tuple[PromptId, int]]:
    return [(PromptId.parse(text), attempt) for text, attempt in plain]
