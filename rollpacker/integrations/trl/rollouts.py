"""The rollouts of one training. Between the steps of TRL's trainer they drive the core
(`rollpacker.core`), which decides what runs.

    next_step()   RunStarted or Committed -> FetchPrompts -> Launch -> ... -> TrainOn: its groups
    trained()     Trained -> SyncWeights -> Commit, held until the next step is asked for

The core's commands are executed at once, in the thread in which they are given: prompts are ready,
the engine reads the trainer's own weights, and every sample gets a verdict of 0, since TRL computes
the rewards. The caller of `next_step` waits for the step, under a deadline.
"""

from __future__ import annotations

import json
import queue
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
    SampleFailed,
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.records import Entry, Session
from rollpacker.data.dataset import Cursor, PromptRow
from rollpacker.engines.engine import (
    Engine,
    EngineError,
    EngineOutput,
    GenerationRequest,
    Response,
    SamplingParams,
)
from rollpacker.report.history import History
from rollpacker.report.time_book import TimeBook
from rollpacker.run.errors import DeadlineExceeded
from rollpacker.run.ports.carried import CarriedTokens, KeptByPrompt, read_carried, write_carried
from rollpacker.run.ports.clock import RealClock

FOLDER = "rollpacker"
"""Name of the folder in TRL's checkpoints with the prompts that were put off to a later step."""
TOKENIZER = "that of the checkpoint"

LIMIT = "generation_s of rollout_function"
LOOKS = 20
"""Number of times per deadline at which it is checked whether the engine has decoded further."""

Groups = list[list[Response]]
"""The responses of each prompt, in the order in which they were submitted."""
Found = queue.SimpleQueue[Groups | BaseException]


