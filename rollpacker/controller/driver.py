"""The controller: the core in real time.

      engine thread          reward tasks           main task (the asyncio loop)
           |                      |                        |
           | outputs              | verdicts               | prompts, Trained, Synced, Committed
           v                      v                        v
        +------------------- _take(event): one lock, one total order --------------------+
        |   commands = job.handle(event); log; obey                                      |
        +------+---------------------------+--------------------------+-----------------+
               | Launch, Abort: at once    | Score: next reward task   | the rest: queue
               v                           v                           v
            engine                      rewards                   main task

    who waits            for what                              unblocked by
    engine thread        the core's answer to what finished    `_take` returning (microseconds)
    reward tasks         reward functions                      their verdicts or their time limit
    main task            the next command of the slow kind     `_take`, or a deadline

The main task does one thing at a time, in order; while it trains on groups ahead of their step
(`StartGradients`), verdicts still come in. The core's answer to a finished sample is obeyed inside
the engine's call, so an abort takes effect at the same decode step in every run. No decision is
made here: what to do is the core's business, this file only does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, assert_never

from rollpacker.config.schema import RunConfig
from rollpacker.controller.base import BuildSamples, DeadlineExceeded, Decode, RunError
from rollpacker.controller.checkpoint import write_checkpoint
from rollpacker.controller.evaluation import evaluate, reward_input
from rollpacker.controller.event_log import LogWriter
from rollpacker.controller.samples import SampleWriter
from rollpacker.controller.scoring import Scoring
from rollpacker.controller.waiting import Collecting, in_daemon_thread
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
    SampleFailed,
    SampleScored,
    StopRequested,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import SampleId
from rollpacker.core.job import Job
from rollpacker.core.phases import Phase
from rollpacker.core.records import Entry, Note, Observer, Record, Session
from rollpacker.data.base import TRAIN, Cursor, PromptRow, PromptSet
from rollpacker.rewards.base import Failed, Reward, RewardInput, Scored
from rollpacker.rollout.base import (
    NOT_NUMBERS,
    Engine,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.trainer.base import (
    NonFiniteError,
    ScoreRequest,
    TokenScores,
    Trainer,
    TrainerError,
    TrainSample,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVALUATION_BATCH = 32
"""Samples of an evaluation that are judged in one call; each batch is a sign of life."""

NUM_SLOWEST = 10
"""So many of a step's slowest checks are kept with their text, trained on or not."""

MAX_REASONS = 100
"""Different reasons that are counted; free texts could go on for ever."""

MAX_TOLD_REASONS = 3
"""Different reasons that are told at once; the summary has all."""

_TICK_S = 0.25
"""How often a wait looks at its deadline and the observers at the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the controller drives. The parts do not know each other, nor the
    controller."""

    job: Job
    engine: Engine
    trainer: Trainer
    reward: Reward
    prompts: PromptSet
    eval_prompts: PromptSet | None
    cursor: Cursor
    build_samples: BuildSamples
    decode: Decode
    log: LogWriter
    samples: SampleWriter | None
    observers: Sequence[Observer] = ()


