"""The virtual driver: obeys the core's commands in simulated time.

      engines (token clocks)      reward checks            trainer, weight sync
              |  finishes               |  verdicts               |  Trained, WeightsSynced, ...
              v                         v                         v
        +------------- one heap of what comes next, ties broken by a counter -------------+
        |        job.handle(event) -> commands; obey each at the same virtual time         |
        +---------------------------------------------------------------------------------+

Nothing is decided here. Every launch, abort, release and check is a command of the same core that
drives a real run; this file knows only how long things take.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from rollpacker.core.commands import (
    Abort,
    CancelScore,
    Command,
    Commit,
    Defer,
    Drop,
    FetchPrompts,
    Finish,
    Launch,
    Release,
    Score,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    Event,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import SampleId
from rollpacker.core.job import Job
from rollpacker.core.job_config import JobConfig
from rollpacker.core.records import Record
from rollpacker.sim.engine import TokenClockEngine
from rollpacker.sim.latency import LatencyModel
from rollpacker.sim.result import BUBBLE_CAUSES, StepResult, SystemResult
from rollpacker.sim.scenario import Speculation
from rollpacker.sim.workload import Workload

MIGRATION_S = 3.0
"""From a release to the moment when the trainer can use the devices: at most this, says the
RollPacker paper, section 4.4."""

_NO_PARTS: Mapping[str, float | None] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the run is simulated on."""

    latency: LatencyModel
    gpus: int
    prompt_tokens: int
    max_running: int | None = None
    """Sequences that one engine decodes at once."""
    speculation: Speculation | None = None
    check_slowdown: Mapping[str, float] = field(default_factory=dict)
    """By source of the prompt: how much longer a check keeps its worker than the workload says."""


class _Trainer:
    """Gradients of streamed groups, as device-seconds of work on the devices it has."""

    def __init__(self) -> None:
        self.backlog_s = 0.0
        self.devices = 0
        self.done_s = 0.0
        """Device-seconds worked before the round was over."""
        self._since = 0.0

    def advance(self, now: float) -> None:
        if now <= self._since:
            return
        if self.devices:
            worked = min(self.backlog_s, self.devices * (now - self._since))
            self.backlog_s -= worked
            self.done_s += worked
        self._since = now

    def have(self, now: float, devices: int, *, after_s: float = 0.0) -> None:
        """From `after_s` on, so many devices are the trainer's."""
        self.advance(now)
        self.devices = devices
        self._since = max(self._since, now + after_s)


@dataclass(slots=True)
class _Step:
    """What is counted between two commits."""

    kind: str = ""
    began: float = 0.0
    launched: float = 0.0
    generated: float = 0.0
    """When the last engine became empty."""
    train_on: float = 0.0
    trained: float = 0.0
    tensor_parallel: int = 1
    preemptions: int = 0
    tokens_generated: int = 0
    tokens_trained: int = 0
    num_trained: int = 0
    max_trained: int = 0
    num_streamed: int = 0
    streamed: set[SampleId] = field(default_factory=set)


