"""Parts that meet the protocols without a model: small, quick, and as broken as a test wants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollpacker.cluster.seats.seat import Seat
from rollpacker.config.schema import (
    CheckpointConfig,
    DeadlineConfig,
    EvalConfig,
    RolloutConfig,
    RunConfig,
)
from rollpacker.core.checks.reward_schedule import RewardScheduleConfig
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.pooled_job import PooledJob
from rollpacker.data.cursor import PromptCursor
from rollpacker.data.dataset import DataConfig, DatasetConfig, PromptRow, PromptSet
from rollpacker.engines.engine import EngineOutput, EngineStatus, GenerationRequest, Response
from rollpacker.rewards.reward import Failed, Reward, RewardConfig, RewardInput, Scored
from rollpacker.run.driver import Controller, Parts
from rollpacker.run.folder.event_log import LogWriter
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.ports.carried import CarriedTokens
from rollpacker.run.ports.engines import Engines, Weights
from rollpacker.run.ports.salvage import Salvage
from rollpacker.trainer.trainer import (
    HandOver,
    ModelConfig,
    ScoreRequest,
    TokenScores,
    TrainConfig,
    TrainSample,
)


@dataclass
class Live:
    """What the fake engine has of a sample."""

    request: GenerationRequest
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_kept: int | None = None
    is_new: bool = True
    """It has not been looked at."""


class FakeEngine:
    """Responses of known lengths; one token per step, all at once, like the real one.

    A response depends on its noise alone (`draw`), so that what is carried comes out as it was."""

    def __init__(self, silent: bool = False, step_s: float = 0.0) -> None:
        self.silent = silent
        self.step_s = step_s
        self.version = 0
        self.steps = 0
        self.num_drawn = 0
        """Tokens that were not taken up."""
        self._live: dict[SampleId, Live] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._gone: list[SampleId] = []

    def draw(self, noise: SampleId) -> tuple[int, ...]:
        """The whole response from the weights at hand, as it comes out from scratch."""
        return (7,) * (1 + hash((noise.prompt.row, noise.index)) % 9)

    def start(self, listener: Callable[..., None], on_error: Callable[..., None]) -> None:
        self._listener, self._on_error = listener, on_error
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._wake:
            for request in requests:
                self._live[request.sample] = Live(request)
            self._wake.notify()

    def abort(self, samples: Sequence[SampleId]) -> None:
        with self._wake:
            self._gone += [sample for sample in samples if sample in self._live]
            self._wake.notify()

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """It keeps nothing."""

    def _work(self) -> None:
        try:
            while not self._closed:
                with self._wake:
                    if (not self._live or self.silent) and not self._gone:
                        self._wake.wait(0.05)
                        continue
                    outputs = self._step()
                time.sleep(self.step_s)  # without the lock: others may want to say something
                if outputs:
                    self._listener(outputs)
        except BaseException as error:
            self._on_error(error)

    def _step(self) -> list[EngineOutput]:
        outputs = []
        for sample in self._gone:
            if (live := self._live.pop(sample, None)) is not None:
                outputs.append(self._aborted(sample, live))
        self._gone = []
        if outputs:
            return outputs
        self.steps += 1
        for sample, live in list(self._live.items()):
            self._go_on(live)
            if len(live.tokens) == live.length:
                outputs.append(self._finished(sample, live.request, live.length))
                del self._live[sample]
        return outputs

    def _go_on(self, live: Live) -> None:
        """By one token, the first time by what is carried as well."""
        request, carried = live.request, live.request.carried
        whole = self.draw(request.noise or request.sample)
        if live.is_new:
            live.is_new, live.length = False, len(whole)
            if carried is not None:
                pairs = zip(carried.tokens, whole, strict=False)
                same = [one == other for one, other in pairs]
                kept = same.index(False) if False in same else len(same)
                live.num_kept = kept if carried.verify else None
                kept = kept if carried.verify else len(carried.tokens)
                live.tokens = list(whole[:kept] if carried.verify else carried.tokens)
                live.log_probs = [
                    self._log_prob() if carried.verify else p for p in carried.log_probs
                ]
                del live.log_probs[kept:]
        if len(live.tokens) < live.length:
            self.num_drawn += 1
            live.tokens.append(whole[len(live.tokens)])
            live.log_probs.append(self._log_prob())

    def _log_prob(self) -> float:
        return -1.0

    def _response(self, live: Live, reason: Any) -> Response:
        return Response(
            sample=live.request.sample,
            prompt_tokens=live.request.prompt_tokens,
            tokens=tuple(live.tokens),
            log_probs=tuple(live.log_probs),
            finish_reason=reason,
            version=self.version,
        )

    def _aborted(self, sample: SampleId, live: Live) -> EngineOutput:
        if live.is_new and live.request.carried is not None:
            live.tokens = list(live.request.carried.tokens)
            live.log_probs = list(live.request.carried.log_probs)
        event = SampleAborted(
            time_s=0, sample=sample, num_tokens=len(live.tokens), num_kept=live.num_kept
        )
        return EngineOutput(event, self._response(live, "aborted") if live.tokens else None)

    def _finished(self, sample: SampleId, request: GenerationRequest, length: int) -> EngineOutput:
        live = self._live[sample]
        event = SampleGenerated(
            time_s=0,
            sample=sample,
            num_tokens=length,
            finish_reason="stop",
            version=self.version,
            num_kept=live.num_kept,
        )
        return EngineOutput(event, self._response(live, "stop"))

    async def update_weights(self, version: int, weights: object = None) -> None:
        self.version = version

    async def offload(self) -> None:
        pass

    async def reload(self) -> None:
        pass

    def weight_probe(self) -> str:
        return f"version {self.version}"

    def status(self) -> EngineStatus:
        return EngineStatus(
            num_running=len(self._live),
            num_waiting=0,
            version=self.version,
            generated_tokens=0,
            decode_steps=self.steps,
        )

    async def close(self) -> None:
        self._closed = True


@dataclass
class FakeTrainer:
    version: int = 0
    fail_at: int | None = None
    error: BaseException | None = None
    trained: list[list[SampleId]] = field(default_factory=list)
    """Samples of each step, in the order in which they were accumulated."""
    weights: list[dict[SampleId, float]] = field(default_factory=list)
    """What each weighed in its step's gradient."""
    calls: list[str] = field(default_factory=list)
    accumulate_s: float = 0.0
    _gradient: dict[SampleId, float] = field(default_factory=dict)

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        self.calls.append("score")
        return [TokenScores() for _ in requests]

    def how_lost(self) -> str | None:
        return None

    async def hand_over(self) -> HandOver:
        return HandOver(weights=None, probe=f"version {self.version}")

    async def offload(self) -> None:
        pass

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        self.calls.append("accumulate" if replicas is None else f"accumulate on {[*replicas]}")
        await asyncio.sleep(self.accumulate_s)
        for sample in samples:
            assert sample.sample not in self._gradient, "accumulated twice"
            self._gradient[sample.sample] = sample.token_weight

    async def rescale(self, factor: float) -> None:
        self.calls.append("rescale")
        for sample in self._gradient:
            self._gradient[sample] *= factor

    async def update(self) -> dict[str, float]:
        self.calls.append("update")
        self.trained.append(list(self._gradient))
        self._gradient = {}
        return {"actor/loss": 3.0, "train/tokens": 5.0}

    async def apply(self) -> dict[str, float]:
        self.calls.append("apply")
        self.trained.append(list(self._gradient))
        self.weights.append(self._gradient)
        self._gradient = {}
        if self.fail_at == self.version + 1:
            assert self.error is not None
            raise self.error
        self.version += 1
        return {"actor/grad_norm": 1.0}

    def save(self, folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "version.txt").write_text(str(self.version))

    def load(self, folder: Path) -> None:
        self.version = int((folder / "trainer" / "version.txt").read_text())