class Controller:
    """Drives one run from where `parts.job` stands to its end."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        *,
        checkpoints: Path,
        time_s: float,
    ) -> None:
        """`time_s` is where the run's clock goes on (0 in a new run)."""
        self.config = config
        self.parts = parts
        self._checkpoints = checkpoints
        self._origin = time.perf_counter() - time_s
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: asyncio.Queue[Command | BaseException] = asyncio.Queue()
        self._responses: dict[SampleId, Response] = {}
        self._verdicts: dict[SampleId, Scored] = {}
        self._completions: dict[SampleId, str] = {}
        """The text that a verdict was given on."""
        self._check_s: dict[SampleId, float] = {}
        """How long checks took."""
        self._scoring = Scoring(
            parts.reward,
            parts.job.config.rewards,
            self._lock,
            read=self._read,
            answer=self._answer,
            ended=self._check_ended,
        )
        self._to_stream: list[tuple[SampleId, ...]] = []
        """Groups whose gradients were asked for and are not begun."""
        self._streamed: dict[SampleId, TrainSample] = {}
        """What the step's gradient holds already, with provisional weights."""
        self._scores: dict[SampleId, TokenScores] = {}
        """What other models said of the step's samples."""
        self._had_no_signal = False
        """A step had advantages of 0 alone, and that was said."""
        self._was_short = False
        """A step had fewer groups than it should, and that was said."""
        self._kind = ""
        self._state: dict[str, Any] = {}
        """The job's state at the last `Commit`."""
        self._unobserved: deque[Entry] = deque()
        """Logged, but not yet shown to the observers."""
        self._last_sign = self.now()
        self._last_decode_steps = -1
        self._evaluation: Collecting | None = None
        self._policy_is_broken = False
        """The run ends for it; what the engine still reports is not looked at."""
        self._reasons: Counter[str] = Counter()
        """Why samples failed or have no verdict, for the message of a run that cannot go on."""
        self._sampling = SamplingParams(
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop=config.rollout.stop,
            seed=config.seed,
        )

    def now(self) -> float:
        """The run's clock, in seconds."""
        return time.perf_counter() - self._origin

    async def run(self) -> str:
        """Drive the run to its end. Returns the reason why it ended.

        Raises `DeadlineExceeded`, `NonFiniteError`, `EngineError`, `OSError` and whatever a part
        died of; the run can then be resumed from its last checkpoint.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self.parts.engine.start(self._on_outputs, self._on_error)
        await self.parts.reward.open()
        job = self.parts.job
        if job.evaluation_is_due:
            await self._evaluate(job.step)
        if job.phase is Phase.NEW:
            self._take(RunStarted(time_s=self.now()))
        else:
            self._take(Committed(time_s=self.now(), step=job.step, checkpointed=True))
        try:
            while True:
                command = await self._next_command()
                self._post(self._observe)
                if isinstance(command, Finish):
                    return self._reason_of(command)
                await self._execute(command)
        finally:
            self._scoring.close()

    def open(self, *, started_at: str, began_s: float, marks: tuple[str, ...] = ()) -> None:
        """Write the session's first entries: who takes up the run, and how long loading took.
        `marks`: see `Session`."""
        job = self.parts.job
        with self._lock:
            self._write(
                Session(
                    started_at=started_at,
                    time_s=began_s,
                    step=job.step,
                    job=job.config.to_plain(),
                    slots=self.config.rollout.engine.max_slots,
                    marks=marks,
                    data_ended=None if job.phase is Phase.NEW else self.parts.cursor.ended,
                )
            )
            self.note("startup", self.now() - began_s, job.step, {})

    def _reason_of(self, finish: Finish) -> str:
        if finish.failed:
            common = "; ".join(reason for reason, _ in self._reasons.most_common(3))
            raise RunError(
                f"{finish.reason}. Why, most often: {common or 'unknown'}. Mend that (the reward,"
                " or the data), then go on with --resume"
            )
        return finish.reason

    async def close(self) -> None:
        """Let go of engine, rewards and trainer. What the log holds is made durable."""
        await self.parts.engine.close()
        await self.parts.reward.close()
        self.parts.trainer.close()
        self._observe()
        self.parts.log.flush()

    def note(self, name: str, seconds: float, step: int, metrics: Mapping[str, float]) -> None:
        """Record a span that the core does not know of, ending now."""
        with self._lock:
            self._write(
                Note(time_s=self.now(), name=name, seconds=seconds, step=step, metrics=metrics)
            )

    def request_stop(self, reason: str) -> None:
        """End after the step at hand, with a checkpoint. Thread-safe."""
        self._take(StopRequested(time_s=self.now(), reason=reason))

    # -- decide, do, record ------------------------------------------------------------

    def _take(self, event: Event, began: float | None = None) -> None:
        with self._lock:
            began = time.perf_counter() if began is None else began
            now = round(began - self._origin, 6)  # as the log has it: the core may learn from it
            event = replace(event, time_s=now)
            try:
                commands = self.parts.job.handle(event)
            except AssertionError:  # a bug: leave the event that shows it in the log
                self._write(Record(time_s=now, event=event, commands=(), cost_s=0.0))
                raise
            for command in commands:
                self._obey(command)
            self._last_sign = now
            cost = time.perf_counter() - began
            self._write(Record(time_s=now, event=event, commands=tuple(commands), cost_s=cost))

    def _obey(self, command: Command) -> None:
        """Quick commands at once; slow ones go to the main task."""
        match command:
            case Launch():
                self._kind = self._kind or command.kind
                self.parts.engine.submit([self._request(sample) for sample in command.samples])
            case Abort(samples=samples):
                self.parts.engine.abort(samples)
            case Score():
                self._scoring.ask(command)  # handed over when the engine's call ends
            case CancelScore(samples=samples):
                self._post(self._scoring.cancel, samples)
            case Drop(reason=reason):
                self._tell(reason)
            case Defer():
                pass  # recorded in the log; the responses go when the round is trained on
            case Release():
                raise AssertionError(f"{command}: the one device of a run cannot be released")
            case StartGradients(groups=groups):
                self._to_stream += groups
                self._post(self._inbox.put_nowait, command)
            case TrainOn():
                self._to_stream.clear()  # the whole step is due: large batches are quicker
                self._post(self._inbox.put_nowait, command)
            case FetchPrompts() | SyncWeights() | Finish():
                self._post(self._inbox.put_nowait, command)
            case Commit():
                self._state = self.parts.job.state()
                self._post(self._inbox.put_nowait, command)
            case _:
                assert_never(command)

    def _write(self, entry: Entry) -> None:
        self.parts.log.append(entry)
        self._unobserved.append(entry)

    def _observe(self) -> None:
        """Feed the observers, in log order, on the event loop: off the engine's path."""
        while self._unobserved:
            entry = self._unobserved.popleft()
            for observer in self.parts.observers:
                observer.feed(entry)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    # -- the engine's side -------------------------------------------------------------

    def _request(self, sample: SampleId) -> GenerationRequest:
        row = self.parts.prompts.rows[sample.prompt.row]
        return GenerationRequest(sample=sample, prompt_tokens=row.tokens, sampling=self._sampling)

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Called in the engine's thread, between two decode steps."""
        with self._lock:
            if self._evaluation is not None:
                self._evaluation.add(outputs)
                return
            if self._policy_is_broken:
                return
            for output in outputs:
                if output.response is not None:
                    self._responses[output.event.sample] = output.response
                elif isinstance(output.event, SampleFailed):
                    self._count_reason(f"the engine: {output.event.reason}")
                    if output.event.reason.startswith(NOT_NUMBERS):
                        self._policy_is_broken = True
                        self._post(self._fail, self._broken_policy(output.event))
                        return
                self._take(output.event)
            scoring = self._scoring.waits
        if scoring:  # outside of the lock, which the event loop would at once wait for
            self._post(self._scoring.start)

    def _broken_policy(self, event: SampleFailed) -> NonFiniteError:
        """An update that was finite may still have spoilt the weights."""
        step = self.parts.job.step
        newest = self._checkpoints / f"step_{step:06d}"
        spoilt = f"; remove {newest} first, its weights are spoilt" if newest.exists() else ""
        return NonFiniteError(
            f"step {step + 1}: {event.reason} (sample {event.sample}). --resume goes on from the "
            f"last checkpoint{spoilt}. Lower train.learning_rate, or clip gradients more"
        )

    def _count_reason(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < MAX_TOLD_REASONS:
            logger.warning("no use for a sample: %s (further ones are only counted)", reason)
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Count it, for the message of a run that cannot go on."""
        if reason in self._reasons or len(self._reasons) < MAX_REASONS:
            self._reasons[reason] += 1

    def _on_error(self, error: BaseException) -> None:
        self._post(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """End the run with what a part died of, whatever the main task waits for."""
        if self._evaluation is not None and not self._evaluation.done.done():
            self._evaluation.done.set_exception(error)
        else:
            self._inbox.put_nowait(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of ours that raised ends the run; what others left behind is only logged."""
        error = context.get("exception")
        if "handle" in context and error is not None:
            self._fail(error)
        else:
            logger.warning("%s", context["message"], exc_info=error)

    # -- rewards -----------------------------------------------------------------------

    def _read(self, sample: SampleId) -> RewardInput:
        """What the reward sees of a sample."""
        with self._lock:
            response = self._responses[sample]
        judged = reward_input(self._row(sample), response, self.parts.decode)
        self._completions[sample] = judged.completion
        return judged

    def _answer(self, event: SampleScored, verdict: Scored | Failed | None) -> None:
        if isinstance(verdict, Scored):
            self._verdicts[event.sample] = verdict
        elif verdict is not None:
            self._count_reason(verdict.reason)
        if event.seconds is not None:
            self._check_s[event.sample] = event.seconds
        self._take(event)

    def _check_ended(self, error: BaseException | None) -> None:
        self._last_sign = self.now()
        if error is not None:
            self._fail(error)

    def _row(self, sample: SampleId) -> PromptRow:
        return self.parts.prompts.rows[sample.prompt.row]

    # -- slow commands -----------------------------------------------------------------

    async def _execute(self, command: Command) -> None:
        match command:
            case FetchPrompts(count=count):
                prompts, epoch_ended, data_ended = self.parts.cursor.take(count)
                self._take(
                    PromptsFetched(
                        time_s=0.0,
                        prompts=prompts,
                        epoch_ended=epoch_ended,
                        data_ended=data_ended,
                    )
                )
            case StartGradients():
                await self._start_gradients(command.step)
            case TrainOn():
                await self._train(command)
            case SyncWeights(version=version):
                hand_over = hand_over_weights(self.parts.trainer, self.parts.engine, version)
                await self._by("deadlines.sync_s", hand_over)
                self._take(WeightsSynced(time_s=0.0, version=version))
            case Commit():
                await self._commit(command)
            case _:
                raise AssertionError(f"{command} is not for the main task")

    async def _start_gradients(self, step: int) -> None:
        """Gradients of groups that the step will certainly train on, while verdicts on others are
        awaited. The denominators of the step are not known yet: the weights are provisional."""
        with self._lock:
            groups, self._to_stream = self._to_stream, []
        if not groups:  # an earlier call took them along, or the whole step is due
            return
        engine = self.parts.engine.status()
        busy = engine.num_running + engine.num_waiting
        apart = self.config.train.processes is not None
        assert apart or not busy, f"gradients on the engine's device, where {busy} samples run"
        began = self.now()
        with self._diverging(step):
            scored = self._scored_groups(groups)
            await self._ask_scores(scored)
            samples, _ = self.parts.build_samples(scored, scores=self._scores, partial=True)
            await self._by(
                "deadlines.train_s",
                self.parts.trainer.accumulate(samples),
                f"the first gradients of step {step}",
            )
        self._streamed.update((sample.sample, sample) for sample in samples)
        self.note("gradients", self.now() - began, step, {"groups": len(groups)})

    async def _train(self, command: TrainOn) -> None:
        if command.num_missing and not self._was_short:
            self._was_short = True
            logger.warning(
                "step %d trains on %d groups instead of %d: the others had no signal or no"
                " verdicts, and refilling found no more (at most"
                " rollout.dynamic_sampling.max_refills=%d rounds, none while the queue is emptied);"
                " further such steps are in the log alone",
                command.step,
                len(command.groups),
                len(command.groups) + command.num_missing,
                self.config.rollout.dynamic_sampling.max_refills,
            )
        trainer = self.parts.trainer
        streamed, self._streamed = self._streamed, {}
        with self._diverging(command.step):
            scored = self._scored_groups(command.groups)
            await self._ask_scores(scored)
            samples, metrics = self.parts.build_samples(
                scored, weights=command.weights, scores=self._scores
            )
            training = asyncio.ensure_future(self._accumulate(samples, streamed))
            await asyncio.sleep(0)  # the trainer's thread begins
            if self.parts.samples is not None:
                self._save_samples(command, samples, self.parts.samples)
            await self._by("deadlines.train_s", training)
            metrics.update(await self._by("deadlines.train_s", trainer.apply()))
        if metrics.get("critic/zero_advantages") == 1.0 and not self._had_no_signal:
            self._had_no_signal = True
            logger.warning(
                "step %d: every advantage is 0, so it teaches nothing: all rewards of a group are"
                " equal (critic/zero_advantages has each step's share). Easier or harder prompts,"
                " or rollout.dynamic_sampling, would help",
                command.step,
            )
        counts = self.parts.reward.metrics()
        metrics.update({f"perf/rewards/{name}": value for name, value in counts.items()})
        self._take(Trained(time_s=0.0, step=command.step, version=trainer.version, metrics=metrics))

    async def _accumulate(
        self, samples: Sequence[TrainSample], streamed: Mapping[SampleId, TrainSample]
    ) -> None:
        """The gradient of the whole step; that of `streamed` is there but for a factor."""
        if not streamed:
            await self.parts.trainer.accumulate(samples)
            return
        rest = [sample for sample in samples if sample.sample not in streamed]
        assert len(rest) + len(streamed) == len(samples), "streamed, and not trained on"
        await self.parts.trainer.rescale(_common_factor(samples, streamed))
        if rest:
            await self.parts.trainer.accumulate(rest)

    async def _ask_scores(self, groups: Sequence[Sequence[tuple[Response, float]]]) -> None:
        """What the advantages need to know besides rewards, of samples not asked about before."""
        if not self.config.algorithm.needs_scores:
            return
        requests = [
            ScoreRequest(
                sample=response.sample,
                prompt_tokens=response.prompt_tokens,
                response_tokens=response.tokens,
            )
            for group in groups
            for response, _ in group
            if response.sample not in self._scores
        ]
        if requests:
            found = await self._by("deadlines.train_s", self.parts.trainer.score(requests))
            self._scores.update((r.sample, s) for r, s in zip(requests, found, strict=True))

    def _scored_groups(
        self, groups: Sequence[Sequence[SampleId]]
    ) -> list[list[tuple[Response, float]]]:
        return [[(self._responses[s], self._verdicts[s].value) for s in g] for g in groups]

    @contextlib.contextmanager
    def _diverging(self, step: int) -> Iterator[None]:
        """Say what to do about numbers that are not finite."""
        try:
            yield
        except NonFiniteError as error:
            applied = "" if "no update" in str(error) else "; no update was applied"
            raise NonFiniteError(
                f"step {step}: {error}{applied}. --resume goes on from the last "
                "checkpoint; a lower train.learning_rate may help"
            ) from error

    def _save_samples(
        self, command: TrainOn, samples: Sequence[TrainSample], writer: SampleWriter
    ) -> None:
        """Those trained on, and the slowest to check; while the trainer works."""
        trained = {sample.sample: sample for sample in samples}
        weights = {} if command.weights is None else _by_sample(command.groups, command.weights)
        slow = sorted(self._check_s, key=lambda sample: (-self._check_s[sample], sample))
        others = [s for s in slow[:NUM_SLOWEST] if s not in trained and s in self._completions]
        for sample in [s for group in command.groups for s in group] + others:
            row, response = self._row(sample), self._responses[sample]
            verdict = self._verdicts.get(sample)
            parts = {} if verdict is None else verdict.parts
            is_trained = sample in trained
            writer.add(
                {
                    "step": command.step,
                    "round_kind": str(self._kind),
                    "prompt_id": str(sample.prompt),
                    "sample_id": str(sample),
                    "prompt": row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt),
                    "completion": self._completions[sample],
                    "finish_reason": response.finish_reason,
                    "num_tokens": len(response.tokens),
                    "reward": None if verdict is None else verdict.value,
                    **{f"reward/{n}": parts.get(n) for n in self.parts.reward.names},
                    "check_s": self._check_s.get(sample),
                    "trained": is_trained,
                    "advantage": trained[sample].advantage if is_trained else None,
                    "loss_weight": weights.get(sample, 1.0) if is_trained else 0.0,
                }
            )

    async def _commit(self, command: Commit) -> None:
        self._forget_responses()
        if command.evaluate:
            await self._evaluate(command.step)
        if command.checkpoint:
            state = self._checkpoint_state()
            write = in_daemon_thread(
                write_checkpoint,
                self._checkpoints,
                command.step,
                state,
                self.parts.trainer.save,
                self.config.checkpoint.keep_last,
            )
            await self._by("deadlines.checkpoint_s", write)
        self._take(Committed(time_s=0.0, step=command.step, checkpointed=command.checkpoint))

    def _forget_responses(self) -> None:
        """The round is settled; only what still waits for a (late) verdict is kept."""
        with self._lock:
            waiting = self._scoring.waiting()
            self._responses = {sample: self._responses[sample] for sample in waiting}
            self._verdicts.clear()
            self._scores.clear()
            self._completions.clear()
            self._check_s.clear()
            self._kind = ""

    def _checkpoint_state(self) -> dict[str, Any]:
        """All that a resume needs besides tensors; also makes log and samples durable up to
        here."""
        if self.parts.samples is not None:
            self.parts.samples.write()
        with self._lock:
            return {
                "job": self._state,
                "cursor": self.parts.cursor.state(),
                "log_bytes": self.parts.log.flush(),
                "time_s": self.now(),
            }

    # -- evaluation --------------------------------------------------------------------

    async def _evaluate(self, step: int) -> None:
        prompts = self.parts.eval_prompts
        if prompts is None:
            return
        began = self.now()
        config = self.config.eval
        tokens, temperature = config.max_response_tokens, config.temperature
        sampling = replace(
            self._sampling,
            max_response_tokens=self._sampling.max_response_tokens if tokens is None else tokens,
            temperature=self._sampling.temperature if temperature is None else temperature,
        )
        result = await evaluate(
            generate=self._generate,
            score=self._judge,
            decode=self.parts.decode,
            rows=dict(enumerate(prompts.rows[: config.max_prompts])),
            sampling=sampling,
            samples_per_prompt=config.samples_per_prompt,
            pass_threshold=config.pass_threshold,
        )
        self.note("evaluation", self.now() - began, step, result.metrics)

    async def _judge(self, inputs: Sequence[RewardInput]) -> list[Scored | Failed]:
        """Verdicts of an evaluation, with the deadlines that the run has learnt."""
        limit_of = self.parts.job.rewards.timeout_s
        limits = [limit_of(one.task or "") or limit_of(TRAIN) for one in inputs]
        verdicts: dict[int, Scored | Failed] = {}
        num_seen = 0

        async def judge(places: Sequence[int]) -> None:
            batch = [inputs[place] for place in places]
            found = await self.parts.reward.score(batch, timeout_s=limits[places[0]])
            verdicts.update(zip(places, found, strict=True))

        def lives() -> bool:
            nonlocal num_seen
            grown, num_seen = len(verdicts) > num_seen, len(verdicts)
            return grown or self._rewards_wait()

        same = [[n for n, s in enumerate(limits) if s == limit] for limit in dict.fromkeys(limits)]
        batches = [
            places[start : start + EVALUATION_BATCH]
            for places in same
            for start in range(0, len(places), EVALUATION_BATCH)
        ]
        judging = asyncio.gather(*map(judge, batches))
        what = "the rewards of an evaluation"
        await self._by("deadlines.reward_s", judging, what, lives)
        return [verdicts[place] for place in range(len(inputs))]

    async def _generate(self, requests: Sequence[GenerationRequest]) -> Sequence[Response]:
        """The engine's responses to requests that the core does not know of."""
        collecting = Collecting(len(requests), asyncio.get_running_loop())
        self._evaluation = collecting
        try:
            self.parts.engine.submit(requests)
            what = "the responses of an evaluation"
            return await self._by(
                "deadlines.generation_s", collecting.done, what, self._engine_works
            )
        finally:
            self._evaluation = None

    # -- waiting -----------------------------------------------------------------------

    async def _next_command(self) -> Command:
        """The next slow command. Raises what a part died of, or `DeadlineExceeded`."""
        while True:
            self.parts.log.raise_error()
            try:
                item = await asyncio.wait_for(self._inbox.get(), _TICK_S)
            except TimeoutError:
                self._observe()
                self._check_rollout()
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def _check_rollout(self) -> None:
        """A rollout is alive while events come or the engine decodes; an outage of something that
        the rewards need is waited for by them, as long as they are told to."""
        if self._engine_works() or self._rewards_wait():
            return
        with self._lock:
            what = self.parts.job.waiting_for()
            key = "reward_s" if self.parts.job.waits_for_rewards else "generation_s"
        limit = getattr(self.config.deadlines, key)
        if self.now() - self._last_sign > limit:
            raise DeadlineExceeded(what, limit, f"deadlines.{key}")

    def _rewards_wait(self) -> bool:
        """Whether the rewards wait for something outside that is down."""
        if self.parts.reward.outage() is None:
            return False
        self._last_sign = self.now()
        return True

    def _engine_works(self) -> bool:
        """Whether the engine made progress since the last look."""
        steps = self.parts.engine.status().decode_steps
        if steps == self._last_decode_steps:
            return False
        self._last_decode_steps, self._last_sign = steps, self.now()
        return True

    async def _by(
        self,
        key: str,
        awaitable: Awaitable[T],
        what: str | None = None,
        lives: Callable[[], bool] = lambda: False,
    ) -> T:
        """Await, but no longer than the deadline `key` without a sign of life."""
        limit: float = getattr(self.config.deadlines, key.removeprefix("deadlines."))
        future = asyncio.ensure_future(awaitable)
        while True:
            done, _ = await asyncio.wait({future}, timeout=limit)
            if done:
                return future.result()
            if not lives():
                future.cancel()
                with self._lock:
                    what = what or self.parts.job.waiting_for()
                raise DeadlineExceeded(what, limit, key)


