"""Tail batching for a trainer and engines that are not RollPacker's: the core (`rollpacker/core`)
between their steps.

    begin_step()  -> Host.start(requests) ... Host.stop(requests)
    ended(...)       from the host, once for each request that was started; it may start and stop
                     others, and completes the step: its groups, in the order of their launch
    trained()     -> the step's metrics
    save(), resume   which prompts wait for a later step, and the tokens that they have

All that a host does at a call of `Host` is quick, or begun in the background: it is called under a
lock. Every method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

from rollpacker.bus import Bus, Recorded, Routes, Unsaid
from rollpacker.core.commands import (
    OF_TURNS,
    Abort,
    CancelScore,
    Commit,
    Drop,
    Enter,
    FetchPrompts,
    Finish,
    Launch,
    Leave,
    Move,
    Place,
    Release,
    Remind,
    Replace,
    Resize,
    RestoreTrainer,
    Score,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.records import Entry, Session
from rollpacker.data.dataset import Cursor
from rollpacker.engines.engine import Carried, EngineOutput, Response, sample_key
from rollpacker.report.accounting import Accounting
from rollpacker.report.step_summary import StepSummary
from rollpacker.run.errors import DeadlineExceeded
from rollpacker.run.ports.carried import CarriedTokens, read_carried, write_carried
from rollpacker.run.ports.clock import RealClock
from rollpacker.writing import fsync

logger = logging.getLogger(__name__)

Reason = Literal["stop", "length", "stopped", "failed"]
"""How a request ended: at an end token or stop string, at the longest response allowed, because
`Host.stop` was called, or because the engine failed on it."""

FOLDER = "rollpacker"
"""Name of the folder in the host's checkpoints with what `Scheduler.save` saves."""
STATE = "state.json"
"""Name of the file there that has all but the tokens."""
SOURCE = "train"
"""Source of the prompts that a host's data loader gives (`PromptId.source`)."""
TOKENIZER = "that of the checkpoint"
"""Stands for the tokenizer's fingerprint in saved tokens, as a host's tokenizer is not known."""
LIMIT = "limit_s"
"""Name of the limit that a passed deadline is told with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response that the host is to generate."""

    sample: SampleId
    noise: SampleId
    """The sample that had the same random numbers first: the prompt's first start of this place."""
    seed: int
    """Seed of the response's random numbers, from 0 to 2 ** 63 - 1, which depends on the prompt and
    the place. An engine whose noise depends on nothing but the seed and a token's position draws
    the same response whenever it is started under the same weights."""
    carried: Carried | None = None
    """Tokens that an earlier start of the response left. None: there are none, or the host takes
    none up."""

    @property
    def id(self) -> str:
        """Name of the request. No two requests of a run have the same."""
        return str(self.sample)

    @property
    def place(self) -> int:
        """Which of its prompt's responses this is, from 0. A prompt that is started again has the
        same places again."""
        return self.noise.index

    @property
    def prompt(self) -> int:
        """Number of the prompt: its row in the data or, with `Counted`, how many the data loader
        gave before it."""
        return self.sample.prompt.row


class Host(Protocol):
    """What a trainer's engines do for the scheduler. Both calls return at once."""

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to generate these responses. Responses to one prompt are adjacent."""
        ...

    def stop(self, requests: Sequence[Request]) -> None:
        """Stop these responses, and report what they had (`Scheduler.ended` with "stopped"). One
        that had just ended by itself may be reported as that."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What a step trains on."""

    number: int
    """Number of the step, from 1."""
    groups: tuple[tuple[Request, ...], ...]
    """The responses of each prompt, in the order in which they were started."""