@dataclass
class FakeReward:
    names: tuple[str, ...] = ("fake",)
    hangs: bool = False
    delay: Callable[[RewardInput], float] = lambda sample: 0.0
    """Seconds until the verdict."""
    verdict: Callable[[RewardInput], Scored | Failed] = lambda sample: Scored(
        value=len(sample.completion_tokens) % 2, parts={"fake": 1.0}
    )

    down: str | None = None
    """What it says that it waits for."""
    gave_up: str | None = None
    """Why it says that there will be no verdict any more."""
    closed: bool = False

    async def open(self) -> None:
        pass

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed]:
        """A check that would take longer than its limit fails when the limit is reached."""
        if self.hangs:
            await asyncio.sleep(1000)
        seconds = max(map(self.delay, samples))
        if timeout_s is not None and seconds > timeout_s:
            await asyncio.sleep(timeout_s)
            return [Scored(value=0.0, seconds=timeout_s, timed_out=True) for _ in samples]
        await asyncio.sleep(seconds)
        return [self.verdict(sample) for sample in samples]

    def outage(self) -> str | None:
        return self.down

    def broken(self) -> str | None:
        return self.gave_up

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        self.closed = True


PROMPTS = PromptSet(
    rows=tuple(PromptRow(prompt=f"p{n}", tokens=(1, n), columns={}) for n in range(30)),
    fingerprint="none",
)