async def hand_over_weights(trainer: Trainer, engine: Engine, version: int) -> None:
    """Bring the engine to the trainer's weights, and see that they have arrived.

    Raises `TrainerError` if a fixed sample of them differs afterwards.
    """
    hand_over = await trainer.hand_over()
    await engine.update_weights(version, hand_over.weights)
    found = await asyncio.to_thread(engine.weight_probe)
    if found != hand_over.probe:
        raise TrainerError(
            f"the engine's weights are not the trainer's at version {version} (probes {found[:12]} "
            f"and {hand_over.probe[:12]}): the transfer went wrong, or something else wrote to one "
            "of them. Nothing was generated with them; --resume loads both anew from the last "
            "checkpoint"
        )


def _common_factor(
    samples: Sequence[TrainSample], streamed: Mapping[SampleId, TrainSample]
) -> float:
    """What the provisional weights of the streamed samples must be multiplied by to be those of the
    whole step."""
    factors = []
    for sample in samples:
        early = streamed.get(sample.sample)
        if early is not None:
            assert early.advantage == sample.advantage, f"{sample.sample} changed its advantage"
            if early.token_weight == 0:  # left out of the loss, whatever the denominator
                assert sample.token_weight == 0, f"{sample.sample} changed its weight"
            else:
                factors.append(sample.token_weight / early.token_weight)
    factor = factors[0] if factors else 1.0
    assert all(math.isclose(factor, other, rel_tol=1e-9) for other in factors)
    return factor


def _by_sample(
    groups: Sequence[Sequence[SampleId]], weights: Sequence[Sequence[float]]
) -> dict[SampleId, float]:
    return {
        sample: weight
        for group, of_group in zip(groups, weights, strict=True)
        for sample, weight in zip(group, of_group, strict=True)
    }