class Rollouts:
    """The rollouts of one training. Its methods are called in the thread that trains; the engine's
    outputs arrive in the engine's thread."""

    def __init__(
        self,
        job: Job,
        *,
        engine: Engine,
        cursor: Cursor,
        prompts: Sequence[PromptRow],
        sampling: SamplingParams,
        generation_s: float,
        waiting: KeptByPrompt | None = None,
    ) -> None:
        """Begin rollouts from the state `job`. `prompts` has the prompt of each row of the data
        set. `waiting` are tokens generated for prompts that were put off to a later step, from
        a checkpoint; None in a new training. `generation_s` is the longest time without a sign
        of life from the engine."""
        self.engine = engine
        self.cursor = cursor
        self.waiting: KeptByPrompt = waiting or {}
        """Tokens generated for prompts that are put off to a later step, as they were when the
        last step's training ended."""
        self._history = History()
        self._history.last_step = job.step
        self._time = TimeBook(slots=None)
        self._prompts = prompts
        self._sampling = sampling
        self._generation_s = generation_s
        self._carried = CarriedTokens(job.config.tail_batching, waiting)
        self._responses: dict[SampleId, Response] = {}
        self._found = Found()
        self._reported_s = self.seconds()
        at_once(engine.update_weights(job.version))
        self.bus = Bus(job, RealClock(0.0), sinks=[self._account])
        self.bus.connect(self, self._carried, Recorded(Drop, CancelScore), Unsaid(*OF_TURNS))
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        session = Session(
            started_at=started_at, time_s=0.0, step=job.step, job=job.config.to_plain()
        )
        self.bus.write(session)

    def routes(self) -> Routes:
        return {
            FetchPrompts: self._fetch,
            Launch: self._launch,
            Abort: lambda command: self.engine.abort(command.samples),
            Score: self._score,
            TrainOn: self._train_on,
            SyncWeights: self._sync,
            Commit: self._commit,
            Finish: self._finish,
            **dict.fromkeys((Place, Move, Replace, Resize, Release), self._never),
            **dict.fromkeys((StartGradients, RestoreTrainer, Enter, Leave, Remind), self._never),
        }

    def next_step(self) -> Groups:
        """Generate the next step, and return its responses: `samples_per_prompt` for each of
        `prompts_per_step` prompts. Raises `DeadlineExceeded`, and `EngineError` for a sample that
        the engine cannot generate."""
        job = self.bus.job
        if job.phase is Phase.TRAINING:  # the trainer trains several times before it steps
            self.trained()
        self.engine.start(self._on_outputs, self._found.put)
        if job.phase is Phase.NEW:
            self.bus.take(RunStarted(time_s=0.0))
        else:
            self.bus.take(Committed(time_s=0.0, step=job.step, checkpointed=True))
        return wait_for(self._found, self.engine, self._generation_s, job.waiting_for)

    def trained(self) -> dict[str, float]:
        """Report to the core that the step was trained on and that the weights are new.
        Returns the step's metrics."""
        job = self.bus.job
        self.bus.take(Trained(time_s=0.0, step=job.step + 1, version=job.version + 1))
        return self._metrics()

    def seconds(self) -> dict[str, float]:
        """Seconds of the training so far, by cause (see `CAUSES`)."""
        return self._time.seconds(self._history.step.peak_live)

    def report(self) -> str:
        """The seconds of the training so far, by cause, as one line of text."""
        seconds = self.seconds()
        wall = sum(seconds.values())
        parts = []
        for name, causes in CAUSES.items():
            spent = sum(seconds[cause] for cause in causes)
            parts.append(f"{name.replace('_', ' ')} {spent:.1f} s ({spent / max(wall, 1e-9):.0%})")
        return f"rollpacker: {self.bus.job.version} steps in {wall:.1f} s: {', '.join(parts)}"

    def save(self, checkpoint: Path) -> None:
        """Save the job (the state of these rollouts) and the prompts put off to a later step beside
        TRL's checkpoint. Saves nothing if TRL has yet to train again on the last generation, since
        a training cannot resume there."""
        job, folder = self.bus.job, checkpoint / FOLDER
        if job.phase is not Phase.COMMITTING:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_carried(folder, self.waiting, TOKENIZER)
        state = {"job": job.state(), "cursor": self.cursor.state()}
        (folder / "state.json").write_text(json.dumps(state) + "\n")

    # -- the ports -----------------------------------------------------------------------------

    def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self.cursor.take(command.count)
        self.bus.take(
            PromptsFetched(
                time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
            )
        )

    def _launch(self, command: Launch) -> None:
        self.engine.submit(self._carried.requests(command, self._prompts, self._sampling))

    def _score(self, command: Score) -> None:
        self.bus.take(SampleScored(time_s=0.0, sample=command.sample, value=0.0))

    def _train_on(self, command: TrainOn) -> None:
        self._found.put([[self._responses[s] for s in group] for group in command.groups])
        self._responses.clear()

    def _sync(self, command: SyncWeights) -> None:
        at_once(self.engine.update_weights(command.version))
        self.bus.take(WeightsSynced(time_s=0.0, version=command.version))

    def _commit(self, command: Commit) -> None:
        self.waiting = self._carried.settle()

    def _finish(self, command: Finish) -> None:
        self._found.put(RuntimeError(f"TRL asks for another step, but {command.reason}"))

    def _never(self, command: object) -> None:
        raise AssertionError(f"{command}: one device, and gradients are the trainer's")

    # -- what is heard -------------------------------------------------------------------------

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Handle the outputs of a decode step. Called in the engine's thread, between two steps."""
        with self.bus.lock:
            for output in outputs:
                event = output.event
                if isinstance(event, SampleFailed):
                    self._found.put(failure(event))
                    return
                self._carried.ended(event, output.response)
                if isinstance(event, SampleGenerated):
                    assert output.response is not None, f"{event.sample} has no response"
                    self._responses[event.sample] = output.response
                self.bus.take(event)

    def _account(self, entry: Entry) -> None:
        self._time.advance(entry, self._history.phase, len(self._history.live))
        done = self._history.feed(entry)
        if done is not None:
            self._time.close_step(done.peak_live)

    def _metrics(self) -> dict[str, float]:
        seconds = self.seconds()
        before, self._reported_s = self._reported_s, seconds
        step = self._history.step
        samples = step.samples.values()
        trained = sum(step.samples[s].num_tokens for group in step.groups for s in group)
        spent = {
            name: sum(seconds[cause] - before[cause] for cause in causes)
            for name, causes in CAUSES.items()
        }
        return {
            **{f"{name}_s": value for name, value in spent.items()},
            "is_long_round": float(step.kind in ("long", "flush")),
            "prompts_launched": float(len({sample.sample.prompt for sample in samples})),
            "prompts_deferred": float(len(step.prompts.deferred)),
            "prompts_waiting": float(len(self._history.queue)),
            "generated_per_trained": sum(s.num_generated for s in samples) / max(trained, 1),
        }