class Counted:
    """Numbers a trainer's prompts, from 0, in the order in which its data loader gives them. A
    prompt's random numbers depend on its number, so the loader must give the same prompts in the
    same order after a resume."""

    def __init__(self, fetch: Callable[[int], int]) -> None:
        """`fetch` is called with a number of prompts, takes so many more from the data loader, and
        returns how many it got: fewer where the data end."""
        self._fetch = fetch
        self.num_fetched = 0
        """Number of prompts fetched so far: the next prompt's number."""
        self.ended = False
        """Whether the data have ended."""

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Fetch up to `count` prompts. Returns their ids, and twice whether the data have ended:
        to RollPacker, all of a trainer's epochs are one."""
        found = 0 if self.ended else self._fetch(count)
        if not 0 <= found <= count:
            raise ValueError(f"{found} prompts were fetched, where {count} were asked for")
        self.ended = found < count
        first, self.num_fetched = self.num_fetched, self.num_fetched + found
        rows = range(first, self.num_fetched)
        return tuple(PromptId(SOURCE, 0, row) for row in rows), self.ended, self.ended

    def state(self) -> dict[str, Any]:
        return {"num_fetched": self.num_fetched, "ended": self.ended}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_fetched, self.ended = state["num_fetched"], state["ended"]


class Scheduler:
    """Decides which responses a trainer's engines generate, and which of them a step trains on."""

    def __init__(
        self,
        config: JobConfig,
        host: Host,
        cursor: Cursor,
        *,
        seed: int = 0,
        resume: Path | None = None,
    ) -> None:
        """Begin with `config`, or go on from what `save` saved in the folder `resume` of a
        checkpoint. `cursor` gives the prompts (`Counted`, for a host's own data loader). `seed` is
        that of all random numbers.

        Without saved state in `resume` a run goes on with the next prompts, and says so: those that
        waited for a later step are not trained on. Raises `ValueError` if the state there cannot be
        read or does not fit the cursor.
        """
        _check(config)
        self._host, self._cursor, self._seed = host, cursor, seed
        job, waiting = (Job(config), None) if resume is None else _restored(resume, config, cursor)
        self._carried = CarriedTokens(config.tail_batching, waiting)
        self._waiting = waiting or {}
        """Tokens of the prompts that wait for a later step, as of the last step's end."""
        self._running: dict[SampleId, Request] = {}
        self._stopping: set[SampleId] = set()
        self._ended: dict[SampleId, Request] = {}
        """Requests of this step that ended by themselves."""
        self._step: Future[Step | None] = Future()
        self._accounting = Accounting(max_response_tokens=config.max_response_tokens)
        self._accounting.history.last_step = job.step
        self._bus = Bus(job, RealClock(0.0), sinks=[self._account])
        self._bus.connect(self, self._carried, Recorded(Drop, CancelScore), Unsaid(*OF_TURNS))
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._reported_s = dict.fromkeys(CAUSES, 0.0)
        self._bus.write(
            Session(started_at=started_at, time_s=0.0, step=job.step, job=config.to_plain())
        )

    # -- what a host calls ---------------------------------------------------------------------

    def begin_step(self) -> Future[Step | None]:
        """Start the requests of the next step. The result is what it trains on, once that is
        known; None if the data have ended. Raises `RuntimeError` unless the step before was
        trained on."""
        job = self._bus.job
        with self._bus.lock:
            if job.phase not in (Phase.NEW, Phase.COMMITTING):
                raise RuntimeError(
                    f"step {job.step + 1} was begun and is not trained on yet: call trained() when "
                    "it is"
                )
            step = self._step = Future()
            if job.phase is Phase.NEW:
                self._bus.take(RunStarted(time_s=0.0))
            else:
                self._bus.take(Committed(time_s=0.0, step=job.step, checkpointed=True))
        return step

    def next_step(self, limit_s: float | None = None) -> Step | None:
        """Begin a step and wait for it (`begin_step`). Raises `DeadlineExceeded` after `limit_s`
        seconds, with what was waited for; None waits for ever."""
        step = self.begin_step()
        try:
            return step.result(limit_s)
        except TimeoutError:
            assert limit_s is not None
            raise DeadlineExceeded(self.waiting_for(), limit_s, LIMIT) from None

    async def next_step_async(self) -> Step | None:
        """Begin a step and wait for it (`begin_step`), while other tasks of the event loop run."""
        return await asyncio.wrap_future(self.begin_step())

    def waiting_for(self) -> str:
        """Return what the step waits for, in words."""
        with self._bus.lock:
            return self._bus.job.waiting_for()

    def ended(
        self,
        request: Request | str,
        tokens: int | Sequence[int] = 0,
        reason: Reason = "stop",
        *,
        log_probs: Sequence[float] = (),
        num_kept: int | None = None,
        why: str = "",
    ) -> None:
        """Report the end of a request, once for each. `tokens` are the response's, or their number
        where nothing is carried. `log_probs` has one for each of the tokens. `num_kept`: how many
        of the carried tokens came out the same; None: not compared. `why` says how the engine
        failed. Raises `ValueError` for a request that is not running."""
        with self._bus.lock:
            sample = request.sample if isinstance(request, Request) else _parsed(request)
            if reason == "stopped" and sample not in self._stopping:
                reason, why = "failed", why or "the engine stopped it, and was not asked to"
            if reason == "failed":
                failed = SampleFailed(time_s=0.0, sample=sample, reason=why or "no reason given")
                self.heard(EngineOutput(failed))
            else:
                self.heard(self._output(sample, tokens, reason, log_probs, num_kept))

    def heard(self, output: EngineOutput) -> None:
        """Report the end of a request in the words of RollPacker's own engines (`ended`)."""
        event, response = output.event, output.response
        with self._bus.lock:
            request = self._running.pop(event.sample, None)
            if request is None:
                raise ValueError(
                    f"request {event.sample} is not running: it has ended before, or was never "
                    "started"
                )
            self._stopping.discard(event.sample)
            if not isinstance(event, SampleFailed):
                self._carried.ended(event, response)
            if isinstance(event, SampleGenerated):
                self._ended[event.sample] = request
            try:
                self._bus.take(event)
            except BaseException as error:  # of the host, as it starts or stops others
                self.fail(error)
                raise

    def trained(self) -> dict[str, float]:
        """Report that the step was trained on, and that what is started from now on is generated
        with new weights. Returns the step's metrics: seconds by cause, prompts, tokens, lengths."""
        with self._bus.lock:
            job = self._bus.job
            if job.phase is not Phase.TRAINING:
                raise RuntimeError("no step waits to be trained on: call next_step() first")
            self._bus.take(Trained(time_s=0.0, step=job.step + 1, version=job.version + 1))
            seconds, before = self.seconds(), self._reported_s
            self._reported_s = seconds
            spent = {f"{name}_s": value - before[name] for name, value in seconds.items()}
            return spent | counts_of(self._accounting.so_far(job.step))

    def fail(self, error: BaseException) -> None:
        """End the step under way with this error, which is raised to whoever waits for it."""
        with self._bus.lock:
            if not self._step.done():
                self._step.set_exception(error)

    @property
    def is_trained(self) -> bool:
        """Whether the last step was trained on, so that the state can be saved."""
        return self._bus.job.phase is Phase.COMMITTING

    @property
    def waits_for_training(self) -> bool:
        """Whether the last step's groups are known, and were not trained on yet."""
        return self._bus.job.phase is Phase.TRAINING

    @property
    def waiting(self) -> frozenset[int]:
        """Numbers (`Request.prompt`) of the prompts that wait for a later step."""
        return frozenset(one.prompt.row for one in self._bus.job.queues.waiting())

    @property
    def version(self) -> int:
        """Number of steps that were trained on, which is that of the weights' updates."""
        return self._bus.job.version

    def seconds(self) -> dict[str, float]:
        """Seconds so far by cause (`CAUSES`), which add up to the time since the beginning."""
        with self._bus.lock:
            seconds = self._accounting.seconds()
        return {name: sum(seconds[one] for one in causes) for name, causes in CAUSES.items()}

    def report(self) -> str:
        """Return the seconds so far by cause as one line of text."""
        seconds = self.seconds()
        wall = sum(seconds.values())
        parts = [
            f"{name.replace('_', ' ')} {spent:.1f} s ({spent / max(wall, 1e-9):.0%})"
            for name, spent in seconds.items()
        ]
        return f"rollpacker: {self.version} steps in {wall:.1f} s: {', '.join(parts)}"

    def save(self, checkpoint: Path) -> None:
        """Save which prompts wait for a later step, and their tokens, in a folder of the host's
        checkpoint. If the process is killed in it, the folder has the state that it had before.
        Raises `RuntimeError` in the middle of a step."""
        with self._bus.lock:
            if not self.is_trained:
                raise RuntimeError(
                    "a step is under way: save after trained(), before the next step"
                )
            folder = checkpoint / FOLDER
            tokens, beside = folder / uuid4().hex, folder / f"{STATE}.tmp"
            tokens.mkdir(parents=True)
            write_carried(tokens, self._waiting, TOKENIZER)
            state = {"job": self._bus.job.state(), "cursor": self._cursor.state()}
            beside.write_text(json.dumps(state | {"tokens": tokens.name}) + "\n")
            for path in (*tokens.rglob("*"), tokens, beside):
                fsync(path)
            beside.replace(folder / STATE)  # all of the new state is there, or none
            fsync(folder)
            for old in {*folder.iterdir()} - {tokens}:
                if old.is_dir():
                    shutil.rmtree(old, ignore_errors=True)

    # -- the core's commands -------------------------------------------------------------------

    def routes(self) -> Routes:
        """The functions that carry out the core's commands (`Bus.connect`)."""
        return {
            FetchPrompts: self._fetch,
            Launch: self._launch,
            Abort: self._abort,
            Score: lambda command: self._bus.take(
                SampleScored(time_s=0.0, sample=command.sample, value=0.0)
            ),
            TrainOn: self._train_on,
            SyncWeights: lambda command: self._bus.take(
                WeightsSynced(time_s=0.0, version=command.version)
            ),
            Commit: self._commit,
            Finish: lambda command: self._step.set_result(None),
            **dict.fromkeys((Place, Move, Replace, Resize, Release, StartGradients), _never),
            **dict.fromkeys((RestoreTrainer, Enter, Leave, Remind), _never),
        }

    def _account(self, entry: Entry) -> None:
        self._accounting.feed(entry)

    def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self._cursor.take(command.count)
        self._bus.take(
            PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            )
        )

    def _launch(self, command: Launch) -> None:
        requests = [
            Request(
                sample=sample,
                noise=noise,
                seed=sample_key(self._seed, noise) >> 1,
                carried=carried,
            )
            for sample, noise, carried in self._carried.launched(command)
        ]
        self._running |= {request.sample: request for request in requests}
        self._host.start(requests)

    def _abort(self, command: Abort) -> None:
        requests = [self._running[s] for s in command.samples if s in self._running]
        self._stopping |= {request.sample for request in requests}
        self._host.stop(requests)

    def _train_on(self, command: TrainOn) -> None:
        groups = tuple(tuple(self._ended[s] for s in group) for group in command.groups)
        self._step.set_result(Step(self._bus.job.step + 1, groups))

    def _commit(self, command: Commit) -> None:
        self._waiting = self._carried.settle()
        self._ended.clear()
        if not self._step.done():  # all of the step's prompts were dropped: on with the next
            self._bus.take(Committed(time_s=0.0, step=command.step, checkpointed=True))

    def _output(
        self,
        sample: SampleId,
        tokens: int | Sequence[int],
        reason: str,
        log_probs: Sequence[float],
        num_kept: int | None,
    ) -> EngineOutput:
        """Return the end of a request as RollPacker's own engines report it."""
        version, response = self.version, None
        if isinstance(tokens, int):
            if self._carried.carries:
                raise ValueError(
                    "tokens are carried to a later step here, so ended() takes the tokens and not "
                    "their number; or set carry=none"
                )
            count = tokens
        else:
            count = len(tokens)
            response = Response(
                sample=sample,
                prompt_tokens=(),
                tokens=tuple(tokens),
                log_probs=tuple(log_probs),
                finish_reason="aborted" if reason == "stopped" else reason,
                version=version,
            )
        if reason == "stopped":
            return EngineOutput(
                SampleAborted(time_s=0.0, sample=sample, num_tokens=count, num_kept=num_kept),
                response if count else None,
            )
        event = SampleGenerated(
            time_s=0.0,
            sample=sample,
            num_tokens=count,
            finish_reason=reason,
            version=version,
            num_kept=num_kept,
        )
        return EngineOutput(event, response)