def build_samples(
    groups: Sequence[Sequence[tuple[Response, float]]],
    *,
    weights: Sequence[Sequence[float]] | None = None,
    scores: object = None,
    partial: bool = False,
    updates: Sequence[int] | None = None,
    reward_parts: object = None,
    turn_rewards: object = None,
) -> tuple[list, dict]:
    num_samples = 1 if partial else sum(map(len, groups))
    of_sample = None if weights is None else iter([w for group in weights for w in group])
    flat = [
        TrainSample(
            sample=response.sample,
            prompt_tokens=response.prompt_tokens,
            response_tokens=response.tokens,
            rollout_log_probs=response.log_probs,
            advantage=reward,
            token_weight=(1.0 if of_sample is None else next(of_sample)) / num_samples,
        )
        for group in groups
        for response, reward in group
    ]
    return flat, {}


def run_config(steps: int = 6, **deadlines: float) -> RunConfig:
    return RunConfig(
        name="fake",
        model=ModelConfig(path="nowhere"),
        data=DataConfig(train=DatasetConfig(kind="jsonl", path="nowhere")),
        rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=2, max_response_tokens=9),
        train=TrainConfig(steps=steps),
        rewards=(RewardConfig(function="fake", timeout_s=0.1),),
        eval=EvalConfig(every_steps=2),
        checkpoint=CheckpointConfig(every_steps=2),
        deadlines=DeadlineConfig(**deadlines),
    )


class Recorder:
    def __init__(self) -> None:
        self.entries: list[Any] = []

    def feed(self, entry: Any) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        pass


def make(
    folder: Path,
    config: RunConfig,
    *,
    engine: FakeEngine | None = None,
    engines: Engines | None = None,
    trainer: FakeTrainer | None = None,
    reward: Reward | None = None,
    rewards: RewardScheduleConfig | None = None,
    job: Job | None = None,
    cursor: PromptCursor | None = None,
    salvage: Salvage | None = None,
    carried: CarriedTokens | None = None,
    evaluates: bool = True,
    controller_class: type[Controller] = Controller,
    job_class: type[Job] = Job,
    seat: Seat | None = None,
) -> tuple[Controller, Recorder]:
    """`job`, `cursor`, `salvage` and `carried` are a checkpoint's; None: a new run's. `evaluates`:
    there are prompts to evaluate on. `engines`: instead of the one. `seat`: the run shares its
    pools."""
    recorder = Recorder()
    if seat is not None:
        job_class = PooledJob
    job = job or job_class(
        JobConfig(
            prompts_per_step=config.rollout.prompts_per_step,
            samples_per_prompt=config.rollout.samples_per_prompt,
            max_steps=config.train.steps,
            max_response_tokens=config.rollout.max_response_tokens,
            tail_batching=config.tail_batching,
            dynamic_sampling=config.rollout.dynamic_sampling,
            stream=config.stream_trainer,
            rewards=rewards or RewardScheduleConfig(),
            parallelism=config.parallelism_planner,
            fleet=config.rollout.fleet(config.parallelism_planner)
            if config.engines_are_apart
            else None,
            trainer_apart=config.trainer_apart,
            layouts=(config.layout,),
            max_trainer_losses=None if config.train.processes is None else 3,
            shares_pools=seat is not None,
            cadence=Cadence(
                checkpoint_every_steps=config.checkpoint.every_steps,
                evaluates=evaluates,
                eval_every_steps=config.eval.every_steps,
            ),
        )
    )
    engines = engines or Engines([engine or FakeEngine()])
    trainer = trainer or FakeTrainer()
    at_hand = HandOver(weights=None, probe=f"version {trainer.version}")
    engines.expect(Weights(trainer.version, at_hand))
    parts = Parts(
        job=job,
        engines=engines,
        trainer=trainer,
        reward=reward or FakeReward(),
        prompts=PROMPTS,
        eval_prompts=replace(PROMPTS, rows=PROMPTS.rows[:5]) if evaluates else None,
        cursor=cursor or PromptCursor("train", len(PROMPTS.rows), 0, True, None),
        build_samples=build_samples,
        decode=lambda tokens: "x" * len(tokens),
        render=lambda tokens: "<s>" + "y" * (len(tokens) - 1),
        log=LogWriter(folder / "events.jsonl"),
        samples=SampleWriter(folder),
        carried=carried,
        observers=[recorder],
    )
    controller = controller_class(
        config,
        parts,
        checkpoints=folder / "checkpoints",
        time_s=0.0,
        salvage=salvage,
        seat=seat,
    )
    controller.open(started_at="2026-01-01T00:00:00+00:00", began_s=0.0)
    return controller, recorder


def drive(controller: Controller) -> str:
    async def go() -> str:
        try:
            return await controller.run()
        finally:
            await controller.close()

    return asyncio.run(go())