class Simulation:
    """One run in virtual time. `run` once."""

    def __init__(
        self,
        config: JobConfig,
        machine: Machine,
        workload: Workload,
        *,
        observe: Callable[[Record], None] | None = None,
    ) -> None:
        """`observe` is given every event with the core's answer, as a real run logs it."""
        self.job = Job(config)
        self.now = 0.0
        self._handle = self.job.handle
        self._config = config
        self._machine = machine
        self._workload = workload
        self._observe = observe
        self._slowdown = {s: f for s, f in machine.check_slowdown.items() if f != 1.0}
        self._cap = config.max_response_tokens or math.inf
        self._skips = workload.skip_truncated
        self._heap: list[tuple[float, int, int, Any]] = []
        """(time, counter, index of an engine, the engine) or (time, counter, -1, event)"""
        self._counter = 0
        self._at_once: deque[Event] = deque()
        """Events of the present moment, before anything on the heap."""
        self._cancelled: set[SampleId] = set()
        """Checks that ended early; the heap still has their ends."""
        self._fleets: dict[tuple[int, bool], list[TokenClockEngine]] = {}
        """Engines by degree and by whether they speculate."""
        self._engines: list[TokenClockEngine] = []
        self._last_busy: list[float] = []
        self._keys: dict[SampleId, int] = {}
        self._samples: tuple[SampleId, ...] = ()
        self._lengths: list[int] = []
        self._engine_of: list[int] = []
        self._num_generating = 0
        self._version = 0
        self._trainer = _Trainer()
        self._released: tuple[float, int] | None = None
        """When devices were released, and how many."""
        self._step = _Step()
        self._steps: list[StepResult] = []
        self._bubble = dict.fromkeys(BUBBLE_CAUSES, 0.0)
        self._num_tail_trained = 0
        self._p95 = workload.policy_length_p95
        self._finished: str | None = None
        self._progress: Callable[[int], None] = lambda steps: None

    def run(self, steps: int, progress: Callable[[int], None] = lambda steps: None) -> SystemResult:
        """Simulate so many steps. `progress` is called after each, with the steps done.

        Raises `RuntimeError` if the run ends before: no prompts, or nothing to train on."""
        self._progress = progress
        # Rounds leave no reference cycles behind, and looking for some takes time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._take(RunStarted(time_s=0.0))
            self._go_on(steps)
            self._close()
        finally:
            if collecting:
                gc.enable()
        return self._result()

    def _go_on(self, num_steps: int) -> None:
        """Take what comes next, until so many steps are done."""
        heap, at_once, steps = self._heap, self._at_once, self._steps
        take, finish_one = self._take, self._finish_one
        while len(steps) < num_steps:
            while at_once:
                take(at_once.popleft())
            if self._finished is not None:
                raise RuntimeError(f"the run ended after {len(steps)} steps: {self._finished}")
            self.now, _, index, thing = heap[0]
            if index < 0:
                heapq.heappop(heap)
                if not (self._cancelled and self._was_cancelled(thing)):
                    take(thing)
            elif thing.next_finish == self.now:
                finish_one(index, thing)
            else:  # the engine was touched since
                heapq.heappop(heap)

    def _close(self) -> None:
        """Tell the core, and whoever observes, that the last step is committed. What the core wants
        next is not done any more."""
        pending = [*self._at_once, *(entry[3] for entry in self._heap if entry[2] < 0)]
        committed = next(event for event in pending if isinstance(event, Committed))
        self.now += self._machine.latency.commit_s
        self._at_once.clear()
        commands = self._handle(committed)
        if self._observe is not None:
            self._observe(self._record(committed, commands))

    # -- decide, obey ------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        commands = self._handle(event)
        if self._observe is not None:
            self._observe(self._record(event, commands))
        for command in commands:
            if type(command) is Score:  # nearly all of them
                self._score(command)
            else:
                self._obey(command)

    def _record(self, event: Event, commands: Sequence[Command]) -> Record:
        event = replace(event, time_s=self.now)
        return Record(time_s=self.now, event=event, commands=tuple(commands), cost_s=0.0)

    def _obey(self, command: Command) -> None:
        match command:
            case Abort(samples=samples):
                self._abort(samples)
            case Launch():
                self._launch(command)
            case Release(devices=devices):
                self._release(devices)
            case StartGradients(groups=groups):
                self._start_gradients(groups)
            case TrainOn():
                self._train(command)
            case SyncWeights(version=version):
                self._sync(version)
            case Commit(step=step):
                self._commit(step)
            case FetchPrompts(count=count):
                prompts, epoch_ended, data_ended = self._workload.take(count)
                self._at_once.append(
                    PromptsFetched(
                        time_s=self.now,
                        prompts=prompts,
                        epoch_ended=epoch_ended,
                        data_ended=data_ended,
                    )
                )
            case Finish(reason=reason):
                self._finished = reason
            case Defer() | Drop():
                pass
            case Score():
                self._score(command)
            case CancelScore(samples=samples):
                self._cancel_checks(samples)
            case _:
                assert_never(command)

    def _after(self, seconds: float, event: Event) -> None:
        if seconds <= 0.0:
            self._at_once.append(event)
            return
        self._counter += 1
        heapq.heappush(self._heap, (self.now + seconds, self._counter, -1, event))

    # -- rollout -----------------------------------------------------------------------

    def _launch(self, command: Launch) -> None:
        step = self._step
        step.kind, step.tensor_parallel = str(command.kind), command.tensor_parallel
        step.launched = self.now
        self._bubble["sync"] += (self.now - step.began) * self._machine.gpus
        self._engines = self._fleet(command.tensor_parallel, command.speculate)
        self._released = None
        self._trainer.have(self.now, 0)
        samples = self._samples = command.samples
        self._keys = dict(zip(samples, range(len(samples)), strict=True))
        self._lengths = lengths = self._true_lengths(samples)
        num_engines = len(self._engines)
        self._engine_of = [key % num_engines for key in range(len(samples))]
        self._num_generating = len(samples)
        self._last_busy = [self.now] * num_engines
        latency, degree = self._machine.latency, command.tensor_parallel
        for index, engine in enumerate(self._engines):
            keys = range(index, len(samples), num_engines)
            if keys:
                # The prefill gives the first token.
                requests = [(key, lengths[key], 1 if lengths[key] > 1 else 0) for key in keys]
                engine.submit(self.now, requests, latency.prefill_s(len(keys), degree))
                self._expect(index)

    def _true_lengths(self, samples: Sequence[SampleId]) -> list[int]:
        """Lengths in tokens that the policy would write, sample by sample."""
        lengths: list[int] = []
        prompt, attempt, known = None, -1, [0]
        for sample in samples:
            if sample.prompt is not prompt or sample.attempt != attempt:
                prompt, attempt = sample.prompt, sample.attempt
                known = self._workload.lengths(prompt, attempt)
            index = sample.index
            if index >= len(known):
                known = self._workload.lengths(prompt, attempt, index + 1)
            lengths.append(known[index])
        return lengths

    def _fleet(self, degree: int, speculating: bool) -> list[TokenClockEngine]:
        found = self._fleets.get((degree, speculating))
        if found is None:
            machine = self._machine
            cost = machine.latency.step_cost(degree)
            if speculating and machine.speculation is not None:
                cost = replace(
                    cost,
                    speculation_speedup=machine.speculation.speedup,
                    speculation_max_live=machine.speculation.max_live,
                )
            found = self._fleets[degree, speculating] = [
                TokenClockEngine(
                    cost,
                    machine.latency.kv_tokens(degree),
                    machine.max_running,
                    machine.prompt_tokens,
                    machine.latency.recompute_token_s(degree),
                )
                for _ in range(machine.gpus // degree)
            ]
        return found

    def _expect(self, index: int) -> None:
        """The engine's next finish is known anew."""
        engine = self._engines[index]
        when = engine.next_finish
        if when != math.inf:
            self._counter += 1
            heapq.heappush(self._heap, (when, self._counter, index, engine))

    def _finish_one(self, index: int, engine: TokenClockEngine) -> None:
        """The engine at the top of the heap finishes a response."""
        key, length, preemptions = engine.pop()
        self._last_busy[index] = self.now
        when = engine.next_finish
        if when != math.inf:
            self._counter += 1
            heapq.heapreplace(self._heap, (when, self._counter, index, engine))
        else:
            heapq.heappop(self._heap)
        step = self._step
        step.tokens_generated += length
        step.preemptions += preemptions
        self._num_generating -= 1
        if not self._num_generating:
            self._rollout_ends()
        self._take(
            SampleGenerated(
                time_s=self.now,
                sample=self._samples[key],
                num_tokens=length,
                finish_reason="stop" if length < self._cap else "length",
                version=self._version,
                preemptions=preemptions,
            )
        )

    def _abort(self, samples: Sequence[SampleId]) -> None:
        by_engine: dict[int, list[int]] = {}
        keys, engine_of = self._keys, self._engine_of
        for sample in samples:
            key = keys[sample]
            by_engine.setdefault(engine_of[key], []).append(key)
        reached: dict[int, tuple[int, int]] = {}
        step = self._step
        for index, group in by_engine.items():
            engine = self._engines[index]
            for key, tokens in zip(group, engine.abort(self.now, group), strict=True):
                preemptions = engine.preemptions(key)
                reached[key] = (tokens, preemptions)
                step.tokens_generated += tokens
                step.preemptions += preemptions
            self._last_busy[index] = self.now
            self._expect(index)
        self._num_generating -= len(samples)
        if not self._num_generating:
            self._rollout_ends()
        for sample in samples:
            tokens, preemptions = reached[keys[sample]]
            self._at_once.append(
                SampleAborted(
                    time_s=self.now, sample=sample, num_tokens=tokens, preemptions=preemptions
                )
            )

    def _rollout_ends(self) -> None:
        """The last engine is empty: from here on every device waits for verdicts."""
        self._step.generated = self.now
        self._trainer.have(self.now, self._machine.gpus)
        degree = self._step.tensor_parallel
        idle = sum(self.now - last for last in self._last_busy) * degree
        if self._released is not None:
            when, devices = self._released
            idle -= self._trainer.done_s + min(MIGRATION_S, self.now - when) * devices
        self._bubble["tail"] += max(idle, 0.0)

    def _release(self, devices: Sequence[int]) -> None:
        degree = self._step.tensor_parallel
        gone = sorted({device // degree for device in devices})
        staying = [index for index in range(len(self._engines)) if index not in set(gone)]
        # One that finishes at this very moment takes its last token on the other engine.
        moved = [
            request._replace(done_tokens=min(request.done_tokens, request.length - 1))
            for index in gone
            for request in self._engines[index].drain(self.now)
        ]
        shares = {index: moved[turn :: len(staying)] for turn, index in enumerate(staying)}
        token_s = self._machine.latency.recompute_token_s(degree)
        for index, requests in shares.items():
            if requests:
                tokens = sum(r.done_tokens + self._machine.prompt_tokens for r in requests)
                self._engines[index].submit(self.now, requests, tokens * token_s)
                self._expect(index)
                for request in requests:
                    self._engine_of[request.key] = index
        for index in gone:
            self._last_busy[index] = self.now
        self._bubble["migration"] += MIGRATION_S * len(devices)
        self._released = (self.now, len(devices))
        self._trainer.have(self.now, len(devices), after_s=MIGRATION_S)

    # -- rewards -----------------------------------------------------------------------

    def _score(self, command: Score) -> None:
        sample = command.sample
        seconds, correct = self._workload.verdict(sample)
        if sample[0][0] in self._skips and self._lengths[self._keys[sample]] >= self._cap:
            seconds, correct = 0.0, False
        value = 1.0 if correct else 0.0
        if not seconds:
            self._at_once.append(
                SampleScored(time_s=self.now, sample=sample, value=value, parts=_NO_PARTS)
            )
            return
        if self._slowdown:
            seconds *= self._slowdown.get(sample.prompt.source, 1.0)
        timeout_s, timed_out = command.timeout_s, False
        if timeout_s is not None and seconds >= timeout_s:
            seconds, value, timed_out = timeout_s, 0.0, True
        self._counter += 1
        when = self.now + seconds
        event = SampleScored(
            time_s=when,
            sample=sample,
            value=value,
            parts=_NO_PARTS,
            seconds=seconds,
            timed_out=timed_out,
        )
        heapq.heappush(self._heap, (when, self._counter, -1, event))

    def _was_cancelled(self, event: Event) -> bool:
        if not isinstance(event, SampleScored) or event.sample not in self._cancelled:
            return False
        self._cancelled.remove(event.sample)
        return True

    def _cancel_checks(self, samples: Sequence[SampleId]) -> None:
        """They end now; what the heap holds of them is passed over when its time comes."""
        self._cancelled.update(samples)
        for sample in samples:
            self._at_once.append(
                SampleScored(
                    time_s=self.now,
                    sample=sample,
                    value=None,
                    parts=_NO_PARTS,
                    reason="not needed any more",
                    cause="cancelled",
                )
            )

    # -- training ----------------------------------------------------------------------

    def _tokens(self, groups: Sequence[Sequence[SampleId]]) -> tuple[int, int, int]:
        """Samples, response tokens and the longest response of these groups."""
        keys, known = self._keys, self._lengths
        lengths = [known[keys[sample]] for group in groups for sample in group]
        return len(lengths), sum(lengths), max(lengths, default=0)

    def _work_s(self, num_samples: int, tokens: int) -> float:
        """Device-seconds of the gradients of so many samples."""
        tokens += num_samples * self._machine.prompt_tokens
        return self._machine.latency.train_s(tokens, 1)

    def _start_gradients(self, groups: Sequence[Sequence[SampleId]]) -> None:
        self._trainer.advance(self.now)
        num, tokens, _ = self._tokens(groups)
        self._trainer.backlog_s += self._work_s(num, tokens)
        self._step.num_streamed += num
        self._step.streamed.update(group[0] for group in groups)

    def _train(self, command: TrainOn) -> None:
        step, trainer, gpus = self._step, self._trainer, self._machine.gpus
        trainer.advance(self.now)
        step.train_on = self.now
        self._bubble["reward_wait"] += (self.now - step.generated) * gpus
        num, tokens, longest = self._tokens(command.groups)
        step.num_trained, step.tokens_trained, step.max_trained = num, tokens, longest
        keys, known, p95 = self._keys, self._lengths, self._p95
        self._num_tail_trained += sum(
            known[keys[sample]] > p95 for group in command.groups for sample in group
        )
        rest = [group for group in command.groups if group[0] not in step.streamed]
        num, tokens, _ = self._tokens(rest)
        work_s = trainer.backlog_s + self._work_s(num, tokens)
        trainer.backlog_s = trainer.done_s = 0.0
        self._after(
            self._machine.latency.train_fixed_s + work_s / gpus,
            Trained(time_s=self.now, step=command.step, version=self._version + 1),
        )

    def _sync(self, version: int) -> None:
        self._step.trained = self.now
        self._version = version
        self._after(self._machine.latency.sync_s, WeightsSynced(time_s=self.now, version=version))

    def _commit(self, number: int) -> None:
        self._after(
            self._machine.latency.commit_s,
            Committed(time_s=self.now, step=number, checkpointed=False),
        )
        step = self._step
        end = self.now + self._machine.latency.commit_s
        if step.num_trained:
            self._steps.append(
                StepResult(
                    kind=step.kind,
                    rollout_s=step.generated - step.began,
                    reward_s=step.train_on - step.generated,
                    train_s=step.trained - step.train_on,
                    sync_s=end - step.trained,
                    total_s=end - step.began,
                    tensor_parallel=step.tensor_parallel,
                    preemptions=step.preemptions,
                    max_response_tokens=step.max_trained,
                    tokens_generated=step.tokens_generated,
                    tokens_trained=step.tokens_trained,
                    num_trained=step.num_trained,
                    num_streamed=step.num_streamed,
                )
            )
            self._bubble["sync"] += (end - step.trained) * self._machine.gpus
            self._step = _Step(began=end)
            self._progress(len(self._steps))

    # -- the result --------------------------------------------------------------------

    def _result(self) -> SystemResult:
        steps = self._steps
        num_trained = sum(step.num_trained for step in steps)
        tokens_trained = sum(step.tokens_trained for step in steps)
        return SystemResult(
            steps=tuple(steps),
            tokens_generated=sum(step.tokens_generated for step in steps),
            tokens_trained=tokens_trained,
            trained_length_mean=tokens_trained / num_trained,
            policy_length_mean=self._workload.policy_length_mean,
            policy_length_p95=self._p95,
            tail_trained_share=self._num_tail_trained / num_trained,
            bubble=dict(self._bubble),
            device_seconds=self._machine.gpus * sum(step.total_s for step in steps),
            num_releases=self.job.stream.num_releases,
        )
