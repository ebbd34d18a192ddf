"""A scenario is what is simulated: a model on a cluster, its workload, and the system that runs it.
A scenario is a YAML file, checked like a run's config. `system` names a preset for some sections
(the switches); values that the file or an override sets there win over the preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollpacker.bounds import check_at_least
from rollpacker.config.check import Checker
from rollpacker.config.document import ConfigError, parse_document, read_text
from rollpacker.config.fields import field_types
from rollpacker.config.load import load_config
from rollpacker.core.fleet.routing import Routing
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.job.config import check_look_ahead
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.pipeline.sim.machine import Trainer, check_pipeline
from rollpacker.pipeline.sim.spec import PIPELINES
from rollpacker.sim.devices_spec import Cluster as Cluster
from rollpacker.sim.devices_spec import check_training_memory
from rollpacker.sim.drafts import Drafts, Speculation
from rollpacker.sim.given_constants import given_constants
from rollpacker.sim.hardware import MODELS, ModelShape
from rollpacker.sim.latency import DatasheetModel
from rollpacker.sim.presets import SWITCHES, SYSTEMS
from rollpacker.sim.scenario_checks import (
    check_known,
    check_seconds,
    listed,
)
from rollpacker.sim.train_spec import TrainSpec as TrainSpec
from rollpacker.sim.turns_spec import TurnsSpec
from rollpacker.sim.unkind import UnkindConfig
from rollpacker.sim.workload_spec import LengthLaw, RewardStage

SHARE_TOLERANCE = 0.01
"""Amount by which the sum of shares may differ from 1, so that three times 0.333 is accepted."""
MAX_SAMPLES = 10_000_000
"""Most samples of a step, or of steps that an oracle sorts together; memory holds no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """How responses are generated in a simulation (`rollout.*`)."""

    prompts_per_step: int
    """P0: number of prompts that each optimizer step trains on."""
    samples_per_prompt: int
    """R0: number of responses to each prompt."""
    max_response_tokens: int
    """The cap: number of tokens at which a longer response is cut off."""
    tensor_parallel: int = 1
    """Number of GPUs of one engine; with the parallelism planner, that number at the start."""
    prompt_tokens: int = 200
    """Mean length of a prompt, in tokens."""
    max_running: int | None = None
    """Most sequences that an engine decodes at once; None: as many as its KV cache holds."""
    speculation: Speculation | None = None
    drafts: Drafts | None = None
    """How tokens are guessed, which every decode step verifies; None: none are guessed."""
    routing: Routing = "turns"
    """Rule for the engine that a sample goes to. `turns`: engines take turns; `spread`: the engine
    with the least work left; `group`: one engine for all samples of a prompt."""
    moves: bool = True
    """Whether unfinished samples can move between engines: to the replacement of a lost engine, and
    away from engines whose devices are released."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompts_per_step", "max_response_tokens", "tensor_parallel")
        check_at_least(self, 1, "prompt_tokens", "max_running")
        check_at_least(self, 2, "samples_per_prompt")
        samples = self.prompts_per_step * self.samples_per_prompt
        if samples > MAX_SAMPLES:
            raise ValueError(
                f"prompts_per_step x samples_per_prompt are {samples:,} samples of a step, more "
                f"than can be simulated ({MAX_SAMPLES:,}): lower one of them"
            )
        if self.speculation is not None and self.drafts is not None:
            raise ValueError("speculation and drafts are two models of the same: set one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScheduler:
    """When responses are checked, and for how long (`reward_scheduler.*`)."""

    overlap: bool = True
    """Whether each response is checked as soon as it is generated. False: all after the rollout."""
    adaptive_timeout: bool = True
    """Whether a check's time limit adapts to the slowest check of a correct response so far."""
    colocated_judge: bool = True
    """Whether the judge model shares the rollout's GPUs. False: it has its own, and is slower."""
    order: Literal["fifo", "closest", "longest"] = "fifo"
    """The response that is checked next. fifo: the first to come; closest: one whose prompt lacks
    the fewest verdicts; longest: the one whose check is expected to take longest."""
    cancel: bool = False
    """Whether running checks of samples that are not needed any more are ended, as in real runs.
    Off by default, since the constants were calibrated without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSwitch:
    """The planner of the engines' tensor-parallel degree (`parallelism_planner.*`)."""

    enabled: bool = True
    """Whether the planner may change the degree between rounds. False: it stays
    `rollout.tensor_parallel`."""
    resize_s: float = 0.0
    """Seconds until engines with a new tensor-parallel degree have started."""

    def __post_init__(self) -> None:
        check_seconds("resize_s", self.resize_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrySpec:
    """How often tokens kept for deferred prompts change under newer weights (`carry.*`)."""

    mismatch: float = 0.0
    """Chance per token and weight update that a token kept from an earlier launch comes out
    differently under the newer weights."""
    mismatch_band: tuple[float, float] | None = None
    """Lowest and highest value that `mismatch` may have; a plan's settings must keep trained
    lengths near the policy's own at both. None: `mismatch` is exact."""

    def __post_init__(self) -> None:
        for name, rate in (
            ("mismatch", self.mismatch),
            *(("mismatch_band", rate) for rate in self.mismatch_band or ()),
        ):
            if not 0 <= rate <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {rate}")
        low, high = self.mismatch_band or (self.mismatch, self.mismatch)
        if not low <= self.mismatch <= high:
            raise ValueError(
                f"mismatch_band ({low:g} to {high:g}) must hold mismatch ({self.mismatch:g})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleSpec:
    """Advantages of a system that knows all lengths, as only a simulator can (`oracle.*`)."""

    reorder_window: int = 0
    """Number of steps whose prompts are sorted together by longest response; 0: no sorting."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "reorder_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation depends on: model, cluster, workload and system."""

    name: str
    """Title of pictures and tables of the simulation."""
    model: str | ModelShape
    """Name of a model preset, or the shape of a model (its layers, width, heads and parameters)."""
    cluster: Cluster
    rollout: RolloutSpec
    lengths: LengthLaw | None = None
    """Length law of every response whose reward stage has none. None: each stage has its own."""
    rewards: tuple[RewardStage, ...] = ()
    """Ways to check responses, mixed by share of prompts; empty: every verdict is there at once."""
    turns: TurnsSpec | None = None
    """Turns of model and environment, of which a sample consists; None: it is one response."""
    train: TrainSpec = field(default_factory=TrainSpec)
    sync_s: float | None = None
    """Seconds to bring new weights into engines; None: estimated from the model's size."""
    system: str = "rollpacker"
    """Name of a system's preset, which sets the sections from `tail_batching` to `oracle` below."""
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    reward_scheduler: RewardScheduler = field(default_factory=RewardScheduler)
    parallelism_planner: ParallelismSwitch = field(default_factory=ParallelismSwitch)
    stream_trainer: StreamConfig = field(default_factory=StreamConfig)
    oracle: OracleSpec = field(default_factory=OracleSpec)
    carry: CarrySpec = field(default_factory=CarrySpec)
    unkind: UnkindConfig | None = None
    """Faults to simulate, such as engines that fail and verdicts that get lost; None: no faults."""
    steps: int = 40
    """Number of optimizer steps to simulate."""
    seed: int = 0
    """Seed of prompts, lengths, verdicts and faults."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps")
        check_seconds("sync_s", self.sync_s)
        if isinstance(self.model, str):
            check_known("model", self.model, MODELS)
        check_known("system", self.system, SYSTEMS)
        self._check_rewards()
        self._check_lengths()
        self._check_pipeline()
        self._check_degrees()
        self._check_memory()
        self._check_engines()
        if self.cluster.is_apart and self.stream_trainer.enabled:
            key = "train_gpu" if self.cluster.train_gpus is None else "train_gpus"
            raise ValueError(
                f"cluster.{key} gives the trainer devices of its own, and stream_trainer those of "
                "the rollout: set stream_trainer.enabled=false"
            )
        tail = self.tail_batching
        window = self.oracle.reorder_window * self.rollout.prompts_per_step
        if window * self.rollout.samples_per_prompt > MAX_SAMPLES:
            raise ValueError(
                f"oracle.reorder_window is {self.oracle.reorder_window}, which sorts more than "
                f"{MAX_SAMPLES:,} samples together: lower it"
            )
        check_look_ahead(tail, streams=self.stream_trainer.enabled, acts=self.turns is not None)
        if self.turns is not None and tail.carries and tail.carry == "weighted":
            raise ValueError(
                "tail_batching.carry=weighted does not go with turns: environments are asked anew, "
                "and tokens behind their answers cannot stay as they are. Leave it out"
            )
        if tail.debias != "none" and self.stream_trainer.enabled:
            raise ValueError(
                f"tail_batching.debias is {tail.debias}, but a sample's weight is known only when "
                "its round is over, and stream_trainer trains on it before: set "
                "stream_trainer.enabled=false or debias=none"
            )
        if tail.enabled and tail.race == "scored" and not self.reward_scheduler.overlap:
            raise ValueError(
                "tail_batching.race is scored, but without reward_scheduler.overlap nothing is "
                "scored before the rollout ends: set race=generated or overlap=true"
            )

    @property
    def shape(self) -> ModelShape:
        return MODELS[self.model] if isinstance(self.model, str) else self.model

    @property
    def trainer(self) -> Trainer:
        """The parts of the scenario on which the trainer's time and memory depend."""
        return Trainer(self.train, self.cluster, self.shape)

    @property
    def stages(self) -> tuple[RewardStage, ...]:
        """The ways to check responses: `rewards`, or if that is empty one stage without a check."""
        return self.rewards or (RewardStage(kind="none", share=1.0),)

    def law_of(self, stage: RewardStage) -> LengthLaw:
        """Length law of responses to the prompts of this reward stage."""
        law = stage.lengths or self.lengths
        assert law is not None
        return law

    @property
    def max_tokens(self) -> int:
        """Most tokens of a response, or of a whole trajectory if samples have turns."""
        return self.rollout.max_response_tokens if self.turns is None else self.turns.max_tokens

    @property
    def _cap_key(self) -> str:
        return "rollout.max_response_tokens" if self.turns is None else "turns.max_tokens"

    def _check_rewards(self) -> None:
        if not self.rewards:
            return
        total = sum(stage.share for stage in self.rewards)
        if abs(total - 1) > SHARE_TOLERANCE:
            shares = " + ".join(f"{stage.share:g}" for stage in self.rewards)
            raise ValueError(
                f"rewards have shares that add up to {total:g} ({shares}), not to 1: change "
                "rewards.N.share"
            )
        kinds = [stage.kind for stage in self.rewards]
        for index, kind in enumerate(kinds):
            if kind in kinds[:index]:
                raise ValueError(
                    f"rewards.{index}.kind is {kind} for the second time: make one stage of both, "
                    "with the sum of their shares"
                )

    def _check_lengths(self) -> None:
        if self.lengths is not None:
            self._check_cap("lengths", self.lengths)
        elif not self.rewards:
            raise ValueError("lengths is not set: give a preset, quantiles or a trace")
        for index, stage in enumerate(self.rewards):
            if stage.lengths is not None:
                self._check_cap(f"rewards.{index}.lengths", stage.lengths)
            elif self.lengths is None:
                raise ValueError(
                    f"rewards.{index}.lengths is not set: set it, or lengths for all rewards"
                )

    def _check_cap(self, place: str, law: LengthLaw) -> None:
        cap = self.rollout.max_response_tokens
        beyond = [q for q, tokens in sorted((law.quantiles or {}).items()) if tokens > cap]
        if beyond:
            assert law.quantiles is not None
            raise ValueError(
                f"{place}.quantiles has {law.quantiles[beyond[0]]} tokens at {beyond[0]:g}, more "
                f"than rollout.max_response_tokens ({cap}), where every response is cut: write "
                f"{cap} there, or raise the cap"
            )

    def _check_degrees(self) -> None:
        cluster = self.cluster
        gpus, key = cluster.trainer_gpus, "train_gpus" if cluster.is_apart else "gpus"
        for name, degree, node in (
            ("rollout.tensor_parallel", self.rollout.tensor_parallel, cluster.node_gpus),
            ("train.tensor_parallel", self.train.tensor_parallel, min(gpus, cluster.gpus_per_node)),
        ):
            if node % degree:
                raise ValueError(
                    f"{name} must divide the GPUs of a node ({node}), not be {degree}: take "
                    f"{listed(d for d in range(1, node + 1) if node % d == 0)}"
                )
        replica = self.train.replica_gpus
        if gpus % replica:
            degrees = (
                f"{self.train.tensor_parallel} x {self.train.stages} x "
                f"{self.train.context_parallel}"
            )
            raise ValueError(
                f"train has the degrees tensor x pipeline x context_parallel = {degrees} = "
                f"{replica}, which must divide cluster.{key} ({gpus}): lower one or change the GPUs"
            )

    def _check_pipeline(self) -> None:
        longest = self.rollout.prompt_tokens + self.rollout.max_response_tokens
        check_pipeline(self.trainer, longest_tokens=longest)

    def _check_engines(self) -> None:
        stream = self.stream_trainer
        if stream.enabled and stream.kinds and not self.rollout.moves:
            raise ValueError(
                "rollout.moves is false, and stream_trainer.kinds are set, but devices are "
                "released only where samples can move: set rollout.moves=true or "
                "stream_trainer.kinds=[]"
            )

    def _check_memory(self) -> None:
        check_training_memory(self.shape.params, self.cluster)
        degree = self.rollout.tensor_parallel
        machine = DatasheetModel(model=self.shape, gpu=self.cluster.gpu_spec)
        try:
            capacity = machine.kv_tokens(degree)
        except ValueError as error:
            raise ValueError(f"rollout.tensor_parallel is {degree}: {error}") from None
        longest = self.rollout.prompt_tokens + self.max_tokens
        if capacity < longest:
            raise ValueError(
                f"rollout.tensor_parallel is {degree}: beside the weights an engine's cache has "
                f"room for {capacity} tokens, less than one response of full length with its "
                f"prompt ({longest}): raise it, or lower {self._cap_key}"
            )


def load_scenario(
    path: str | Path, overrides: Sequence[str] = (), system: str | None = None
) -> Scenario:
    """Read a scenario from a file and apply the overrides. `system` (preset name) is simulated
    instead of the file's own system; None: the file's own. Another system has the sections of its
    preset as they are there, whatever the file and the overrides say of them.

    If an override sets another model, measured constants that the file gives for its own model are
    left out (`given_constants`). Raises `ConfigError` with one message.
    """
    _refuse_run_config(path)
    overrides = [*overrides, *given_constants(path, overrides).resets]
    scenario = load_config(path, overrides, Scenario, below=_preset)
    if system is None:
        return scenario
    try:
        return with_system(scenario, system)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _refuse_run_config(path: str | Path) -> None:
    """Raises `ConfigError` if the file is a run's config and no scenario."""
    tree, _ = parse_document(read_text(path), str(path))
    if {"data", "rollout"} <= tree.keys() and "cluster" not in tree:
        raise ConfigError(
            f"{path} is the config of a run, not a scenario (it has data and no cluster). "
            f"Scenarios are in configs/scenarios; of a run that has been made give the folder: "
            f"rollpacker simulate --from runs/NAME, or rollpacker plan runs/NAME"
        )


def with_system(scenario: Scenario, system: str) -> Scenario:
    """The scenario with another system: the preset `system` replaces all the sections `SWITCHES`.
    Unchanged if it is the scenario's own system. Raises `ValueError` for an unknown system."""
    if system == scenario.system:
        return scenario
    check_known("system", system, SYSTEMS)
    checker = Checker({})
    types = field_types(Scenario)
    switches = {
        name: checker.build(types[name], SYSTEMS[system][name], (name,)) for name in SWITCHES
    }
    assert not checker.problems, checker.problems
    return dataclasses.replace(scenario, system=system, **switches)


def with_pipeline(scenario: Scenario, name: str) -> Scenario:
    """The scenario with another schedule of pipeline stages (order of work, and links), by its name
    in `PIPELINES`. Raises `ValueError` if the scenario's trainer has no pipeline."""
    if scenario.train.pipeline is None:
        raise ValueError(
            f"{name} is the order of a pipeline, and the scenario has none: set "
            "train.pipeline.stages"
        )
    order, links = PIPELINES[name]
    pipeline = dataclasses.replace(scenario.train.pipeline, order=order, links=links)
    train = dataclasses.replace(scenario.train, pipeline=pipeline)
    return dataclasses.replace(scenario, train=train)


def _preset(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Preset values of the system that a scenario file names; empty if it is unknown."""
    name = tree.get("system", "rollpacker")
    return SYSTEMS.get(name, {}) if isinstance(name, str) else {}