def restore(checkpoint: Path, config: JobConfig, cursor: Cursor) -> tuple[Job, KeptByPrompt] | None:
    """Return the job (state of the rollouts) that `Rollouts.save` saved in this checkpoint, and the
    tokens kept of its deferred prompts (put off to a later step). `cursor` continues from its saved
    place. None: no job was saved. Raises `ValueError` if the job does not fit the data, or cannot
    be read."""
    folder = checkpoint / FOLDER
    if not (folder / "state.json").exists():
        return None
    state = json.loads((folder / "state.json").read_text())
    cursor.restore(state["cursor"])
    job = Job.restore(config, state["job"], data_ended=cursor.ended)
    queues = job.queues
    waits = [*queues.long, *(one for tier in queues.tiers for one in tier)]
    expected = {one.prompt: [carried.tokens for carried in one.carried] for one in waits}
    return job, read_carried(folder, TOKENIZER, expected)


CAUSES = {
    "decode": ("decode",),
    "tail_idle": ("tail_idle",),
    "training": ("training",),
    "between_steps": ("checkpoint",),
    "controller": ("controller", "sync"),
}
"""What the seconds of a training went into, as `Rollouts.seconds` names it; each such cause with
its names in the record of times that the core (`rollpacker.core`) keeps. training is TRL's rewards
and gradients; between_steps is its evaluations, logs and checkpoints."""


def wait_for(found: Found, engine: Engine, limit_s: float, what: Callable[[], str]) -> Groups:
    """Wait for the responses that the engine's thread puts into `found`, and return them. Raises
    `DeadlineExceeded` after `limit_s` seconds without a decode step of the engine, with the text
    that `what` returns (what is waited for), and any exception put into `found`."""
    steps, last_sign = -1, time.monotonic()
    while True:
        try:
            item = found.get(timeout=limit_s / LOOKS)
        except queue.Empty:
            now = engine.status().decode_steps
            if now != steps:
                steps, last_sign = now, time.monotonic()
            elif time.monotonic() - last_sign > limit_s:
                raise DeadlineExceeded(what(), limit_s, LIMIT) from None
            continue
        if isinstance(item, BaseException):
            raise item
        return item


def collect(
    engine: Engine, requests: Sequence[GenerationRequest], generation_s: float
) -> list[Response]:
    """Generate responses without tail batching, for an evaluation, and return them in the order of
    the requests. Raises `DeadlineExceeded` after `generation_s` seconds without a decode step, and
    `EngineError` for a sample that the engine cannot generate."""
    responses: dict[SampleId, Response] = {}
    found = Found()

    def listen(outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output.event, SampleFailed):
                found.put(failure(output.event))
            elif output.response is not None:
                responses[output.event.sample] = output.response
        if len(responses) == len(requests):
            found.put([[responses[request.sample] for request in requests]])

    engine.start(listen, found.put)
    engine.submit(requests)
    what = f"{len(requests)} responses of an evaluation from the engine"
    return wait_for(found, engine, generation_s, lambda: what)[0]


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never has to wait, up to its end. No event loop is used, since in a
    notebook one runs already. Raises `AssertionError` if it would wait."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("there was something to wait for")


def failure(event: SampleFailed) -> EngineError:
    return EngineError(f"no response {event.sample}: {event.reason}")