CAUSES = {
    "decode": ("decode",),
    "tail_idle": ("tail_idle",),
    "training": ("training",),
    "between_steps": ("checkpoint",),
    "controller": ("controller", "sync", "reward_wait", "startup"),
}
"""What seconds went into, with the causes (`report/time_book.py`) that each name adds up. decode:
slots that generated; tail_idle: slots that stood empty until the rest of the round had ended;
training: from a step's groups to `trained`; between_steps: from there to the next step; controller:
decisions, here and in the host's answers to them."""


def counts_of(step: StepSummary) -> dict[str, float]:
    """A step's metrics for the host's tables, but for its seconds."""
    return {
        "is_long_round": float(step.kind in ("long", "flush")),
        "prompts_launched": float(step.prompts.launched),
        "prompts_deferred": float(step.prompts.deferred),
        "prompts_waiting": float(step.prompts.long_queue),
        "generated_per_trained": step.tokens.generated / max(step.tokens.trained, 1),
        **dict(step.lengths.bias),
    }


def _check(config: JobConfig) -> None:
    """Raise `ValueError` for settings that need the host's loss or rewards to do what they do
    not."""
    tail = config.tail_batching
    if tail.debias != "none":
        raise ValueError(
            f"tail_batching.debias={tail.debias} is not possible in another trainer, whose loss "
            "takes no weight of each sample: remove the setting"
        )
    if tail.race == "scored":
        raise ValueError(
            "tail_batching.race=scored is not possible in another trainer, which gives no rewards "
            "while others generate: remove the setting"
        )
    if tail.look_ahead:
        raise ValueError(
            f"tail_batching.look_ahead={tail.look_ahead:g} has not been tried in another trainer: "
            "remove the setting"
        )


def _restored(folder: Path, config: JobConfig, cursor: Cursor) -> tuple[Job, Any]:
    """Return the job that `Scheduler.save` saved, and the tokens of its prompts that wait."""
    path = folder / FOLDER / STATE
    if not has_state(folder):
        logger.warning(
            "%s is not there: the run goes on with the next prompts of the data, and those that "
            "waited for a later step at this checkpoint are not trained on",
            path,
        )
        return Job(config), None
    try:
        state = json.loads(path.read_text())
        of_job, of_cursor = state["job"], state["cursor"]
        tokens = path.parent / state.get("tokens", "")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    cursor.restore(of_cursor)
    job = Job.restore(config, of_job, data_ended=cursor.ended)
    return job, read_carried(tokens, TOKENIZER, job.queues.carried())


def has_state(checkpoint: Path) -> bool:
    """Whether this folder of a checkpoint has what `Scheduler.save` saves."""
    return (checkpoint / FOLDER / STATE).exists()


def _parsed(name: str) -> SampleId:
    try:
        return SampleId.parse(name)
    except ValueError:
        raise ValueError(f"{name!r} is not the id of a request") from None


def _never(command: object) -> None:
    raise AssertionError(f"{command}: engines and gradients are the host's")
